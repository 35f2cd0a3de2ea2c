from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.analysis.frame import COLUMNS
from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.files import write_reports
from tests.made_sweeps import write_sweep
from tests.make_point import default_timing, layer_config, make_point, operator_config, pass_times, variant

TRACES = Path(__file__).parent.parent / "data" / "traces"

DOCUMENTED_FIELDS = {
    "config_id": str,
    "operator": str,
    "phase": str,
    "tp_size": int,
    "overlap_method": str,
    "forward_gemm_time_us": float,
    "forward_comm_time_us": float,
    "forward_overlap_time_us": float,
    "forward_overlap_ratio": float,
    "forward_e2e_time_us": float,
    "backward_gemm_time_us": float,
    "backward_comm_time_us": float,
    "backward_overlap_time_us": float,
    "backward_overlap_ratio": float,
    "backward_e2e_time_us": float,
    "operator_e2e_time_us": float,
    "total_overlap_ratio": float,
    "num_gemm_events": int,
    "num_comm_events": int,
}
"""Of each configuration, and of what type: what other tools read of this report."""

DOCUMENTED_SCALING = {"optimal_tp_size", "scaling_efficient", "scaling_ratios", "e2e_times", "reason"}


def report_of(directory: Path) -> dict[str, Any]:
    write_reports(analyse(directory, AnalysisConfig()), directory, "python analyze.py here")
    return json.loads((directory / "tuning_report.json").read_text())


def test_every_configuration_has_the_documented_fields(tmp_path: Path) -> None:
    traced = make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), traces=["trace_rank0.json.gz"]
    )
    shutil.copy(TRACES / "h200x4_llama3_70b_layer_te_default.json.gz", traced / "trace_rank0.json.gz")
    first = report_of(tmp_path)["configurations"][0]
    assert {name: type(first[name]) for name in DOCUMENTED_FIELDS} == DOCUMENTED_FIELDS
    assert first.keys() == {*COLUMNS, "overlap_method"}
    assert (first["config_id"], first["overlap_method"]) == ("tp2_fc1_dgrad_bulk_sm4", "bulk")


def test_what_was_not_traced_is_null(tmp_path: Path) -> None:
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), bwd=pass_times(50.0, floor_us=100.0)
    )
    first = report_of(tmp_path)["configurations"][0]
    assert first["total_overlap_ratio"] is None
    assert first["hidden_fraction"] is None


def test_counts_best_recommendations_and_switches(tmp_path: Path) -> None:
    report = report_of(write_sweep(tmp_path))
    assert report["counts"] == {
        "points": 9, "ok": 6, "failed": 1, "timeout": 0, "skipped": 2, "missing": 0, "unreadable": 0, "launch_bound": 0,
    }  # fmt: skip
    assert report["objective"] == "time"
    assert report["cases"][0]["environment"]["gpu"] == "NVIDIA H200"
    best = {(entry["tp_size"], entry["slot"]): entry for entry in report["best"]}
    assert {key: entry["config_id"] for key, entry in best.items()} == {
        (2, "fc1_fprop"): "tp2_fc1_fprop_none",
        (2, "fc1_dgrad"): "tp2_fc1_dgrad_bulk_sm4",
        (2, "fc1_wgrad"): "tp2_fc1_wgrad_bulk_sm4",
        (2, "fc2_fprop"): "tp2_fc2_fprop_pipeline_sm8_split4",
        (4, "fc1_dgrad"): "tp4_fc1_dgrad_none",
        (4, "fc1_wgrad"): "tp4_fc1_wgrad_none",
    }
    dgrad = best[2, "fc1_dgrad"]
    assert (dgrad["time_us"], dgrad["none_us"], dgrad["speedup"]) == (320.0, 400.0, 1.25)
    assert dgrad["hidden_fraction"] == pytest.approx(0.8)
    sentences = [entry["recommendation"] for entry in report["recommendations"]]
    assert sentences[:2] == [
        "TP=2 fc1 fwd: don't overlap; the best overlap, ring_agg0, is 10.0% slower",
        "TP=2 fc1 bwd: dgrad bulk_sm4 + wgrad bulk_sm4, 1.25x no overlap",
    ]
    assert [(entry["tp_size"], entry["name"], entry["value"]) for entry in report["switches"]] == [
        (2, "tp_comm_overlap_disable_fc1", True),
        (4, "tp_comm_bulk_dgrad", False),
        (4, "tp_comm_bulk_wgrad", False),
    ]


