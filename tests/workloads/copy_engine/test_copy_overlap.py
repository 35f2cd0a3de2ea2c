"""GEMMs and copies: on the CPU for real; on a GPU what only one shows."""

import threading
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import overlap_sweep.runtime.point as point_module
import overlap_sweep.workloads.copy_engine.run as copy_overlap
from overlap_sweep.errors import Refused, UserError, WrongNumbers
from overlap_sweep.gpus import visible_gpus
from overlap_sweep.measure import Ranks
from overlap_sweep.results.points import read_points
from overlap_sweep.results.records import read_records
from overlap_sweep.runtime.group_config import GroupConfig, worker_environment
from overlap_sweep.workloads.copy_engine import WORKLOAD
from overlap_sweep.workloads.copy_engine.config import Resolved
from overlap_sweep.workloads.copy_engine.result import CHUNKED, VARIANTS
from overlap_sweep.workloads.copy_engine.run import run
from overlap_sweep.workloads.copy_engine.section import measured
from tests.composed import composed
from tests.make_point import copy_config, make_point, resolved
from tests.trace.conftest import analyse_trace

ALONE = Ranks(0, 1, torch.device("cpu"))


def point(profile: str = "none", **asked: Any) -> Resolved:
    known = {"matrix_size": 64, "copy_mb": 0.5, "direction": "device_to_device", "dtype": "float32"}
    amounts = {"gemms": 2, "copies": 3, "chunks": None, "device": 0}
    measuring = {"warmup": 1, "repeats": 5, "seed": 0}
    found: Resolved = resolved("copy_engine", workload=measuring, copy_engine=known | amounts | asked, profile=profile)
    return found


