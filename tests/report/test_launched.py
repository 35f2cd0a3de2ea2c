"""From launch.py to reports and comparisons, each workload in real processes that communicate by gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.analyze import analyze, rows
from tests.sweeps import SMALL, Launch

pytestmark = pytest.mark.end_to_end

SMALL_STEPS = ("ranking.num_layers=2", "ranking.sequence_length=16", "training.batch_size=2", "training.max_steps=6")
SWEEPS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "operators": ((*SMALL, "tp_size=2", "method=none,bulk", "num_sm=1,2"), ("[4/4]",), 4),
    "kernels": (
        ("workload=kernel", "kernel=ag_gemm", "tp_size=2", "m=32", "n=64", "k=64", "iters=3", "backend=torch"),
        ("ag_gemm n=64 k=64 TP=2 fp32 on cpu", "gemm_only"),
        1,
    ),
    "copies": (
        ("workload=copy_engine", "copy_engine.matrix_size=64", "copy_engine.copy_mb=0.1,0.2"),
        ("GEMMs beside copies on cpu", "4 GEMMs of 64, 4 x 0.2 MiB"),
        2,
    ),
    "training": (
        ("workload=fsdp", "model=ranking_tiny", *SMALL_STEPS, "workload.repeats=3", "fsdp.forward_prefetch=false,true"),
        ("ranking_tiny, 2 ranks on cpu: 2 layers, 16 events", "forward_prefetch"),
        2,
    ),
    "stacks": (
        (
            *("workload=tp_training", "impl=fsdp_dtensor", "tp_size=1,2"),
            *("tp_training.num_training_steps=5", "tp_training.warmup_steps=1"),
        ),
        ("qwen3_tiny, 2 layers, sequences of 64", "the losses agree"),
        2,
    ),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_from_launch_to_report_and_comparison(tmp_path: Path, name: str, images: None) -> None:
    overrides, told, points = SWEEPS[name]
    launch = Launch(tmp_path / "sweep")
    process = launch.run("-m", *overrides, "runtime.device=cpu", *(["profile=none"] if name == "training" else []))
    assert (process.returncode, process.stderr) == (0, "")
    assert all(expected in process.stdout for expected in told)
    report = analyze(launch.directory)
    assert (report.returncode, report.stderr) == (0, "")
    assert list((launch.directory / "plots").glob("*.png"))
    results = sorted(path.parent for path in launch.directory.rglob("result.json"))
    assert len(results) == points
    # A sweep is the same as itself.
    same = rows("compare", f"one={launch.directory}", f"other={launch.directory}")
    assert {row["verdict"] for row in same} <= {"same", None}
    if name == "operators":
        one, two = (next(launch.directory.glob(f"*bulk_sm{number}*")) for number in (1, 2))
        assert "setting: " in analyze("compare", one, two).stdout
        traces = analyze("compare", one / "trace_rank0.json.gz", two / "trace_rank0.json.gz", "--by", "class")
        assert (traces.returncode, "gloo" in traces.stdout) == (0, True)
    if name == "training":
        assert {"step_ms", "hidden_share", "samples_per_s", "final_loss"} <= {row["quantity"] for row in same}
        one, two = results
        pair = analyze("compare", f"a={one}", f"b={two}", "--output", tmp_path / "out")
        assert "fsdp.forward_prefetch: " in pair.stdout
        known = json.loads((tmp_path / "out" / "summary.json").read_text())["datasets"]["a"]["runs"][one.name]
        medians = {quantity: aggregate["median"] for quantity, aggregate in known["aggregates"].items()}
        assert 0 < medians["compute_ms"] < medians["step_ms"]
        assert 0 <= medians["hidden_share"] < 1
        assert medians["samples_per_s"] == pytest.approx(4e3 / medians["step_ms"], rel=0.2)
    if name == "stacks":
        found = {path.name: json.loads(path.read_text()) for path in launch.directory.rglob("results_*.json")}
        assert set(found) == {"results_fsdp_dtensor_tp1_dp1.json", "results_fsdp_dtensor_tp2_dp1.json"}
        summary = found["results_fsdp_dtensor_tp2_dp1.json"]["summary"]
        assert (summary["num_steps"], summary["losses_agree"]) == (4, True)
        assert summary["communication"]["total_ms"] >= summary["communication"]["exposed_ms"] >= 0
