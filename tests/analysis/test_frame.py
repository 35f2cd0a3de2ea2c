from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest
import yaml

from overlap_sweep.analysis.frame import COLUMNS, config_id, hidden_fraction, table_rows, to_frame
from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.traces import read_traces
from tests.make_point import default_timing, layer_config, make_point, operator_config, pass_times, variant


def frame_of(directory: Path) -> pd.DataFrame:
    reading = read_points(directory)
    return to_frame(table_rows(reading, read_traces(reading.points)))


@pytest.mark.parametrize(
    ("phase", "setting", "name"),
    [
        ("fprop", {"method": "ring_exchange", "num_sm": 4, "aggregate": False}, "tp2_fc1_fprop_ring_agg0"),
        ("dgrad", {"method": "bulk", "num_sm": 2}, "tp2_fc1_dgrad_bulk_sm2"),
        ("wgrad", None, "tp2_fc1_wgrad_none"),
    ],
)
def test_config_ids_are_spelled_as_the_tuner_did(phase: str, setting: dict[str, object] | None, name: str) -> None:
    assert config_id(2, "fc1", phase, setting) == name


def test_hidden_fraction_is_undefined_where_communication_costs_nothing() -> None:
    assert hidden_fraction(70.0, none_us=100.0, floor_us=40.0) == 0.5
    assert hidden_fraction(100.0, none_us=100.0, floor_us=40.0) == 0.0
    assert hidden_fraction(130.0, none_us=100.0, floor_us=40.0) == -0.5
    assert pd.isna(hidden_fraction(100.0, none_us=100.0, floor_us=100.0))


def test_one_row_for_each_phase_that_the_point_overlaps(tmp_path: Path) -> None:
    make_point(
        "operator",
        tmp_path,
        operator_config(method="bulk", num_sm=4),
        bwd=pass_times(160.0, none_us=200.0, floor_us=150.0, tp1_us=300.0, spread_us=1.0),
        relative_error={"output": 1e-6, "weight_grad": 1e-5},
    )
    frame = frame_of(tmp_path)
    assert frame["config_id"].tolist() == ["tp2_fc1_dgrad_bulk_sm4", "tp2_fc1_wgrad_bulk_sm4"]
    row = frame.iloc[0]
    expected = {
        "slot": "fc1_dgrad", "pass": "bwd", "method": "bulk", "num_sm": 4, "status": "ok", "device": "NVIDIA H200",
        "time_us": 160.0, "q1_us": 159.0, "q3_us": 161.0, "repeats": 5, "none_us": 200.0, "floor_us": 150.0,
        "tp1_us": 300.0, "hidden_fraction": 0.8, "speedup": 1.25, "relative_error": 1e-5, "launch_bound": False,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert pd.isna(row["aggregate"])
    assert pd.isna(row["forward_overlap_ratio"])


@pytest.mark.parametrize(("phase", "rows"), [("all", ["fprop", "dgrad", "wgrad"]), ("dgrad", ["dgrad"])])
def test_none_has_a_row_for_each_phase_that_was_asked_for(tmp_path: Path, phase: str, rows: list[str]) -> None:
    make_point("operator", tmp_path, operator_config(phase=phase))
    frame = frame_of(tmp_path)
    assert frame["phase"].tolist() == rows
    assert set(frame["method"]) == {"none"}


def test_points_without_times_have_one_row_with_what_was_asked_for(tmp_path: Path) -> None:
    for status in ("skipped", "failed", "timeout"):
        asked = operator_config(method="pipeline", phase="fprop", num_sm=2, num_splits=4)
        make_point("operator", tmp_path, asked, status=status, error=f"it {status}")
    (tmp_path / "died" / ".hydra").mkdir(parents=True)
    (tmp_path / "died" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(operator_config(method="bulk", num_sm=8)))
    frame = frame_of(tmp_path).set_index("status")
    assert sorted(frame.index) == ["failed", "missing", "skipped", "timeout"]
    assert frame.loc["failed", "error"] == "it failed"
    assert frame.loc["skipped", "config_id"] == "tp2_fc1_fprop_pipeline_sm2_split4"
    assert frame.loc["missing", "config_id"] == "tp2_fc1_all_bulk_sm8"
    assert frame["time_us"].isna().all()


def test_columns_and_types_do_not_depend_on_what_was_measured(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(), status="failed", error="boom")
    frame = frame_of(tmp_path)
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == COLUMNS
    stream = io.BytesIO()
    frame.to_parquet(stream)
    assert {name: str(kind) for name, kind in pd.read_parquet(stream).dtypes.items()} == COLUMNS


def test_a_missing_trace_is_a_note(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(phase="fprop"), traces=["trace_rank0.json.gz"])
    row = frame_of(tmp_path).iloc[0]
    assert row["note"] == "trace_rank0.json.gz is missing"
    assert pd.isna(row["total_overlap_ratio"])


def test_the_default_is_scaled_to_the_points_own_none(tmp_path: Path) -> None:
    times = pass_times(160.0, none_us=200.0, default=default_timing(360.0, none_us=400.0))
    make_point("operator", tmp_path, operator_config(method="bulk", num_sm=4), bwd=times)
    make_point("operator", tmp_path, operator_config(phase="fprop"))
    frame = frame_of(tmp_path).set_index("slot")
    assert frame.loc["fc1_dgrad", "default_us"] == pytest.approx(180.0)
    assert pd.isna(frame.loc["fc1_fprop", "default_us"])


def test_layers_have_a_table_of_their_own(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(phase="fprop"))
    make_point("layer", tmp_path, variants={"none": variant([100.0, 100.0])}, name="ok_layer")
    make_point("layer", tmp_path, layer_config(), variants={}, name="failed_layer", status="failed", error="boom")
    assert frame_of(tmp_path)["slot"].tolist() == ["fc1_fprop"]