@pytest.mark.parametrize("chunks", [None, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_is_timed_side_by_side_and_what_runs_at_once_and_in_sequence_is_profiled(
    tmp_path: Path, dtype: str, chunks: int | None
) -> None:
    # 64 rows in chunks of 13 and 12.
    found = run(point("all", dtype=dtype, chunks=chunks), tmp_path, ALONE)
    copies = found["measured"]
    in_chunks = ["chunked_gemm", "chunked_overlapped"] if chunks else []
    assert list(copies.times) == ["gemm", "copy", "sequential", "overlapped", *in_chunks]
    assert all(len(timing.samples_us) == 5 and timing.median_us > 0 for timing in copies.times.values())
    assert found["objective_us"] == list(copies.times.values())[-1].median_us
    assert (copies.bytes_copied, copies.flops) == (3 * 2**19, 2 * 2 * 64**3)
    assert not found["launch_bound"]
    assert found["traces"] == ["trace_rank0.json.gz", "trace_none_rank0.json.gz"]
    for name, gemms in zip(found["traces"], (2 * (chunks or 1), 2), strict=True):
        rows = [row for row in analyse_trace(tmp_path / name) if row.phase == "all"]
        assert [row.num_gemm_events for row in rows] == [gemms, gemms]


def test_two_threads_run_both_at_once_and_sequential_one_after_the_other() -> None:
    """How much of real work overlaps is the machine's affair: here each waits until the other runs, too."""
    met, ran = threading.Barrier(2), list[str]()

    def part(name: str, meets: bool) -> None:
        ran.append(f"{name} begins")
        if meets:
            met.wait(60)
        ran.append(f"{name} ends")

    def work(meets: bool) -> copy_overlap.Work:
        gemms, copies = partial(part, "gemms", meets), partial(part, "copies", meets)
        return copy_overlap.Work(gemms, lambda: None, copies, stream=None, product=torch.zeros(1), pairs=[])

    work(meets=True).run("overlapped")
    assert sorted(ran) == ["copies begins", "copies ends", "gemms begins", "gemms ends"]
    ran.clear()
    work(meets=False).run("sequential")
    work(meets=False).run("copy")
    assert ran == ["gemms begins", "gemms ends", *["copies begins", "copies ends"] * 2]
    with pytest.raises(ZeroDivisionError):
        replace(work(meets=False), copies=lambda: 1 / 0).run("overlapped")


def test_no_trace_is_exported_on_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3.42131")
    found = run(point("all"), tmp_path, ALONE)
    assert found["traces"] == []
    assert "profiling.rocprofv3=true records a trace" in found["warnings"][0]
    assert list(tmp_path.iterdir()) == []


def test_what_is_lost_at_once_is_wrong_numbers() -> None:
    work = copy_overlap._work(point(chunks=3), ALONE)
    copy_overlap._check(work, ALONE, chunked=True)
    with pytest.raises(WrongNumbers, match="GEMMs in chunks differ from whole ones"):
        copy_overlap._check(replace(work, chunks=lambda: work.product[1:].fill_(0.0)), ALONE, chunked=True)
    with pytest.raises(WrongNumbers, match="GEMMs in chunks differ from whole ones"):
        copy_overlap._check(replace(work, chunks=lambda: None), ALONE, chunked=True)
    work.pairs[0][1].zero_()
    with pytest.raises(WrongNumbers, match="differ from those run alone"):
        copy_overlap._check(replace(work, copies=lambda: None), ALONE, chunked=False)


@pytest.mark.parametrize(("copy_mb", "copies", "count"), [(0.5, 3, 3), (1.0, 9, 3), (3.0, 9, 1)])
def test_copies_take_turns_through_more_memory_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch, copy_mb: float, copies: int, count: int
) -> None:
    monkeypatch.setattr(copy_overlap, "LEAST_COPIED_BYTES", 5 * 2**19)
    work = copy_overlap._work(point(copy_mb=copy_mb, copies=copies), ALONE)
    assert len(work.pairs) == count


def test_gpus_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    with pytest.raises(Refused, match="cuda:0 has no peer access to cuda:1"):
        copy_overlap._places("peer", torch.device("cuda", 0))


@pytest.mark.quiet
@pytest.mark.parametrize(
    "direction",
    [
        pytest.param(name, marks=pytest.mark.gpu(count=2 if name == "peer" else 1))
        for name in ("device_to_device", "host_to_device", "device_to_host", "peer")
    ],
)
def test_on_gpus_copies_run_beside_gemms_within_the_time(tmp_path: Path, direction: str) -> None:
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    sizes = {"matrix_size": 4096, "copy_mb": 16.0, "gemms": 4, "copies": 4, "chunks": 4}
    asked = point("all", direction=direction, dtype="bfloat16", **sizes)
    found = run(asked, tmp_path, ranks)
    assert not found["launch_bound"]
    us = {name: timing.median_us for name, timing in found["measured"].times.items()}
    # All of both is inside of what is timed.
    assert us["overlapped"] >= 0.95 * max(us["gemm"], us["copy"])
    assert us["sequential"] == pytest.approx(us["gemm"] + us["copy"], rel=0.2)
    # Copies within a GPU take memory bandwidth and SMs from the GEMMs, and may gain nothing.
    assert us["overlapped"] < us["sequential"] * (1.02 if direction == "device_to_device" else 1.0)
    assert us["chunked_overlapped"] >= 0.95 * max(us["chunked_gemm"], us["copy"])


def test_another_gpu_is_the_first_one_that_its_worker_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setattr(point_module, "visible_gpus", visible_gpus.__wrapped__)
    asked = ("workload=copy_engine", "runtime.device=cuda", "copy_engine.direction=peer")
    first, last = (composed(*asked, *more) for more in ((), ("copy_engine.device=2",)))
    seen = [worker_environment(GroupConfig.of(one))["CUDA_VISIBLE_DEVICES"] for one in (first, last)]
    # After the last one the first comes next, which receives the copies.
    assert seen == ["4,6,7", "7,4,6"]
    with pytest.raises(UserError, match=r"^copy_engine.device=3 needs 4 GPUs, but 3 are visible; use a smaller number"):
        composed(*asked, "copy_engine.device=3")
    refused = WORKLOAD.refusal(composed("workload=copy_engine", "runtime.device=cpu", "copy_engine.device=1"))
    assert refused == "copy_engine.device=1 needs a GPU"


def test_other_chunks_are_another_case_in_comparisons(tmp_path: Path) -> None:
    make_point("copy_engine", tmp_path, copy_config(**{"copy_engine.chunks": 2}), in_chunks_us=(1000.0, 1100.0))
    make_point("copy_engine", tmp_path, copy_config())
    settings: dict[str | None, set[str]] = defaultdict(set)
    for time in measured(read_points(tmp_path).points, read_records(tmp_path)).times:
        settings[time.key.operator].add(time.key.setting)
    assert settings == {
        "host_to_device, 4 GEMMs of 4096, 4 x 64 MiB": set(VARIANTS),
        "host_to_device, 4 GEMMs of 4096 in 2 chunks, 4 x 64 MiB": {*VARIANTS, *CHUNKED},
    }
