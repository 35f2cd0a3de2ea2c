"""The tables. What their rows hold of each status: made/statuses, and the tables of recorded sweeps, among the golden
files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis import frame, kernel_frame, layer_frame, training_frame
from overlap_sweep.analysis.copies import COPY_COLUMNS, copy_rows
from overlap_sweep.analysis.frame import Row, config_id, hidden_fraction, table_rows, to_frame
from overlap_sweep.analysis.points import Reading, read_points
from overlap_sweep.analysis.tp_training_frame import COLUMNS as STACK_COLUMNS
from overlap_sweep.analysis.tp_training_frame import tp_training_rows
from overlap_sweep.analysis.traces import read_traces
from tests.make_point import default_timing, make_point, operator_config, pass_times, variant

TABLES: dict[str, tuple[Callable[[Reading], list[Row]], dict[str, str]]] = {
    "operator": (lambda reading: table_rows(reading, read_traces(reading.points)), frame.COLUMNS),
    "layer": (lambda reading: layer_frame.layer_rows(reading.points, [], reading.root), layer_frame.COLUMNS),
    "kernel": (lambda reading: kernel_frame.kernel_rows(reading.points, [], reading.root), kernel_frame.COLUMNS),
    "fsdp": (lambda reading: training_frame.training_rows(reading.points, [], reading.root), training_frame.COLUMNS),
    "copy_engine": (lambda reading: copy_rows(reading.points, reading.root), COPY_COLUMNS),
    "tp_training": (lambda reading: tp_training_rows(reading.points, [], reading.root), STACK_COLUMNS),
}
"""By workload the rows of its table, and the table's columns and their types."""


def frame_of(directory: Path, workload: str = "operator") -> pd.DataFrame:
    rows, columns = TABLES[workload]
    return to_frame(rows(read_points(directory)), columns)


@pytest.mark.parametrize("workload", TABLES)
def test_columns_and_types_do_not_depend_on_what_was_measured(tmp_path: Path, workload: str) -> None:
    make_point(workload, tmp_path, status="failed", error="boom")
    table = frame_of(tmp_path, workload)
    assert {name: str(kind) for name, kind in table.dtypes.items()} == TABLES[workload][1]
    assert (table["status"].tolist(), table["error"].tolist()) == (["failed"], ["boom"])
    stream = io.BytesIO()
    table.to_parquet(stream)
    assert {name: str(kind) for name, kind in pd.read_parquet(stream).dtypes.items()} == TABLES[workload][1]


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
    fractions = [hidden_fraction(time_us, none_us=100.0, floor_us=40.0) for time_us in (70.0, 100.0, 130.0)]
    assert fractions == [0.5, 0.0, -0.5]
    assert pd.isna(hidden_fraction(100.0, none_us=100.0, floor_us=100.0))


def test_one_row_for_each_phase_that_the_point_overlaps(tmp_path: Path) -> None:
    times = pass_times(160.0, none_us=200.0, floor_us=150.0, tp1_us=300.0, spread_us=1.0)
    errors = {"output": 1e-6, "weight_grad": 1e-5}
    make_point("operator", tmp_path, operator_config(method="bulk", num_sm=4), bwd=times, relative_error=errors)
    table = frame_of(tmp_path)
    assert table["config_id"].tolist() == ["tp2_fc1_dgrad_bulk_sm4", "tp2_fc1_wgrad_bulk_sm4"]
    row = table.iloc[0]
    times_us = [row[name] for name in ("time_us", "q1_us", "none_us", "floor_us", "tp1_us")]
    assert (row["slot"], row["pass"], times_us) == ("fc1_dgrad", "bwd", [160.0, 159.0, 200.0, 150.0, 300.0])
    assert (row["hidden_fraction"], row["speedup"], row["relative_error"]) == (0.8, 1.25, 1e-5)
    assert pd.isna(row["aggregate"])
    assert pd.isna(row["forward_overlap_ratio"])


@pytest.mark.parametrize(("phase", "rows"), [("all", ["fprop", "dgrad", "wgrad"]), ("dgrad", ["dgrad"])])
def test_none_has_a_row_for_each_phase_that_was_asked_for(tmp_path: Path, phase: str, rows: list[str]) -> None:
    make_point("operator", tmp_path, operator_config(phase=phase))
    table = frame_of(tmp_path)
    assert table["phase"].tolist() == rows
    assert set(table["method"]) == {"none"}


def test_the_default_is_scaled_to_the_points_own_none(tmp_path: Path) -> None:
    times = pass_times(160.0, none_us=200.0, default=default_timing(360.0, none_us=400.0))
    make_point("operator", tmp_path, operator_config(method="bulk", num_sm=4), bwd=times)
    make_point("operator", tmp_path, operator_config(phase="fprop"))
    table = frame_of(tmp_path).set_index("slot")
    assert table.loc["fc1_dgrad", "default_us"] == pytest.approx(180.0)
    assert pd.isna(table.loc["fc1_fprop", "default_us"])


def test_layers_have_a_table_of_their_own(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(phase="fprop"))
    make_point("layer", tmp_path, variants={"none": variant([100.0, 100.0])}, name="ok_layer")
    make_point("layer", tmp_path, variants={}, name="failed_layer", status="failed", error="boom")
    assert frame_of(tmp_path)["slot"].tolist() == ["fc1_fprop"]
