"""tuning_report.json and results_*.json: names that other tools read, and numbers that one can compute by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.analysis.frame import COLUMNS
from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.step_communication import StepCommunication, read_communication
from overlap_sweep.analysis.tp_training import TpTrainingAnalysis, analyse_tp_training
from overlap_sweep.report.files import write_reports
from overlap_sweep.report.tp_training_files import results, write_results
from overlap_sweep.run_directory import trace_file
from tests.golden.made_report import TRACES
from tests.make_point import (
    ENVIRONMENT,
    default_timing,
    falling,
    make_point,
    operator_config,
    pass_times,
    rewrite,
    stack_config,
)
from tests.report.page.reports import analysis_of

pytestmark = pytest.mark.usefixtures("no_page")
BULK = operator_config(2, "fc1", "all", "bulk", num_sm=4)
OF_PASSES = ("gemm_time_us", "comm_time_us", "overlap_time_us", "overlap_ratio", "e2e_time_us")
DOCUMENTED_FIELDS = {
    **dict.fromkeys(("config_id", "operator", "phase", "overlap_method"), str),
    **dict.fromkeys((f"{direction}_{name}" for direction in ("forward", "backward") for name in OF_PASSES), float),
    **dict.fromkeys(("operator_e2e_time_us", "total_overlap_ratio"), float),
    **dict.fromkeys(("tp_size", "num_gemm_events", "num_comm_events"), int),
}
"""Of each configuration, and of what type: what other tools read of this report."""


def report_of(directory: Path) -> dict[str, Any]:
    write_reports(analysis_of(directory), directory, "python analyze.py here")
    return dict(json.loads((directory / "tuning_report.json").read_text()))


def test_every_configuration_has_the_documented_fields(tmp_path: Path) -> None:
    traced = make_point("operator", tmp_path / "traced", BULK, traces=["trace_rank0.json.gz"])
    shutil.copy(TRACES / "h200x4_llama3_70b_layer_te_default.json.gz", traced / "trace_rank0.json.gz")
    first = report_of(tmp_path / "traced")["configurations"][0]
    assert {name: type(first[name]) for name in DOCUMENTED_FIELDS} == DOCUMENTED_FIELDS
    assert first.keys() == {*COLUMNS, "overlap_method"}
    make_point("operator", tmp_path / "untraced", BULK, bwd=pass_times(50.0, floor_us=100.0))
    first = report_of(tmp_path / "untraced")["configurations"][0]
    assert (first["total_overlap_ratio"], first["hidden_fraction"]) == (None, None)


def test_a_choice_that_the_switches_overrule_is_told_from_what_runs(tmp_path: Path) -> None:
    # One switch holds for both: off loses 10 at fc2, on would lose 40 at proj.
    for operator, time_us in (("proj", 120.0), ("fc2", 70.0)):
        ring = operator_config(2, operator, "dgrad", "ring_exchange", aggregate=False)
        make_point("operator", tmp_path, ring, bwd=pass_times(time_us, none_us=80.0))
    report = report_of(tmp_path)
    best = {entry["slot"]: entry for entry in report["best"]}
    assert best["proj_dgrad"]["config_id"] == "tp2_proj_dgrad_none"
    assert (best["fc2_dgrad"]["time_us"], best["fc2_dgrad"]["setting_in_yaml"]) == (70.0, None)
    assert [(entry["name"], entry["value"]) for entry in report["switches"]] == [("tp_comm_overlap_ag", False)]
    assert len(report["cases"][0]["overruled"]["2"]) == 1
    assert yaml.safe_load((tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").read_text()) == {}


def test_cases_are_apart_and_the_default_stands_beside_none(tmp_path: Path) -> None:
    times = pass_times(320.0, 400.0, 300.0, default=default_timing(352.0, none_us=400.0))
    for tokens in (4096, 8192):
        make_point("operator", tmp_path, {**BULK, "workload": {**BULK["workload"], "tokens": tokens}}, bwd=times)
    report = report_of(tmp_path)
    assert ([case["tokens"] for case in report["cases"]], report["tp_scaling"]) == ([4096, 8192], None)
    assert {entry["case"] for entry in report["best"]} == {case["name"] for case in report["cases"]}
    assert {(entry["default_us"], entry["speedup_over_default"]) for entry in report["best"]} == {(352.0, 1.1)}


# results_{impl}_tp{n}_dp{m}.json, whose names a recorded sweep holds


def stacks_of(directory: Path) -> TpTrainingAnalysis:
    (analysis,) = analyse_tp_training(read_points(directory).points, {})
    return analysis


def test_numbers_of_a_stack_are_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("megatron", 2, 2), step_us=10_000.0, spread_us=100.0)
    content = results(stacks_of(tmp_path).of_points[0])
    assert [step["step"] for step in content["steps"]] == [2, 3, 4, 5, 6]
    first, summary = content["steps"][0], content["summary"]
    # 2048 tokens of both data-parallel ranks in 9.8 ms.
    per_s = {"tokens_per_sec": 2048 / 0.0098, "samples_per_sec": 4 / 0.0098}
    times_s = {"step_time_s": 0.0098, "forward_time_s": 0.3 * 0.0098}
    assert {name: first[name] for name in (*per_s, *times_s)} == pytest.approx(per_s | times_s)
    assert (first["loss"], first["grad_norm"], summary["num_steps"]) == (6.8, 1.5, 5)
    mean_tokens_per_s = sum(2048 / time_s for time_s in (0.0098, 0.0102, 0.0100, 0.0101, 0.0099)) / 5
    expected = {
        **{"avg_step_time_ms": 10.0, "std_step_time_ms": math.sqrt(0.1 / 4), "avg_tokens_per_sec": mean_tokens_per_s},
        **{"avg_loss": 6.6, "final_loss": 6.4, "tflops_per_gpu": 100.0, "mfu_pct": 100 * 100 / 989.4},
        "tokens_per_sec_per_gpu": 2048 / 0.01 / 4,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    shares = {"forward_pct": 30.0, "backward_pct": 50.0, "optimizer_pct": 10.0, "other_pct": 10.0}
    assert summary["timing_breakdown"] == pytest.approx(shares)
    assert (summary["communication"], summary["losses_agree"], summary["deviates"]) == (None, None, None)


def test_who_deviates_is_told_where(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), losses=falling(off={3: None}))
    for impl in ("megatron", "fsdp_dtensor"):
        make_point("tp_training", tmp_path, stack_config(impl))
    summaries = {row.impl: results(row)["summary"] for row in stacks_of(tmp_path).of_points}
    assert (summaries["megatron"]["losses_agree"], summaries["autotp"]["losses_agree"]) == (True, False)
    assert summaries["autotp"]["deviates"] == {"what": "loss", "step": 3, "relative": None}
    # Of the timed steps that have one.
    assert summaries["autotp"]["avg_loss"] == pytest.approx((6.8 + 6.6 + 6.5 + 6.4) / 4)


def test_communication_is_that_of_the_traces(tmp_path: Path) -> None:
    directory = make_point("tp_training", tmp_path, traces=[trace_file(0), trace_file(1)])
    shutil.copy(TRACES / "cpu_gloo_tp2_rank0.json.gz", directory / trace_file(0))
    points = read_points(tmp_path).points
    found = read_communication(points)
    assert (found.problems, found.warnings) == ([], [])
    assert 0 <= found.of_point[directory].exposed_us < found.of_point[directory].total_us
    (analysis,) = analyse_tp_training(points, {directory: StepCommunication(4000.0, 1000.0, 500.0)})
    assert results(analysis.of_points[0])["summary"]["communication"] == {
        **{"total_ms": 4.0, "hidden_ms": 3.0, "exposed_ms": 1.0, "hidden_pct": 75.0, "waiting_ms": 0.5},
    }
    # A bad trace is a problem and no more.
    (directory / trace_file(0)).write_text("no trace")
    found = read_communication(points)
    assert (len(found.problems), trace_file(0) in found.problems[0], found.of_point) == (1, True, {})


def test_each_run_directory_has_its_own_results_where_the_reports_go(tmp_path: Path) -> None:
    for number in (0, 1):
        point = stack_config(repetition=number)
        make_point("tp_training", tmp_path / "sweep", point, step_us=10_000.0 + number, name=f"stack_{number}")
    (tmp_path / "out").mkdir()
    write_reports(analysis_of(tmp_path / "sweep"), tmp_path / "out", "python analyze.py there")
    written = sorted((tmp_path / "out").glob("*/results_fsdp_dtensor_tp2_dp1.json"))
    assert [path.parent.name for path in written] == ["stack_0", "stack_1"]
    medians = {json.loads(path.read_text())["summary"]["median_step_time_ms"] for path in written}
    assert medians == {10.0, 10.001}
    assert [path.name for path in (tmp_path / "sweep" / "stack_0").iterdir()] == ["result.json"]
    beside = write_results([stacks_of(tmp_path / "sweep")])
    assert {path.parent for path in beside} == {path.parent for path in (tmp_path / "sweep").rglob("result.json")}


def test_on_a_cpu_there_is_no_memory_and_no_peak(tmp_path: Path) -> None:
    on_cpu = {"host_ahead_us": None, "environment": {**ENVIRONMENT, "gpu": None}}
    directory = make_point("tp_training", tmp_path, stack_config(device="cpu"), **on_cpu)
    no_memory = {"memory_allocated_gb": None, "memory_peak_gb": None}
    rewrite(directory, lambda result: [step.update(no_memory) for step in result["tp_training"]["steps"]])
    summary = results(stacks_of(tmp_path).of_points[0])["summary"]
    names = ("peak_memory_gb", "mfu_pct", "peak_tflops_per_gpu", "host_ahead_ms")
    assert {summary[name] for name in names} == {None}
