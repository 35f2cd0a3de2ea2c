"""Searches of an operator that share points: who is asked what, and who is told what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from overlap_sweep.analysis.estimate import Estimate
from overlap_sweep.run_directory import PassTimes, Result, Status
from overlap_sweep.search.bisect import Effort
from overlap_sweep.search.cell import NONE, Candidate, Cell
from overlap_sweep.search.rounds import Request, Running, Task, collective_us
from overlap_sweep.search.start import usual
from overlap_sweep.search.trail import Failure, Trail, together
from tests.make_point import pass_times
from tests.points import operator_point
from tests.search.surfaces import Surface, cell, one_slot, pairs, settings, two_methods

RINGS = one_slot(settings("ring_exchange", num_sm=(1, 16)), "fc1_fprop")
BULKS = [c for c in pairs(settings("bulk", num_sm=(1, 16))) if len(c.settings) == 2]
NONE_US = {"fwd": 100.0, "bwd": 200.0}


def result(
    times_us: Mapping[str, float] | None = None, status: Status = "ok", spread_us: float = 0.0, **fields: Any
) -> Result:
    """A point whose passes take this long; those that are not given as long as none."""
    times: dict[str, PassTimes] = {
        name: pass_times((times_us or {}).get(name, none_us), none_us, 0.5 * none_us, spread_us=spread_us)
        for name, none_us in NONE_US.items()
    }
    return Result(name="point", point=operator_point(), status=status, times=times if status == "ok" else {}, **fields)


def task(forward: list[Candidate] = RINGS, backward: list[Candidate] = BULKS, **fields: Any) -> Task:
    cells = {"fwd": Cell("fc1 fwd", tuple(forward)), "bwd": Cell("fc1 bwd", tuple(backward))}
    cells = {name: one for name, one in cells.items() if one.candidates}
    return Task(operator_point(**fields), [], cells, Counter())


def begin(one: Task) -> Task:
    one.baseline = result()
    one.begin(0.0, Effort(), usual)
    return one


def begun(**fields: Any) -> Task:
    return begin(task(**fields))


def asked(**fields: Any) -> tuple[Task, Request]:
    """A task and the only point of its first round."""
    one = begun(**fields)
    (request,) = one.requests()
    return one, request


def test_forward_and_backward_candidates_share_a_point() -> None:
    _, request = asked()
    assert set(request.of_pass) == {"fwd", "bwd"}
    assert request.phases == {
        "fprop": {"method": "ring_exchange", "num_sm": 16},
        "dgrad": {"method": "bulk", "num_sm": 16},
        "wgrad": {"method": "bulk", "num_sm": 16},
    }


def test_where_a_pass_has_more_to_measure_the_rest_goes_alone() -> None:
    backward = one_slot(settings("ring_exchange", num_sm=(16,)), "fc2_dgrad")
    requests = begun(forward=two_methods((16,)), backward=backward, operator="fc2").requests()
    assert [set(request.of_pass) for request in requests] == [{"fwd", "bwd"}, {"fwd"}]
    assert set(requests[1].phases) == {"fprop"}


def test_a_pass_that_has_nothing_to_choose_is_not_searched() -> None:
    one, request = asked(forward=[])
    assert list(one.running) == list(request.of_pass) == ["bwd"]


def test_each_search_hears_of_its_own_pass_relative_to_none_beside_it() -> None:
    one, request = asked()
    # The machine was slower: none took 10 % longer than at first.
    slower = result()
    slower.times = {"fwd": pass_times(88.0, 110.0, 55.0), "bwd": pass_times(210.0, 220.0, 110.0)}
    one.answer(request, slower)
    assert one.running["fwd"].trail.time_us(request.of_pass["fwd"]) == pytest.approx(80.0)
    assert one.running["bwd"].trail.time_us(request.of_pass["bwd"]) == pytest.approx(210.0 / 1.1)


def test_baselines_come_from_the_point_without_overlap() -> None:
    one = task()
    one.baseline = result({"fwd": 102.0}, spread_us=1.0)
    one.begin(7.0, Effort(), usual)
    baselines = one.running["fwd"].trail.baselines
    # Both of its variants are the operator without overlap.
    assert (baselines.none.time_us, baselines.none.repeats) == (101.0, 10)
    assert baselines.none.noise_us > 0.0
    assert (baselines.floor_us, baselines.collective_us) == (50.0, 7.0)


def test_a_point_that_is_asked_for_again_is_another_repetition() -> None:
    one = begun(forward=RINGS[:1], backward=[])
    repetitions = []
    while requests := one.requests():
        (request,) = requests
        repetitions.append(request.repetition)
        one.answer(request, result({"fwd": 99.9}, spread_us=2.0))
    assert repetitions == [0, 1, 2]


def test_the_same_forward_beside_another_backward_is_no_repetition() -> None:
    one, first = asked()
    one.answer(first, result({"fwd": 80.0, "bwd": 120.0}))
    (second,) = one.requests()
    assert first.of_pass["bwd"] != second.of_pass["bwd"]
    assert second.repetition == 0


@pytest.mark.parametrize(
    ("errors", "wrong", "right"),
    [
        ({"output": 0.5}, "fwd", "bwd"),
        *(({"output": 0.0, f"{tensor}_grad": None}, "bwd", "fwd") for tensor in ("input", "weight", "bias")),
    ],
)
def test_wrong_numbers_are_the_fault_of_their_pass(errors: dict[str, Any], wrong: str, right: str) -> None:
    one, request = asked()
    one.answer(request, result(status="failed", error="wrong numbers: 0.5\nlog", relative_error=errors))
    to_blame = {request.of_pass[wrong]: Failure("wrong numbers: 0.5", wrong_numbers=True)}
    assert one.running[wrong].trail.failed == to_blame
    assert one.running[right].trail.failed == {}
    (again,) = one.requests()
    assert again.of_pass == {right: request.of_pass[right]}
    one.answer(again, result({right: 90.0}))
    assert one.running[right].trail.time_us(request.of_pass[right]) == 90.0


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "failed", "error": "rank 1 died"},
        {"status": "timeout", "error": "gave up after 300 s"},
        {"status": "skipped", "error": "num_sm=40 is more than the GPU's 32"},
        {"status": "failed", "error": "wrong", "relative_error": {"output": 0.5, "input_grad": 0.5}},
    ],
)
def test_where_nobody_can_be_blamed_each_is_measured_alone(fields: dict[str, Any]) -> None:
    one, request = asked()
    one.answer(request, result(**fields))
    assert not any(trail.failed for trail in one.trails)
    alone = one.requests()
    assert [dict(again.of_pass) for again in alone] == [{name: c} for name, c in request.of_pass.items()]
    assert [again.repetition for again in alone] == [0, 0]
    one.answer(alone[0], result(**fields))
    one.answer(alone[1], result({"bwd": 120.0}))
    forward, backward = one.trails
    (failure,) = forward.failed.values()
    assert failure.reason == fields["error"]
    assert failure.wrong_numbers == ("relative_error" in fields)
    assert backward.failed == {}
    assert backward.time_us(request.of_pass["bwd"]) == 120.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"status": "failed", "error": "died", "relative_error": {"output": 1e-6}}, "died"),
        ({"status": "timeout"}, "timeout"),
    ],
    ids=["errors within the tolerance", "a failure without a word"],
)
def test_what_is_no_wrong_number_is_a_failure_by_its_error_or_status(fields: dict[str, Any], reason: str) -> None:
    one, request = asked(backward=[])
    one.answer(request, result(**fields))
    assert one.trails[0].failed == {request.of_pass["fwd"]: Failure(reason)}


def test_launch_bound_times_say_nothing_and_are_taken_once_more() -> None:
    one, request = asked()
    one.answer(request, result({"fwd": 1.0, "bwd": 1.0}, launch_bound=True))
    assert not any(trail.failed for trail in one.trails)
    alone = one.requests()
    assert [set(again.of_pass) for again in alone] == [{"fwd"}, {"bwd"}]
    one.answer(alone[1], result({"bwd": 120.0}))
    assert one.running["bwd"].trail.best == request.of_pass["bwd"]


def test_what_stays_launch_bound_has_no_time() -> None:
    one = begun(backward=[])
    for _ in range(9):
        for request in one.requests():
            one.answer(request, result({"fwd": 1.0}, launch_bound=True))
    (trail,) = one.trails
    assert trail.stopped
    assert trail.best == NONE
    assert trail.failed
    assert all(failure.reason.startswith("launch-bound") for failure in trail.failed.values())


def test_what_was_answered_of_a_round_counts_when_it_ends_too_early() -> None:
    one = begun(forward=two_methods((16,)), backward=[], operator="fc2")
    first, second = one.requests()
    one.answer(first, result({"fwd": 80.0}))
    (running,) = one.running.values()
    running.stop("search.max_points=2 is used up")
    assert running.trail.best == first.of_pass["fwd"]
    assert running.trail.stopped == "search.max_points=2 is used up"
    assert second.of_pass["fwd"] not in running.trail.samples
    assert one.requests() == []


def test_a_search_that_has_ended_keeps_its_own_reason() -> None:
    surface = Surface(cell(RINGS), lambda candidate: 80.0, none_us=100.0)
    running = Running(surface.trail(), Effort(), usual)
    while running.pending:
        running.tell(running.pending[0], surface.answer(running.pending[0]))
    running.stop("too late")
    assert running.trail.stopped.startswith("nothing left that could be faster than ")


def test_searches_under_way_do_as_the_search_alone() -> None:
    """Told one candidate after the other, a search asks the same as one that is told all of them at once."""
    surfaces = [Surface(cell(BULKS), lambda c: 150.0 + len(str(c)) % 3, none_us=200.0) for _ in range(2)]
    running, asked = Running(surfaces[0].trail(), Effort(), usual), []
    while running.pending:
        asked.append(running.pending[-1])
        running.tell(asked[-1], surfaces[0].answer(asked[-1]))
    trail = surfaces[1].search()
    assert sorted(map(str, asked)) == sorted(str(c) for batch in surfaces[1].batches for c in batch)
    assert running.trail.best == trail.best


def test_presets_are_candidates_and_come_first() -> None:
    one = task(backward=[])
    own, foreign = RINGS[0], one_slot(settings("ring_exchange", num_sm=(7,), aggregate=(True,)), "fc1_fprop")[0]
    of_backward = one_slot(settings("bulk", num_sm=(5,)), "fc1_dgrad")[0]
    for pass_name, candidate in (("fwd", own), ("fwd", foreign), ("bwd", of_backward)):
        one.seed(pass_name, candidate)
    assert one.cells["fwd"].candidates == (*RINGS, foreign)
    assert one.cells["bwd"] == Cell(f"{one.label} bwd", (of_backward,))
    assert begin(one).running["fwd"].pending[:2] == [own, foreign]


def test_tasks_of_one_case_differ_in_their_operator_only() -> None:
    assert task().case == task(operator="fc2").case
    assert len({task(**fields).case for fields in ({}, {"tp_size": 4}, {"precision": "bf16"}, {"method": "none"})}) == 4
    assert (task().label, task().case_label) == ("m TP=2 fc1", "m TP=2")


def test_the_time_of_a_collective_is_what_none_takes_beyond_the_floor() -> None:
    """A column-parallel operator has two of them backward."""
    fc1, fc2 = task(), task(operator="fc2")
    for one, exposed in ((fc1, {"fwd": 30.0, "bwd": 80.0}), (fc2, {"fwd": 50.0, "bwd": 10.0})):
        one.baseline = result()
        one.baseline.times = {name: pass_times(100.0, 50.0 + exposed_us, 50.0) for name, exposed_us in exposed.items()}
    assert collective_us([fc1, fc2]) == pytest.approx((30.0 + 40.0) / 2)
    assert collective_us([fc2]) == pytest.approx(30.0)


def test_samples_of_one_setting_together() -> None:
    one, two = Estimate(100.0, 3.0, 7), Estimate(102.0, 4.0, 7)
    assert together([one]) == one
    assert together([one, two]) == Estimate(101.0, 2.5, 14)
    # Where they differ by more than they say, that is the noise.
    far = together([one, Estimate(120.0, 4.0, 7)])
    assert far.noise_us == pytest.approx(10.0 / 2**0.5)


def test_a_trail_knows_none_before_anything_is_measured() -> None:
    trail: Trail = Surface(cell(RINGS), lambda candidate: 80.0, none_us=100.0).trail()
    assert (trail.best, trail.known, trail.overlaps, trail.evaluations) == (NONE, [NONE], [], 0)
    assert trail.time_us(RINGS[0]) == float("inf")
