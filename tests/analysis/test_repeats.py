from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.analysis.repeats import repeated
from tests.analysis.reading import only_case
from tests.make_point import make_point, operator_config, pass_times


def test_the_same_point_measured_again_is_a_repeat_whatever_its_repetition(tmp_path: Path) -> None:
    for repetition, time_us in enumerate((100.0, 102.0, 99.0)):
        point = operator_config(method="bulk", phase="dgrad", num_sm=4) | {"repetition": repetition}
        make_point("operator", tmp_path, point, bwd=pass_times(time_us))
    (found,) = repeated(only_case(tmp_path))
    assert found.pass_name == "bwd"
    assert sorted(found.medians_us) == [99.0, 100.0, 102.0]
    assert found.spread == pytest.approx(0.03)


def test_other_settings_are_no_repeats_and_the_widest_comes_first(tmp_path: Path) -> None:
    for num_sm, times in ((2, (100.0,)), (4, (100.0, 101.0)), (8, (100.0, 105.0))):
        for time_us in times:
            point = operator_config(method="bulk", phase="wgrad", num_sm=num_sm)
            make_point("operator", tmp_path, point, bwd=pass_times(time_us))
    assert [round(found.spread, 3) for found in repeated(only_case(tmp_path))] == [0.049, 0.01]


def test_launch_bound_points_repeat_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        make_point("operator", tmp_path, operator_config(method="bulk"), launch_bound=True)
    assert repeated(only_case(tmp_path)) == []
