from __future__ import annotations

import io
import math
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.analysis.layer_frame import COLUMNS, layer_rows
from overlap_sweep.analysis.layers import VariantRow, analyse_layer
from overlap_sweep.analysis.points import read_points
from tests.analysis.reading import layer_point
from tests.make_point import layer_config, make_point, variant

NONE = [1000.0, 1010.0, 1020.0, 1030.0, 1040.0, 1050.0]
"""Six rounds of a machine that gets slower by 5 %."""


def times(ratio: float) -> list[float]:
    """What is by this ratio slower than NONE, in every round."""
    return [ratio * time_us for time_us in NONE]


def rows_of(directory: Path) -> dict[str, VariantRow]:
    return {row.name: row for row in analyse_layer(layer_point(directory)).rows}


def frame_of(directory: Path) -> pd.DataFrame:
    reading = read_points(directory)
    analyses = [analyse_layer(point) for point in reading.points if point.status == "ok"]
    return to_frame(layer_rows(reading.points, analyses, directory), COLUMNS)


def test_rounds_are_paired_so_that_drift_cancels(tmp_path: Path) -> None:
    # 0.5 % faster in every round, while the machine drifts by ten times that.
    make_point("layer", tmp_path, variants={"none": variant(NONE), "default": variant(times(0.995))})
    default = rows_of(tmp_path)["default"]
    assert default.ratio == pytest.approx(0.995)
    assert (default.interval.low, default.interval.high) == (pytest.approx(0.995), pytest.approx(0.995))
    assert default.differs


def test_medians_ratio_and_hidden_fraction_of_each_variant(tmp_path: Path) -> None:
    variants = {
        "none": variant(NONE),
        "floor": variant(times(0.8)),
        "default": variant(times(1.1), launch_bound=True),
        "file:a.yaml": variant(times(0.9), step_us=30.0, relative_error={"output": 1e-3, "input_grad": 2e-3}),
    }
    make_point("layer", tmp_path, variants=variants)
    rows = rows_of(tmp_path)
    assert list(rows) == list(variants)
    best = rows["file:a.yaml"]
    assert (best.all_us, best.fwd_us, best.step_us) == (pytest.approx(922.5), pytest.approx(307.5), 30.0)
    assert best.bwd_us == pytest.approx(585.0)
    assert best.relative_error == 2e-3
    assert rows["none"].relative_error is None
    assert {name: round(row.hidden_fraction, 6) for name, row in rows.items()} == {
        "none": 0.0, "floor": 1.0, "default": -0.5, "file:a.yaml": 0.5,
    }  # fmt: skip
    assert [name for name, row in rows.items() if row.launch_bound] == ["default"]
    assert rows["none"].ratio == 1.0
    assert not rows["none"].differs


def test_a_difference_that_some_rounds_contradict_is_none(tmp_path: Path) -> None:
    whole = [0.98 * time_us for time_us in NONE[:4]] + [1.01 * time_us for time_us in NONE[4:]]
    make_point("layer", tmp_path, variants={"none": variant(NONE), "default": variant(whole)})
    default = rows_of(tmp_path)["default"]
    assert default.ratio == pytest.approx(0.98)
    assert (default.interval.low, default.interval.high) == (pytest.approx(0.98), pytest.approx(1.01))
    assert not default.differs


def test_without_none_ratios_are_to_the_first(tmp_path: Path) -> None:
    make_point(
        "layer",
        tmp_path,
        variants={"default": variant(NONE), "floor": variant(times(0.5)), "file:a": variant(times(0.9))},
    )
    analysis = analyse_layer(layer_point(tmp_path))
    assert analysis.reference == "default"
    assert [row.ratio for row in analysis.rows] == [1.0, pytest.approx(0.5), pytest.approx(0.9)]
    assert all(math.isnan(row.hidden_fraction) for row in analysis.rows)


def test_the_winner_can_be_used_and_was_measured(tmp_path: Path) -> None:
    variants = {
        "none": variant(NONE),
        "floor": variant(times(0.5)),
        "default": variant(times(0.6), launch_bound=True),
        "file:a": variant(times(0.95)),
        "file:b": variant(times(0.9)),
        "file:c": variant(times(1.2)),
    }
    make_point("layer", tmp_path, variants=variants)
    analysis = analyse_layer(layer_point(tmp_path))
    assert [row.name for row in analysis.contenders] == ["file:b", "file:a", "file:c"]
    assert analysis.winner
    assert analysis.winner.name == "file:b"
    assert analysis.launch_bound


def test_a_row_for_each_point_and_variant(tmp_path: Path) -> None:
    variants = {"none": variant(NONE), "floor": variant(times(0.8)), "default": variant(times(0.9))}
    point = layer_config("layernorm_mlp", num_replicas=2, training=True)
    make_point("layer", tmp_path, point, variants=variants, name="a", attention_backend="flash")
    make_point("layer", tmp_path, variants={}, name="b", status="failed", error="boom")
    frame = frame_of(tmp_path)
    assert frame["variant"].tolist()[:3] == ["none", "floor", "default"]
    expected = {
        "point": "a", "model": "llama3_8b", "backend": "megatron", "device": "NVIDIA H200", "tokens": 8192,
        "kind": "layernorm_mlp", "tp_size": 4, "num_replicas": 2, "training": True, "attention_backend": "flash",
        "status": "ok", "rounds": 6, "reference": "none", "coverage": 0.96875, "differs": True, "launch_bound": False,
    }  # fmt: skip
    default = frame.iloc[2]
    assert {name: default[name] for name in expected} == expected
    assert default["ratio"] == pytest.approx(0.9)
    assert default["hidden_fraction"] == pytest.approx(0.5)
    assert pd.isna(default["step_us"])
    failed = frame.iloc[3]
    assert (failed["point"], failed["status"], failed["error"]) == ("b", "failed", "boom")
    assert pd.isna(failed["variant"])
    assert pd.isna(failed["all_us"])


def test_columns_and_types_do_not_depend_on_what_was_measured(tmp_path: Path) -> None:
    make_point("layer", tmp_path, variants={}, status="failed", error="boom")
    frame = frame_of(tmp_path)
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == COLUMNS
    stream = io.BytesIO()
    frame.to_parquet(stream)
    assert {name: str(kind) for name, kind in pd.read_parquet(stream).dtypes.items()} == COLUMNS
