"""When times are told relative to the floor, and how much of their noise lies between points."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.analysis.training import TrainingRow, differ
from overlap_sweep.analysis.training_times import UNREPEATED_MARGIN
from overlap_sweep.analysis.training_warnings import warnings
from tests.analysis.reading import PREFETCH, train, training_of
from tests.make_point import timing_of


def rows_of(directory: Path) -> dict[str, TrainingRow]:
    return {row.setting: row for row in training_of(directory).rows}


def test_what_the_host_limits_is_not_made_the_fastest(tmp_path: Path) -> None:
    # The host of the second is slower in every variant, so that its floor grew more than its step.
    host_us = dict.fromkeys(("point", "floor"), 300.0)
    train(tmp_path, step_us=1060.0, none_us=1200.0, floor_us=1000.0, host_us=host_us)
    host_us = {"point": 1190.0, "none": 1190.0, "floor": 1180.0}
    slow = {"distributed.enable_overlap": True}
    train(tmp_path, slow, step_us=1200.0, none_us=1400.0, floor_us=1190.0, host_us=host_us)
    train(tmp_path, PREFETCH, step_us=1105.0, none_us=1250.0, floor_us=1030.0)
    rows = rows_of(tmp_path)
    assert list(rows) == ["defaults", "forward_prefetch=1", "enable_overlap=true"]
    limited = rows["enable_overlap=true"]
    assert (limited.time_us, limited.floor_us, limited.relative) == (1200.0, 1190.0, False)
    # The other two share the median of their own floors.
    assert {row.floor_us for row in rows.values() if row.relative} == {1015.0}
    assert not [line for line in warnings(training_of(tmp_path)) if line.startswith("Baselines drifted")]


@pytest.mark.parametrize(("variant", "limit_us"), [("none", 1990.0), ("floor", 990.0)])
def test_the_host_may_limit_a_baseline(tmp_path: Path, variant: str, limit_us: float) -> None:
    train(tmp_path, step_us=1500.0, host_us={**dict.fromkeys(("point", "none", "floor"), 300.0), variant: limit_us})
    (row,) = training_of(tmp_path).rows
    assert (row.host_limits, row.host_limits_beside) == (False, True)


@pytest.mark.parametrize(
    ("name", "relative"),
    [("NCCL_ALGO", True), ("RCCL_NUM_CHANNELS", True), ("TORCH_NCCL_HIGH_PRIORITY", True), ("OMP_NUM_THREADS", False)],
)
def test_only_variables_of_collectives_leave_the_floor_as_it_is(tmp_path: Path, name: str, relative: bool) -> None:
    train(tmp_path, step_us=1500.0, floor_us=1000.0)
    train(tmp_path, {"distributed.env": {name: "1"}}, step_us=1800.0, floor_us=1200.0)
    rows = rows_of(tmp_path)
    assert {row.relative for row in rows.values()} == {relative}
    assert rows[f"{name}=1"].time_us == pytest.approx(1650.0 if relative else 1800.0)


def test_points_of_equal_settings_say_how_far_two_may_be_apart(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((1000.0, 1030.0, 1000.0, 970.0)):
        train(tmp_path, {"repetition": repetition}, step_us=step_us, spread_us=0.1)
    for ahead, step_us in ((1, 975.0), (2, 900.0)):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=step_us, spread_us=0.1)
    rows = rows_of(tmp_path)
    # One point says less than four.
    assert rows["forward_prefetch=1"].step.noise_us == pytest.approx(2 * rows["defaults"].step.noise_us, rel=0.05)
    assert rows["forward_prefetch=1"].step.noise_us > 40.0
    assert not differ(rows["forward_prefetch=1"], rows["defaults"])
    assert differ(rows["forward_prefetch=2"], rows["defaults"])


def test_where_nothing_was_measured_twice_one_percent_is_a_tie(tmp_path: Path) -> None:
    train(tmp_path, step_us=1000.0)
    train(tmp_path, PREFETCH, step_us=992.0)
    best = training_of(tmp_path).best
    assert (best.setting, best.margin) == ("defaults", UNREPEATED_MARGIN)


@pytest.mark.parametrize(
    ("second_us", "second_floor_us", "relative"),
    [
        # The whole machine was slower: the floor tells.
        (1650.0, 1100.0, True),
        # Only the floor was: dividing by it would put the points apart.
        (1500.0, 1100.0, False),
    ],
)
def test_floors_are_used_where_they_bring_equal_settings_together(
    tmp_path: Path, second_us: float, second_floor_us: float, relative: bool
) -> None:
    train(tmp_path, step_us=1500.0, floor_us=1000.0)
    train(tmp_path, {"repetition": 1}, step_us=second_us, floor_us=second_floor_us)
    train(tmp_path, PREFETCH, step_us=1400.0, floor_us=1000.0)
    analysis = training_of(tmp_path)
    assert {row.relative for row in analysis.rows} == {relative}
    assert analysis.how_timed.startswith("Times are relative" if relative else "Times are as measured")


def test_hidden_fractions_that_are_all_noise_are_none(tmp_path: Path) -> None:
    step = {
        "point": timing_of([1000.0, 1020.0, 980.0, 1040.0, 960.0]),
        "none": timing_of([990.0, 1040.0, 1010.0, 960.0, 1030.0]),
        "floor": timing_of([1030.0, 970.0, 1000.0, 1010.0, 960.0]),
    }
    train(tmp_path, step=step)
    (row,) = training_of(tmp_path).rows
    assert not row.communicates
    assert row.hidden_fraction != row.hidden_fraction