def test_tp_scaling_has_the_documented_shape(tmp_path: Path) -> None:
    scaling = report_of(write_sweep(tmp_path))["tp_scaling"]
    # fc1: 200 + 320 at TP 2, 200 + 400 at TP 4, 1000 unsharded.
    assert scaling["tolerance"] == 0.2
    assert scaling["optimal_tp_size"] == 2
    assert scaling["results"]["fc1"].keys() == DOCUMENTED_SCALING
    assert scaling["results"]["fc1"]["e2e_times"] == {"1": 1000.0, "2": 520.0, "4": 600.0}
    assert scaling["results"]["fc1"]["scaling_ratios"] == pytest.approx({"1": 1.0, "2": 1.04, "4": 2.4})
    assert scaling["results"]["fc1"]["scaling_efficient"] == {"1": True, "2": True, "4": False}
    assert scaling["results"]["fc2"]["e2e_times"] == {"1": 1000.0, "2": 550.0}


def test_drift_of_the_baseline(tmp_path: Path) -> None:
    for minute, none_us in enumerate((100.0, 100.0, 110.0, 110.0)):
        times = pass_times(90.0, none_us=none_us)
        point = operator_config(2, "fc1", "all", "bulk", num_sm=4)
        make_point("operator", tmp_path, point, fwd=times, bwd=times, started=f"2026-11-20T21:0{minute}:00+00:00")
    drifts = report_of(tmp_path)["drift"]
    assert [(drift["pass"], drift["baseline"]) for drift in drifts] == [
        ("bwd", "none"), ("bwd", "floor"), ("fwd", "none"), ("fwd", "floor"),
    ]  # fmt: skip
    first = drifts[0]
    assert first["change"] == pytest.approx(0.1)
    assert {name: first[name] for name in ("operator", "pass", "tp_size", "measurements")} == {
        "operator": "fc1", "pass": "bwd", "tp_size": 2, "measurements": 4,
    }  # fmt: skip
    assert (first["median_us"], first["lowest_us"], first["highest_us"]) == (105.0, 100.0, 110.0)
    summary = (tmp_path / "summary.txt").read_text()
    assert "Baselines drifted: none by up to +10% (fc1 fwd, TP=2); settings are compared by what" in summary
    assert "fc1 bwd floor" in summary


def test_cases_are_apart(tmp_path: Path) -> None:
    for tokens in (4096, 8192):
        make_point(
            "operator",
            tmp_path,
            operator_config(2, "fc1", "all", "bulk", num_sm=4, tokens=tokens),
            bwd=pass_times(90.0),
        )
    report = report_of(tmp_path)
    assert [case["tokens"] for case in report["cases"]] == [4096, 8192]
    assert report["tp_scaling"] is None
    assert {entry["case"] for entry in report["best"]} == {case["name"] for case in report["cases"]}


