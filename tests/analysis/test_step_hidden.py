from __future__ import annotations

import pytest

from overlap_sweep.analysis.step_hidden import hidden
from overlap_sweep.run_directory import Timing


def timing(*samples_us: float) -> Timing:
    middle = sorted(samples_us)[len(samples_us) // 2]
    return Timing(median_us=middle, q1_us=middle, q3_us=middle, samples_us=list(samples_us))


def test_drift_between_rounds_is_in_all_three() -> None:
    found = hidden({"point": timing(11, 21, 31), "none": timing(13, 23, 33), "floor": timing(9, 19, 29)})
    assert found == (0.5, 0.0)


def test_noise_is_that_of_both_differences() -> None:
    found = hidden({"point": timing(11, 13, 12), "none": timing(13, 13, 13), "floor": timing(9, 9, 9)})
    assert found is not None
    assert found.fraction == 0.25
    assert found.noise == pytest.approx(1.57 * 1.0 / 3**0.5 / 4)
    assert found.known


def test_what_is_all_noise_is_not_known() -> None:
    found = hidden({"point": timing(1, 30, 12), "none": timing(13, 13, 13), "floor": timing(9, 9, 9)})
    assert found is not None
    assert not found.known


def test_without_communication_there_is_nothing_to_hide() -> None:
    assert hidden({"point": timing(9, 9, 9), "none": timing(9, 9, 9), "floor": timing(9, 9, 9)}) is None
