from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from overlap_sweep.analysis.layers import LayerAnalysis, analyse_layer
from overlap_sweep.run_directory import VariantTimes
from tests.analysis.reading import layer_point
from tests.make_point import make_point, variant

NONE = [1000.0, 1010.0, 1020.0, 1030.0, 1040.0, 1050.0]
"""Six rounds of a machine that gets slower by 5 %."""


def times(ratio: float) -> list[float]:
    """What is by this ratio slower than NONE, in every round."""
    return [ratio * time_us for time_us in NONE]


def analysed(directory: Path, variants: Mapping[str, VariantTimes]) -> LayerAnalysis:
    make_point("layer", directory, variants=variants)
    return analyse_layer(layer_point(directory))


@pytest.mark.parametrize(
    ("whole_us", "low", "high", "differs"),
    [
        # 0.5 % faster in every round, while the machine drifts by ten times that.
        (times(0.995), 0.995, 0.995, True),
        # Some rounds contradict.
        ([0.98 * time_us for time_us in NONE[:4]] + [1.01 * time_us for time_us in NONE[4:]], 0.98, 1.01, False),
    ],
)
def test_rounds_are_paired_so_that_drift_cancels(
    tmp_path: Path, whole_us: Sequence[float], low: float, high: float, differs: bool
) -> None:
    _, default = analysed(tmp_path, {"none": variant(NONE), "default": variant(whole_us)}).rows
    assert default.ratio == pytest.approx(low)
    assert (default.interval.low, default.interval.high) == (pytest.approx(low), pytest.approx(high))
    assert default.interval.coverage == 0.96875
    assert default.differs == differs


def test_medians_ratio_and_hidden_fraction_of_each_variant(tmp_path: Path) -> None:
    variants = {
        "none": variant(NONE),
        "floor": variant(times(0.8)),
        "default": variant(times(1.1), launch_bound=True),
        "file:a.yaml": variant(times(0.9), step_us=30.0, relative_error={"output": 1e-3, "input_grad": 2e-3}),
    }
    rows = {row.name: row for row in analysed(tmp_path, variants).rows}
    assert list(rows) == list(variants)
    best = rows["file:a.yaml"]
    assert (best.all_us, best.fwd_us, best.step_us) == (pytest.approx(922.5), pytest.approx(307.5), 30.0)
    assert best.bwd_us == pytest.approx(585.0)
    assert (best.relative_error, rows["none"].relative_error) == (2e-3, None)
    assert {name: round(row.hidden_fraction, 6) for name, row in rows.items()} == {
        "none": 0.0, "floor": 1.0, "default": -0.5, "file:a.yaml": 0.5,
    }  # fmt: skip
    assert [name for name, row in rows.items() if row.launch_bound] == ["default"]
    assert (rows["none"].ratio, rows["none"].differs) == (1.0, False)


def test_without_none_ratios_are_to_the_first(tmp_path: Path) -> None:
    variants = {"default": variant(NONE), "floor": variant(times(0.5)), "file:a": variant(times(0.9))}
    analysis = analysed(tmp_path, variants)
    assert analysis.reference == "default"
    assert [row.ratio for row in analysis.rows] == [1.0, pytest.approx(0.5), pytest.approx(0.9)]
    assert all(math.isnan(row.hidden_fraction) for row in analysis.rows)


def test_the_winner_can_be_used_and_was_measured(tmp_path: Path) -> None:
    ratios = {"none": 1.0, "floor": 0.5, "file:a": 0.95, "file:b": 0.9, "file:c": 1.2}
    variants = {name: variant(times(ratio)) for name, ratio in ratios.items()}
    analysis = analysed(tmp_path, {**variants, "default": variant(times(0.6), launch_bound=True)})
    assert [row.name for row in analysis.contenders] == ["file:b", "file:a", "file:c"]
    assert analysis.winner
    assert analysis.winner.name == "file:b"
    assert analysis.launch_bound