def test_a_choice_that_the_switches_overrule_is_told_from_what_runs(tmp_path: Path) -> None:
    # One switch holds for both: off loses 10 at fc2, on would lose 40 at proj.
    for operator, time_us in (("proj", 120.0), ("fc2", 70.0)):
        ring = operator_config(2, operator, "dgrad", "ring_exchange", aggregate=False)
        make_point("operator", tmp_path, ring, bwd=pass_times(time_us, none_us=80.0))
    report = report_of(tmp_path)
    best = {entry["slot"]: entry for entry in report["best"]}
    assert best["proj_dgrad"]["config_id"] == "tp2_proj_dgrad_none"
    assert best["fc2_dgrad"]["config_id"] == "tp2_fc2_dgrad_ring_agg0"
    assert (best["fc2_dgrad"]["time_us"], best["fc2_dgrad"]["setting_in_yaml"]) == (70.0, None)
    assert [(entry["name"], entry["value"]) for entry in report["switches"]] == [("tp_comm_overlap_ag", False)]
    assert len(report["cases"][0]["overruled"]["2"]) == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert "fc2_dgrad    ring_agg0 *" in summary
    assert "* TP=2 fc2 bwd: none instead of ring_agg0 (+10.0 us)" in summary
    given = (tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").read_text()
    assert yaml.safe_load(given) == {}
    assert "fc2_dgrad: ring_agg0 is best, but the switches don't allow it beside the others" in given


def test_the_default_stands_beside_none_and_floor(tmp_path: Path) -> None:
    times = pass_times(320.0, 400.0, 300.0, default=default_timing(352.0, none_us=400.0))
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), bwd=times)
    report = report_of(tmp_path)
    best = report["best"][0]
    assert (best["default_us"], best["default_noise_us"]) == (352.0, 0.0)
    assert best["speedup_over_default"] == pytest.approx(1.1)
    sentence = "TP=2 fc1 bwd: dgrad bulk_sm4 + wgrad bulk_sm4, 1.25x no overlap, 1.10x the default"
    assert report["recommendations"][0]["recommendation"] == sentence
    assert report["recommendations"][0]["speedup_over_default"] == pytest.approx(1.1)


def test_without_a_default_it_is_null(tmp_path: Path) -> None:
    report = report_of(write_sweep(tmp_path))
    assert {entry["default_us"] for entry in report["best"]} == {None}
    assert {entry["speedup_over_default"] for entry in report["recommendations"]} == {None}
    assert "default" not in (tmp_path / "summary.txt").read_text()


def test_what_a_point_warned_of_is_said_once(tmp_path: Path) -> None:
    for num_sm in (1, 2):
        make_point(
            "operator",
            tmp_path,
            operator_config(2, "fc1", "all", "bulk", num_sm=num_sm),
            warnings=["GPU 3 was throttled."],
        )
    report_of(tmp_path)
    assert (tmp_path / "summary.txt").read_text().count("GPU 3 was throttled.") == 1


def test_layers_with_their_variants(tmp_path: Path) -> None:
    variants = {
        "none": variant([100.0] * 6),
        "file:a.yaml": variant(
            [90.0] * 6, settings={"fc1_fprop": {"method": "ring_exchange"}}, switches={"tp_comm_overlap": True}
        ),
    }
    make_point(
        "layer", tmp_path, layer_config(training=True), variants=variants, name="a", warnings=["GPU 3 was throttled."]
    )
    make_point("layer", tmp_path, variants={}, name="b", status="failed", error="boom")
    report = report_of(tmp_path)
    assert report["counts"]["points"] == 2
    assert (report["cases"], report["configurations"]) == ([], [])
    measured, failed = report["layers"]
    assert (measured["kind"], measured["training"], measured["tp_size"]) == ("transformer_layer", True, 4)
    assert measured["verdict"] == "file:a.yaml is 10.0% faster than none (10.0 to 10.0%)"
    assert measured["warnings"] == ["GPU 3 was throttled."]
    assert measured["environment"]["gpu"] == "NVIDIA H200"
    none, best = measured["variants"]
    assert none["hidden_fraction"] is None
    assert (best["variant"], best["ratio"], best["differs"]) == ("file:a.yaml", pytest.approx(0.9), True)
    assert best["settings"] == {"fc1_fprop": {"method": "ring_exchange"}}
    assert best["switches"] == {"tp_comm_overlap": True}
    assert (failed["status"], failed["error"], failed["verdict"], failed["variants"]) == ("failed", "boom", None, [])
