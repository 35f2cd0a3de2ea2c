"""Steps with real collectives under torch's schedule, read back by the trace reader."""

import gzip
import json
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.measure import Ranks
from overlap_sweep.measure.profile import ProfiledSteps, profile_steps
from overlap_sweep.trace import TraceRow
from overlap_sweep.trace.disk import find_traces
from tests.processes import run_ranks
from tests.trace.conftest import analyse_trace

pytestmark = pytest.mark.end_to_end

PROFILING: dict[str, Any] = {
    **{"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "tensorboard": False, "chrome_trace": True},
    **dict.fromkeys(("record_shapes", "profile_memory", "with_stack"), False),
}
GEMMS = {"fwd": 1, "bwd": 2, "all": 3}


def _train(calls: list[int]) -> None:
    x, weight = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)
    (x.requires_grad_() @ weight).sum().backward()
    if dist.is_initialized():
        dist.all_reduce(weight.grad)
        # What other threads do is recorded too.
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(64),))
        thread.start()
        thread.join()
    calls.append(len(calls))


def _profile(ranks: Ranks, directory: Path, changes: dict[str, Any]) -> tuple[ProfiledSteps, int]:
    """What was recorded, and how many steps were run."""
    calls: list[int] = []
    return profile_steps(partial(_train, calls), ranks, PROFILING | changes, directory), len(calls)


def alone(directory: Path, **changes: Any) -> tuple[ProfiledSteps, int]:
    return _profile(Ranks(0, 1, torch.device("cpu")), directory, changes)


def gemms(rows: list[TraceRow]) -> dict[int, dict[str, int]]:
    return {
        iteration: {row.phase: row.num_gemm_events for row in rows if row.iteration == iteration}
        for iteration in sorted({row.iteration for row in rows})
    }


def test_every_rank_and_cycle_has_a_trace_of_its_recorded_steps(tmp_path: Path) -> None:
    found = run_ranks(2, _profile, tmp_path, {"repeat": 2}, keep="cpu")
    for steps, calls in found:
        assert calls == 8
        assert steps.active == [2, 3, 6, 7]
        assert steps.warnings == []
        assert set(steps.traces) == {path.name for path in tmp_path.iterdir()}
    active = {f"trace_rank{rank}.json.gz": [2, 3] for rank in range(2)}
    active |= {f"trace_cycle1_rank{rank}.json.gz": [6, 7] for rank in range(2)}
    assert found[0][0].traces == list(active)
    for name in active:
        rows = analyse_trace(tmp_path / name)
        assert gemms(rows) == dict.fromkeys(active[name], GEMMS)
        assert all(row.num_comm_events == 2 and f"rank{row.rank}." in name for row in rows if row.phase == "all")


@pytest.mark.parametrize(("warmup", "active", "repeat"), [(0, 3, 1), (1, 3, 1), (0, 1, 3)])
def test_without_waiting_cycles_follow_each_other_at_once(
    tmp_path: Path, warmup: int, active: int, repeat: int
) -> None:
    steps, calls = alone(tmp_path, wait=0, warmup=warmup, active=active, repeat=repeat)
    cycles = [range(n * (warmup + active) + warmup, (n + 1) * (warmup + active)) for n in range(repeat)]
    assert (calls, steps.active) == (repeat * (warmup + active), [step for cycle in cycles for step in cycle])
    found = [gemms(analyse_trace(tmp_path / name)) for name in steps.traces]
    assert found == [dict.fromkeys(cycle, GEMMS) for cycle in cycles]


@pytest.mark.parametrize("chrome", [True, False])
def test_tensorboard_gets_a_file_for_every_cycle(tmp_path: Path, chrome: bool) -> None:
    for _ in range(2):
        # Of an earlier attempt nothing is left.
        steps, _ = alone(tmp_path, tensorboard=True, chrome_trace=chrome, repeat=2)
    files = sorted((tmp_path / "torch_profiler" / "rank0").iterdir())
    assert all(re.fullmatch(r".+_\d+\.\d+\.pt\.trace\.json\.gz", path.name) for path in files)
    assert [list(gemms(analyse_trace(path))) for path in files] == [[2, 3], [6, 7]]
    assert steps.traces == (["trace_rank0.json.gz", "trace_cycle1_rank0.json.gz"] if chrome else [])
    assert {path.name for path in tmp_path.iterdir()} == {"torch_profiler", *steps.traces}
    # Each step is read once, and the copies if somebody asks for them.
    found = sorted(path.name for path in find_traces(tmp_path))
    assert found == sorted(steps.traces or [path.name for path in files])
    assert find_traces(tmp_path / "torch_profiler") == files


def test_what_is_to_be_recorded_beside_is_in_the_trace(tmp_path: Path) -> None:
    alone(tmp_path, record_shapes=True, profile_memory=True, with_stack=True)
    trace = tmp_path / "trace_rank0.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    products = [event for event in events if event["name"] == "aten::mm"]
    assert products[0]["args"]["Input Dims"] == [[64, 64], [64, 64]]
    assert any(event["name"] == "[memory]" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)
    assert gemms(analyse_trace(trace)) == {2: GEMMS, 3: GEMMS}


@pytest.mark.parametrize(
    ("hip", "tensorboard", "active", "warnings"),
    [("", False, [], 0), ("6.3.42131", False, [], 1), ("6.3.42131", True, [2, 3], 2)],
)
def test_without_anything_to_write_nothing_is_run_and_on_rocm_only_tensorboard_s_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hip: str, tensorboard: bool, active: list[int], warnings: int
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    steps, calls = alone(tmp_path, tensorboard=tensorboard, chrome_trace=bool(hip))
    assert (steps.traces, steps.active, len(steps.warnings)) == ([], active, warnings)
    assert all("No Chrome trace" in said for said in steps.warnings[:1])
    assert (calls > 0) == tensorboard
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent.name for path in files] == ["rank0"] * tensorboard
