"""AORTA's logs, made by hand in the form that its StreamProfiler and MetricsLogger write: none is of a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.workloads.fsdp.compare import UNKNOWN, compare, match_runs
from overlap_sweep.workloads.fsdp.runs import STEPS, read_dataset
from tests.analyze import analyze
from tests.make_point import make_point
from tests.workloads.fsdp.telemetry_logs import write_run


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
    assert (STEPS.records(run.steps)[3]["grad_norm"], "power_w" in run.counted) == (None, False)


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
