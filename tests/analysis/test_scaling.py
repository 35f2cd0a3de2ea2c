from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.analysis.scaling import scale, scale_case
from tests.analysis.reading import choices
from tests.make_point import make_point, operator_config, pass_times


def test_the_documented_example() -> None:
    result = scale({1: 2000.0, 2: 1100.0, 4: 600.0, 8: 400.0}, tolerance=0.2)
    assert result.optimal_tp_size == 4
    assert result.scaling_ratios == {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.6}
    assert result.scaling_efficient == {1: True, 2: True, 4: True, 8: False}


def test_no_tensor_parallelism_where_nothing_scales() -> None:
    assert scale({1: 100.0, 2: 90.0, 4: 80.0}, tolerance=0.2).optimal_tp_size == 1


def test_undecided_without_a_baseline() -> None:
    result = scale({2: 90.0, 4: 80.0}, tolerance=0.2)
    assert result.optimal_tp_size is None
    assert result.reason == "No TP=1 baseline was measured."


@pytest.mark.parametrize("own_points", [True, False])
def test_a_case_uses_the_chosen_settings_and_its_own_baseline(tmp_path: Path, own_points: bool) -> None:
    tp1 = None if own_points else 1000.0
    for tp_size, time_us in ((2, 550.0), (4, 300.0), (8, 200.0)):
        times = pass_times(time_us, none_us=2 * time_us, tp1_us=tp1)
        point = operator_config(tp_size, "fc2", method="ring_exchange", num_sm=1)
        make_point("operator", tmp_path, point, fwd=times, bwd=times)
    if own_points:
        alone = pass_times(1000.0, none_us=1000.0, floor_us=1000.0)
        make_point("operator", tmp_path, operator_config(1, "fc2"), fwd=alone, bwd=alone)
    scaling = scale_case(list(choices(tmp_path).values()), tolerance=0.2)
    assert scaling.results["fc2"].e2e_times == pytest.approx({1: 2000.0, 2: 1100.0, 4: 600.0, 8: 400.0})
    assert scaling.optimal_tp_size == scaling.results["fc2"].optimal_tp_size == 4


def test_the_whole_is_judged_by_the_operators_measured_everywhere(tmp_path: Path) -> None:
    for operator, tp_size, time_us in (("fc1", 2, 500.0), ("fc1", 4, 400.0), ("proj", 4, 250.0)):
        times = pass_times(time_us, none_us=time_us, tp1_us=1000.0)
        make_point("operator", tmp_path, operator_config(tp_size, operator), fwd=times, bwd=times)
    scaling = scale_case(list(choices(tmp_path).values()), tolerance=0.2)
    assert {operator: result.optimal_tp_size for operator, result in scaling.results.items()} == {"proj": 4, "fc1": 2}
    assert scaling.optimal_tp_size == 2
    assert scaling.reason.startswith("Sum over fc1. ")
