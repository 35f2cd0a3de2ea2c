"""How the times of training runs are compared: relative to the floor, beyond the noise between points, and against
what a search settled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.gain import Gain
from overlap_sweep.results.points import read_points
from overlap_sweep.results.records import KnobRecord, KnobSearch, read_records
from overlap_sweep.study.analysis import analyse
from overlap_sweep.study.words import cautions
from overlap_sweep.workloads.fsdp.rows import FsdpRow
from overlap_sweep.workloads.fsdp.study import STUDY, how_timed
from tests.results.reading import PREFETCH, train, training_of


def rows_of(directory: Path) -> dict[str, FsdpRow]:
    return {row.setting: row for row in training_of(directory).rows}


def test_drift_cancels_where_the_floor_does_the_same(tmp_path: Path) -> None:
    # The machine was 1.5 times slower when it measured the second, which is the faster one.
    train(tmp_path, step_us=1500.0, none_us=2000.0, floor_us=1000.0)
    train(tmp_path, PREFETCH, step_us=1800.0, none_us=3000.0, floor_us=1500.0)
    times_us = {setting: row.time_us for setting, row in rows_of(tmp_path).items()}
    assert times_us == pytest.approx({"forward_prefetch=1": 1500.0, "defaults": 1875.0})
    assert {row.floor_us for row in rows_of(tmp_path).values()} == {1250.0}
    # Compiled, the step without communication is another.
    train(tmp_path, {"compile.enabled": True}, step_us=1400.0, none_us=1800.0, floor_us=700.0, compiled="inductor")
    rows = rows_of(tmp_path)
    assert (rows["compile=true"].time_us, rows["compile=true"].floor_us) == (1400.0, 700.0)
    assert rows["defaults"].floor_us == 1250.0


def test_repetitions_are_put_together(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((1400.0, 1600.0)):
        train(tmp_path, {"repetition": repetition}, step_us=step_us)
    (row,) = training_of(tmp_path).rows
    assert (row.time_us, row.step.repeats, len(row.points)) == (1500.0, 10, 2)


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
    assert (limited.time_us, limited.floor_us, limited.times.relative) == (1200.0, 1190.0, False)
    # The other two share the median of their own floors.
    assert {row.floor_us for row in rows.values() if row.times.relative} == {1015.0}
    assert not [line for line in cautions(STUDY, training_of(tmp_path)) if line.startswith("Baselines drifted")]


@pytest.mark.parametrize(
    ("name", "relative"),
    [("NCCL_ALGO", True), ("RCCL_NUM_CHANNELS", True), ("TORCH_NCCL_HIGH_PRIORITY", True), ("OMP_NUM_THREADS", False)],
)
def test_only_variables_of_collectives_leave_the_floor_as_it_is(tmp_path: Path, name: str, relative: bool) -> None:
    train(tmp_path, step_us=1500.0, floor_us=1000.0)
    train(tmp_path, {"distributed.env": {name: "1"}}, step_us=1800.0, floor_us=1200.0)
    rows = rows_of(tmp_path)
    assert {row.times.relative for row in rows.values()} == {relative}
    assert rows[f"{name}=1"].time_us == pytest.approx(1650.0 if relative else 1800.0)


def test_points_of_equal_settings_say_how_far_two_may_be_apart(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((1000.0, 1030.0, 1000.0, 970.0)):
        train(tmp_path, {"repetition": repetition}, step_us=step_us, spread_us=0.1)
    for ahead, step_us in ((1, 975.0), (2, 900.0)):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=step_us, spread_us=0.1)
    rows = rows_of(tmp_path)
    # One point says less than four.
    assert rows["forward_prefetch=1"].step.noise_us > 60.0 > rows["defaults"].step.noise_us
    assert not rows["forward_prefetch=1"].step.differs_from(rows["defaults"].step)
    assert rows["forward_prefetch=2"].step.differs_from(rows["defaults"].step)


@pytest.mark.parametrize(
    ("step_us", "host_us", "best"),
    [
        (975.0, 300.0, "defaults"),
        (955.0, 300.0, "forward_prefetch=1"),
        # The time of the host, which differs more from point to point.
        (900.0, 2000.0, "defaults"),
        (700.0, 2000.0, "forward_prefetch=1"),
    ],
)
def test_where_nothing_was_measured_twice_what_such_steps_are_known_to_vary_by_is_a_tie(
    tmp_path: Path, step_us: float, host_us: float, best: str
) -> None:
    host = dict.fromkeys(("point", "none", "floor"), host_us)
    train(tmp_path, step_us=1000.0, host_us=host)
    train(tmp_path, PREFETCH, step_us=step_us, host_us=host)
    analysis = training_of(tmp_path)
    assert analysis.best.setting == best
    assert analysis.reason.endswith("; not repeated")


def test_the_best_of_many_equal_settings_is_not_taken_for_better(tmp_path: Path) -> None:
    """Each of twenty is faster or slower by what one pair could not be by chance."""
    train(tmp_path, step_us=1000.0, spread_us=0.1)
    for ahead in range(1, 20):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=1000.0 + 31.0 * (-1) ** ahead, spread_us=0.1)
    assert training_of(tmp_path).best.setting == "defaults"


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
    assert {row.times.relative for row in analysis.rows} == {relative}
    assert how_timed(analysis).startswith("Times are relative" if relative else "Times are as measured")


def write_search(directory: Path, **changes: Any) -> None:
    """A search that proved what the table alone would not call the fastest."""
    known: dict[str, Any] = {
        **{"label": "ranking fsdp2 step on 4 ranks", "overrides": ["workload=fsdp"], "knobs": {}},
        **{"best": {"fsdp.forward_prefetch": "1"}, "best_points": ["fsdp_1"], "baseline_points": ["fsdp_0"]},
        **{"time_us": 1200.0, "baseline_us": 1500.0, "gain": Gain(0.2, 0.03), "proven": True},
    }
    KnobRecord(searches=[KnobSearch(**{**known, **changes})]).write(directory)


@pytest.mark.parametrize(
    ("changes", "best", "proven"),
    [
        ({}, "forward_prefetch=1", True),
        # Points of another size, or that are not there; without an answer; nothing was faster.
        ({"best_points": ["fsdp_3"]}, "forward_prefetch=2", False),
        ({"best_points": ["fsdp_9"]}, "forward_prefetch=2", False),
        ({"time_us": None}, "forward_prefetch=2", False),
        ({"best": {}, "best_points": ["fsdp_0"], "gain": None}, "defaults", False),
        ({"best": {}, "best_points": ["fsdp_0"], "gain": None, "stopped": "out of budget"}, "defaults", False),
    ],
)
def test_searches_settle_what_they_measured(tmp_path: Path, changes: dict[str, Any], best: str, proven: bool) -> None:
    for ahead, step_us in enumerate((1500.0, 1200.0, 1100.0)):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=step_us)
    train(tmp_path, {"ranking.num_layers": 2})
    write_search(tmp_path, **changes)
    _, analysis = analyse(STUDY, read_points(tmp_path).points, read_records(tmp_path).knobs)
    assert (analysis.best.setting, analysis.proven) == (best, proven)


def test_a_record_that_says_no_gain_is_a_problem(tmp_path: Path) -> None:
    write_search(tmp_path)
    record = json.loads((tmp_path / KnobRecord.FILE).read_text())
    record["searches"][0]["gain"] = None
    (tmp_path / KnobRecord.FILE).write_text(json.dumps(record))
    records = read_records(tmp_path)
    assert not records.knobs
    assert "without its gain" in records.problems[0]
