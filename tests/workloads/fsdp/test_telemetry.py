"""Telemetry of training runs: read in whatever state it is, its warm-up, and the steps that hide less. What its numbers
are, and what is said of runs that are left out: telemetry, made/compared and
made/telemetry_troubles among the golden files."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.workloads.fsdp import telemetry
from overlap_sweep.workloads.fsdp.compare import UNKNOWN, compare, match_runs
from overlap_sweep.workloads.fsdp.runs import STEPS, Dataset, Run, read_dataset
from tests.analyze import analyze
from tests.make_point import make_point, missing_point, plain
from tests.workloads.fsdp.telemetry_logs import SLOW_DEVICE, record, wobbling, write_logs, write_run


def read(directory: Path) -> Dataset:
    return read_dataset("a", directory)


def only_run(directory: Path) -> Run:
    (run,) = read(directory).runs
    return run


def counted(run: Run) -> list[int]:
    return [step.number for step in run.counted]


@pytest.mark.parametrize("step", [{"spread_us": 600.0}, {"step_us": 1000.0, "none_us": 1000.0, "floor_us": 1000.0}])
def test_a_hidden_fraction_that_says_nothing_is_left_out(tmp_path: Path, step: dict[str, float]) -> None:
    """All noise, or without communication."""
    assert "hidden_fraction" not in only_run(write_run(make_point("fsdp", tmp_path, **step))).estimates


def test_without_communication_nothing_is_hidden(tmp_path: Path) -> None:
    records = [record(number, hidden_ms=0.0, exposed_ms=0.0) for number in range(8)]
    run = only_run(write_logs(tmp_path, records))
    assert run.estimates["comm_ms"].time_us == 0
    assert not run.estimates.keys() & {"hidden_comm_fraction", "overlap_ratio"}
    assert run.dips == []


@pytest.mark.parametrize(("steps", "warm_up"), [(3, 1), (8, 1), (10, 1), (30, 3), (31, 4)])
def test_warm_up_is_the_first_tenth_of_the_steps(tmp_path: Path, steps: int, warm_up: int) -> None:
    run = only_run(write_logs(tmp_path, [record(number) for number in range(steps)]))
    assert counted(run) == list(range(warm_up, steps))


def test_profiled_and_incomplete_steps_are_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=10, profiled=3)
    path = directory / "rank_1_metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], *lines[5:-1]]))
    assert counted(only_run(directory)) == [1, 2, 3, 5, 6, 7, 8, 9]


def test_many_runs_of_a_sweep_and_their_names(tmp_path: Path) -> None:
    for place in ("a/fsdp_1", "a/fsdp_2", "b/fsdp_2"):
        write_run(tmp_path / place, steps=5)
    assert [run.name for run in read(tmp_path).runs] == ["fsdp_1", "a/fsdp_2", "b/fsdp_2"]


@pytest.mark.parametrize(("asked", "ranks"), [(None, 3), (4, 4)])
def test_a_killed_run_that_left_its_ranks_to_the_machine_has_those_of_its_logs(
    tmp_path: Path, asked: int | None, ranks: int
) -> None:
    point = plain("fsdp")
    point["distributed"]["dp_size"] = asked
    run = only_run(write_run(missing_point(tmp_path, point), ranks=3))
    assert run.point
    assert (run.num_ranks, run.point.status, run.settings["distributed.dp_size"]) == (ranks, "missing", asked)


@pytest.mark.parametrize("cut", [1, 400])
def test_a_cut_off_last_line_is_no_problem(tmp_path: Path, cut: int) -> None:
    path = write_run(tmp_path, steps=6, ranks=1) / "rank_0_metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    reading = read(tmp_path)
    assert reading.problems == []
    assert sorted(reading.runs[0].by_rank[0]) == list(range(5))


Change = Callable[[dict[str, Any]], Any]
Dips = Mapping[tuple[int, int], Mapping[str, Any]]

BAD_LINES: dict[str, Change | bytes] = {
    "binary": b"\0\1\xff",
    "NaN": b'{"step": 3, "rank": 0, "step_ms": NaN}',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no time": lambda r: r.update(step_ms=0.0),
    "endless time": lambda r: r.update(step_ms=1e300),
    "negative overlap": lambda r: r.update(overlap_ms=-5.0),
    "no streams": lambda r: r.update(streams_ms=[1.0]),
    "an endless stream": lambda r: r["streams_ms"].update(compute=1e200),
    "more overlap than there is": lambda r: r.update(overlap_ratio=7.0),
    "negative step": lambda r: r.update(step=-1),
    "huge step": lambda r: r.update(step=10**30),
    "a fraction of a step": lambda r: r.update(step=1.5),
    "another rank": lambda r: r.update(rank=5),
    "a step once more": lambda r: r.update(step=2),
    "a hot device": lambda r: r["device"].update(temperature_c=1e30),
}


@pytest.mark.parametrize("change", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_one_sentence_and_the_rest_is_read(tmp_path: Path, change: Change | bytes) -> None:
    path = write_run(tmp_path, steps=6, ranks=1) / "rank_0_metrics.jsonl"
    lines = path.read_bytes().splitlines()
    if isinstance(change, bytes):
        lines[3] = change
    else:
        content = json.loads(lines[3])
        change(content)
        lines[3] = json.dumps(content).encode()
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    reading = read(tmp_path)
    (problem,) = reading.problems
    assert problem.startswith(f"{path}: line 4 ")
    assert len(problem) < 500
    assert sorted(reading.runs[0].by_rank[0]) == [0, 1, 2, 4, 5]


def test_large_files_are_not_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=6, ranks=2) / "rank_0_metrics.jsonl"
    with path.open("ab") as file:
        file.truncate(telemetry.MOST_BYTES + 1)
    assert ["1024 MiB" in problem for problem in read(tmp_path).problems] == [True]


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "elsewhere", steps=6)
    root = tmp_path / "root"
    write_run(root / "run", steps=6, ranks=1)
    (root / "run" / "rank_1_metrics.jsonl").symlink_to(elsewhere / "rank_1_metrics.jsonl")
    (root / "linked").symlink_to(elsewhere)
    reading = read(root)
    assert [run.ranks for run in reading.runs] == [[0]]
    assert ["leads out of" in problem for problem in reading.problems] == [True]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=6, ranks=1)
    os.mkfifo(tmp_path / "run" / "rank_1_metrics.jsonl")
    (tmp_path / "run" / "rank_2_metrics.jsonl").mkdir()
    assert read(tmp_path).runs[0].ranks == [0]


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(b"{")
    with pytest.raises(UserError, match="has no complete step"):
        read(tmp_path)


def test_a_loss_that_is_no_number_any_more(tmp_path: Path) -> None:
    records = [record(number, loss=math.nan if number > 3 else 0.5, **wobbling(number)) for number in range(8)]  # type: ignore[arg-type]
    run = only_run(write_logs(tmp_path, records))
    assert run.by_rank[0][7].loss is None
    assert "final_loss" not in run.estimates


EXPOSED = {"hidden_ms": 10.0, "exposed_ms": 30.0, "device": SLOW_DEVICE}
NOISY = {(n, r): {"hidden_ms": 20.0 + (n * 37 % 11) * 2} for n in range(1, 30) for r in range(2)}


@pytest.mark.parametrize(
    ("dips", "expected"),
    [
        ({}, []),
        ({(9, rank): EXPOSED for rank in range(2)}, [9]),
        # Slower, with as much hidden.
        ({(11, 0): {"idle_ms": 40.0}}, []),
        # Noisy steps dip only far beyond their noise.
        (NOISY, []),
        # Far beyond the noise here, but nothing to look at.
        ({(12, rank): {"hidden_ms": 30.0} for rank in range(2)}, []),
    ],
    ids=["all alike", "exposed", "slower", "noisy", "small"],
)
def test_steps_that_hide_much_less_are_found(tmp_path: Path, dips: Dips, expected: list[int]) -> None:
    assert only_run(write_run(tmp_path, dips=dips)).dips == expected


def line(step: int, rank: int = 0, factor: float = 1.0, **changed: Any) -> dict[str, Any]:
    """Computation of 80 ms; an all-reduce from 60 to 88 ms; the batch is copied before, the optimizer runs after."""
    compute, end, total = 10 + 80 * factor, 18 + 80 * factor, 20 + 80 * factor
    segments = [
        (0.0, 10.0, ["aux"]),
        (10.0, 70.0, ["compute"]),
        (70.0, compute, ["allreduce", "compute"]),
        (compute, end, ["allreduce"]),
        (end, end, []),
        (end, total, ["aux"]),
    ]
    overlap = {
        "per_stream_ms": {"aux": 10.0 + total - end, "compute": compute - 10, "allreduce": end - 70},
        "overlap_ms": {"compute_allreduce": compute - 70, "compute_comm": compute - 70, "idle": 0.0},
        "active_segments": [
            {"start_ms": start, "end_ms": stop, "active_streams": streams} for start, stop, streams in segments
        ],
        "utilization": {"compute": 0.8, "allreduce": 0.28, "reducescatter": 0.0, "aux": 0.12},
    }
    profile = {"index": step, "total_ms": total, "ranges": [], "markers": [], "overlap": overlap}
    usual = {"rank": rank, "world_size": 2, "epoch": 0, "step": step, "global_step": step, "loss": 0.7}
    return {**usual, "grad_norm": None, "lr": 1e-4, "profile": profile, **changed}


ROCM_SMI = """============================ ROCm System Management Interface ============================
GPU[0]\t\t: Temperature (Sensor edge) (C): 41.0
GPU[0]\t\t: Temperature (Sensor junction) (C): 47.0
GPU[0]\t\t: Average Graphics Package Power (W): 301.0
GPU[0]\t\t: GPU use (%): 99
GPU[1]\t\t: Temperature (Sensor junction) (C): 52.0
GPU[1]\t\t: Temperature (Sensor memory) (C): 64.0
GPU[1]\t\t: Current Socket Graphics Package Power (W): 344.5
==================================== End of ROCm SMI Log ===================================="""


def write(directory: Path, factor: float = 1.0, ranks: int = 2, steps: int = 20, **changed: Any) -> Path:
    directory.mkdir()
    for rank in range(ranks):
        lines = [json.dumps(line(step, rank, factor, **changed)) for step in range(steps)]
        (directory / f"rank_{rank:02d}_metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_its_figures_are_taken_and_the_exposure_follows_from_its_segments(tmp_path: Path) -> None:
    reading = read_dataset("a", write(tmp_path / "artifacts"))
    (run,) = reading.runs
    step = run.by_rank[1][3]
    assert (step.step_ms, step.overlap_ms, step.exposed_comm_ms) == (100.0, 20.0, 8.0)
    assert step.streams_ms == {"compute": 80.0, "all_reduce": 28.0, "reduce_scatter": 0.0, "auxiliary": 12.0}
    assert (step.compute_allreduce_ms, step.compute_reducescatter_ms, step.compute_auxiliary_ms) == (20.0, 0.0, None)
    assert step.overlap_ratio == 20 / 28
    assert (run.num_ranks, reading.problems) == (2, [])
    assert [warning for warning in reading.warnings if "AORTA's log" in warning] == reading.warnings


def test_it_is_compared_with_another_and_with_our_own(tmp_path: Path) -> None:
    paths = {"aorta": write(tmp_path / "a"), "slower": write(tmp_path / "b", 1.5), "ours": write_run(tmp_path / "c")}
    compared = match_runs([read_dataset(*one) for one in paths.items()], "aorta")
    (slower,), (ours,) = compared.matches.values()
    assert slower.quantities["step_ms"].ratio == 1.4
    assert slower.quantities["step_ms"].verdict == "worse"
    # It has no clocks, samples/s or overlap with the auxiliary stream.
    lacking = {name for name, quantity in ours.quantities.items() if quantity.theirs is UNKNOWN}
    assert lacking == {"compute_auxiliary_ms", "sm_clock_mhz", "power_w", "temperature_c"}
    assert "samples_per_s" not in ours.quantities


def test_learning_rate_norm_and_rocm_smi_are_columns_of_its_steps(tmp_path: Path) -> None:
    recorded = {"lr": 2e-4, "grad_norm": 1.5, "rocm_smi_exit_code": 0, "rocm_smi_output": ROCM_SMI}
    path = write(tmp_path / "a", **recorded)
    (run,) = read_dataset("a", path).runs
    row = STEPS.records(run.steps)[3]
    assert (row["step"], row["loss"], row["learning_rate"], row["grad_norm"]) == (3, 0.7, 2e-4, 1.5)
    # The mean of both ranks' own GPUs.
    assert (row["power_w"], row["temperature_c"], row["sm_clock_mhz"]) == ((301.0 + 344.5) / 2, (47.0 + 52.0) / 2, None)
    (run,) = read_dataset("b", write(tmp_path / "b", grad_norm=float("inf"), rocm_smi_output="no GPU found")).runs
    assert (STEPS.records(run.steps)[3]["grad_norm"], bool(run.known("power_w"))) == (None, False)


def test_a_single_directory_is_reported_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "artifacts", rocm_smi_output=ROCM_SMI)
    ran = analyze("compare", f"rocm={path}", "--output", tmp_path / "out")
    assert ran.returncode == 0
    assert re.search(r"^step_ms +100\.0 +0$", ran.stdout, re.MULTILINE)
    assert " ratio " not in ran.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["datasets"]["rocm"]["runs"]["artifacts"]["aggregates"]["overlap_ratio"]["median"] == 20 / 28
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"comparison.csv", "rocm_steps.csv"}
    assert [chart.file_name for chart in compare([("rocm", path)], "rocm").charts()] == ["rocm_timeline.png"]
    analyze("compare", f"rocm={path}", "--candidate", "rocm").assert_error("--candidate rocm is also the reference")
    analyze("compare", make_point("operator", tmp_path / "sweep")).assert_error("at least two paths", status=2)


def test_missing_ranks_duplicates_and_undefined_losses(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", ranks=1, loss=float("nan"), steps=5)
    path = directory / "rank_00_metrics.jsonl"
    again = line(4), line(5, profile={"total_ms": 1.0}), line(6)
    path.write_text(path.read_text() + "".join(f"{json.dumps(one)}\n" for one in again))
    reading = read_dataset("a", directory)
    (run,) = reading.runs
    assert sorted(run.by_rank[0]) == [0, 1, 2, 3, 4, 6]
    assert run.by_rank[0][1].loss is None
    assert reading.warnings[0] == "a: a has telemetry of only 1 of 2 ranks."
    (problem,) = reading.problems
    assert "line 6 (rank 0, step 4) is another rank's or a duplicate, and 1 more lines" in problem


def test_what_is_in_neither_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1 is not a telemetry record .*required field `overlap`"):
        read_dataset("a", write(tmp_path / "a", profile={"total_ms": 1.0}))
