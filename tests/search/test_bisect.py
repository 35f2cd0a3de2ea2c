"""The search of one cell, on surfaces whose truth is known: what it finds and leaves unmeasured, and what fails."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from overlap_sweep.config import Search
from overlap_sweep.search import Failure
from overlap_sweep.search.cell import NONE, Candidate
from tests.search.surfaces import (
    LADDER,
    NONE_US,
    Surface,
    bulk_ladder,
    cell,
    exposed,
    hyperbola,
    method_of,
    num_sm,
    one_slot,
    pairs,
    settings,
    settings_tried,
    two_methods,
)

Shape = Callable[[int], float]


def along(shape: Shape, counts: Sequence[int] = LADDER, **fields: Any) -> Surface:
    """One arm, by its num_sm."""
    return Surface(bulk_ladder(counts), lambda candidate: shape(num_sm(candidate)), **fields)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("level", [1.0, 1.004, 1.02, 1.1])
def test_a_flat_ladder_ends_early_and_nothing_slower_than_none_is_chosen(level: float, seed: int) -> None:
    trail = along(lambda n: level * NONE_US, noise=0.004, seed=seed).search()
    assert settings_tried(trail) <= 5
    assert trail.best == NONE or level <= 1.004


@pytest.mark.parametrize(
    ("shape", "best"),
    [
        (lambda n: 500 + 6000 / n, 32),
        (lambda n: 600 + 200 / n, 32),
        (lambda n: 600 + 10 * n, 1),
        (lambda n: 300 / (1 - n / 40), 1),
    ],
)
def test_monotone_ladders_lead_to_an_end(shape: Shape, best: int) -> None:
    trail = along(shape).search()
    assert shape(num_sm(trail.best)) == pytest.approx(shape(best), rel=0.01)
    assert settings_tried(trail) <= 6


@pytest.mark.parametrize("best", LADDER)
@pytest.mark.parametrize(
    "shape_of",
    [
        *(lambda best, rest=rest: hyperbola(best, rest, 0.8) for rest in (0.0, 0.5, 0.9)),
        *(lambda best, between=between: exposed(500.0, best + between) for between in (0.0, 0.5)),
    ],
)
def test_the_bottom_is_found_wherever_it_is(shape_of: Callable[[int], Shape], best: int) -> None:
    """In a kink communication is as fast as its GEMM: the curve has no slope zero there, but a corner."""
    shape = shape_of(best)
    surface = along(shape, none_us=1.2 * shape(16))
    trail = surface.search()
    assert surface.regret(trail.best) <= Search().worth
    assert trail.evaluations == settings_tried(trail) == surface.asked.total() <= 8


@pytest.mark.xfail(strict=True, reason="between two measurements of almost the same time nothing is looked for")
@pytest.mark.parametrize("shape", [hyperbola(11.5, 0.0, 0.8), exposed(500.0, 8.6)])
def test_a_bend_between_two_measurements_of_almost_the_same_time_is_found(shape: Shape) -> None:
    """16 is a little faster than 8, and 32 promises nothing; 10 and 12 would be 5 % faster."""
    surface = along(shape, none_us=1.2 * shape(16))
    assert surface.regret(surface.search().best) <= 0.03


def test_only_the_fastest_of_the_arms_that_start_far_off_gets_a_second_look() -> None:
    """One measurement bounds nothing; two arms that are both so much slower are not worth it."""
    surface = Surface(cell(two_methods()), lambda c: 1300.0 if method_of(c) == "pipeline" else 1400.0)
    trail = surface.search()
    assert trail.best == NONE
    assert settings_tried(trail) <= 5
    assert [str(c) for c in surface.asked if "ring" in str(c)] == ["ring_sm16"]


def test_how_far_off_an_arm_may_start_can_be_said() -> None:
    surface = Surface(cell(two_methods()), lambda c: 900.0 if method_of(c) == "pipeline" else 600.0 + 40.0 * num_sm(c))
    assert method_of(surface.search().best) == "pipeline"
    assert method_of(surface.search(Search(reach=1.0)).best) == "ring_exchange"


def test_what_promises_little_is_not_measured() -> None:
    """The more a measurement must promise the fewer there are, and what is found is as good as that."""
    shape, tried = hyperbola(6, 0.7, 0.8), []
    for worth in (0.001, 0.01, 0.1):
        surface = along(shape, none_us=1.2 * shape(16))
        trail = surface.search(Search(worth=worth))
        assert surface.regret(trail.best) <= worth
        tried.append(settings_tried(trail))
    assert tried == sorted(tried, reverse=True)
    assert tried[-1] < tried[0]


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
def test_contenders_are_measured_again_together_and_as_often_as_asked(repeats: int) -> None:
    surface = along(lambda n: {16: 800.0, 8: 801.0}.get(n, 840.0), said_noise=0.01)
    surface.search(Search(repeats=repeats))
    often = {num_sm(candidate): count for candidate, count in surface.asked.items() if count > 1}
    assert often == ({16: repeats, 8: repeats} if repeats > 1 else {})
    assert [sorted(map(num_sm, batch)) for batch in surface.batches[len(surface.asked) :]] == [[8, 16]] * (repeats - 1)
    # A single rival of none is, too.
    surface = along(lambda n: 999.0, (16,), said_noise=0.01)
    surface.search(Search(repeats=repeats))
    assert list(surface.asked.values()) == [repeats]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hit", LADDER)
def test_a_sample_three_times_too_slow_costs_little(hit: int, seed: int) -> None:
    """The first measurement at this num_sm is wrong; what is chosen instead lies next to it."""
    spike = next(candidate for candidate in bulk_ladder().candidates if num_sm(candidate) == hit)
    surface = along(hyperbola(10, 0.8, 0.8), noise=0.003, seed=seed, outliers={(spike, 0): 3.0})
    trail = surface.search()
    assert trail.best not in (NONE, spike)
    assert surface.regret(trail.best) < 0.05


def test_a_lucky_sample_does_not_decide_and_samples_that_contradict_each_other_make_noise() -> None:
    """The first sample is 2 % too fast, within what it says of its noise: measured again, the rival is faster."""
    lucky, rival = bulk_ladder((8, 16)).candidates
    surface = along(lambda n: {8: 800.0, 16: 792.0}[n], (8, 16), said_noise=0.012, outliers={(lucky, 0): 0.98})
    assert surface.search().best == rival
    assert surface.asked == {lucky: 3, rival: 3}
    trail = along(lambda n: 995.0, (8,), said_noise=0.006, outliers={(lucky, 1): 1.2}).search()
    assert trail.best == NONE
    assert trail.estimate(lucky).noise_us > 50.0


def test_knobs_are_flipped_one_after_the_other_from_the_fastest() -> None:
    def time_us(candidate: Candidate) -> float:
        (setting,) = candidate.settings.values()
        own_us = hyperbola(4, 0.8, 0.8)(setting["num_sm"])
        return own_us * (0.95 if setting["aggregate"] else 1.0) * (0.9 if setting["set_sm_margin"] else 1.0)

    knobs = {"aggregate": (False, True), "use_ce": (False,), "set_sm_margin": (False, True)}
    surface = Surface(cell(one_slot(settings("ring_exchange", num_sm=LADDER, **knobs))), time_us)
    trail = surface.search()
    assert {"aggregate": True, "set_sm_margin": True}.items() <= trail.best.settings["fc1_fprop"].items()
    assert surface.regret(trail.best) <= Search().worth
    assert settings_tried(trail) <= 15
    assert len(surface.cell.candidates) == 52


def test_every_method_gets_its_chance_with_the_library_s_own_knobs_before_any_is_searched() -> None:
    candidates = two_methods((8, 16), num_splits=(2, 4), set_sm_margin=(False, True))
    surface = Surface(cell(candidates), lambda c: 800.0 if method_of(c) == "ring_exchange" else 900.0)
    assert method_of(surface.search().best) == "ring_exchange"
    usual = {"method": "pipeline", "num_sm": 16, "num_splits": 4, "set_sm_margin": True}
    ring = {"method": "ring_exchange", "num_sm": 16}
    assert [first.settings for first in surface.batches[0]] == [{"fc2_fprop": usual}, {"fc2_fprop": ring}]


def two_slots(dgrad: Shape, wgrad: Shape) -> Callable[[Candidate], float]:
    """Half of none each, as both run one after the other; a slot that is left out takes what it takes in none."""

    shapes = {"fc1_dgrad": dgrad, "fc1_wgrad": wgrad}
    return lambda candidate: sum(
        (shape(num_sm(candidate, slot)) if slot in candidate.settings else NONE_US) / 2
        for slot, shape in shapes.items()
    )


@pytest.mark.parametrize("best", [(1, 32), (8, 8), (32, 2), (16, 3)])
def test_two_slots_are_searched_one_after_the_other(best: tuple[int, int]) -> None:
    shapes = [hyperbola(n, 0.95, 0.8) for n in best]
    surface = Surface(cell(pairs(settings("bulk", num_sm=LADDER))), two_slots(*shapes))
    trail = surface.search()
    assert set(trail.best.settings) == {"fc1_dgrad", "fc1_wgrad"}
    assert surface.regret(trail.best) <= 2 * Search().worth
    assert settings_tried(trail) <= 18
    assert len(surface.cell.candidates) == 13 * 13 + 2 * 13


@pytest.mark.parametrize(("slot", "other"), [("fc1_dgrad", "fc1_wgrad"), ("fc1_wgrad", "fc1_dgrad")])
def test_one_of_two_slots_is_left_without_overlap_where_that_is_faster(slot: str, other: str) -> None:
    shapes: dict[str, Shape] = {slot: lambda n: 1100 + n, other: hyperbola(8, 0.8, 0.8)}
    surface = Surface(cell(pairs(settings("bulk", num_sm=LADDER))), two_slots(shapes["fc1_dgrad"], shapes["fc1_wgrad"]))
    trail = surface.search()
    assert set(trail.best.settings) == {other}
    assert surface.regret(trail.best) <= Search().worth


def test_a_recording_with_holes_is_searched_where_it_has_something() -> None:
    holes = [c for index, c in enumerate(pairs(settings("bulk", num_sm=LADDER))) if index % 3]
    surface = Surface(cell(holes), two_slots(hyperbola(8, 0.8, 0.8), hyperbola(4, 0.8, 0.8)))
    assert surface.regret(surface.search().best) < 0.03
    assert set(surface.asked) <= set(holes)


def test_a_cell_without_candidates_is_answered_at_once() -> None:
    surface = Surface(cell([]), lambda candidate: 0.0)
    trail = surface.search()
    assert (trail.best, trail.overlaps, trail.evaluations, surface.batches) == (NONE, [], 0, [])


WRONG = Failure("relative error output 0.5", wrong_numbers=True)
DIED = Failure("rank 3 died")


def falling(failures: Mapping[int, Failure]) -> Surface:
    """The more SMs the faster; these counts fail."""
    failing = {c: failures[num_sm(c)] for c in bulk_ladder().candidates if num_sm(c) in failures}
    return along(lambda n: 600.0 + 3000.0 / n, failures=failing)


def test_wrong_numbers_at_one_count_distrust_all_of_them_also_what_looked_fine() -> None:
    surface = falling({32: WRONG})
    trail = surface.search()
    assert num_sm(list(surface.asked)[-1]) == 32
    assert (trail.best, trail.samples) == (NONE, {})
    assert all(failure.wrong_numbers for failure in trail.failed.values())
    assert "dgrad bulk_sm32 failed: relative error output 0.5" in trail.notes


def test_another_arm_is_searched_where_one_fails() -> None:
    candidates = two_methods()
    failing = {c: WRONG for c in candidates if method_of(c) == "pipeline" and num_sm(c) == 16}
    surface = Surface(cell(candidates), lambda c: hyperbola(8, 0.8, 0.7)(num_sm(c)), failures=failing)
    trail = surface.search()
    assert method_of(trail.best) == "ring_exchange"
    assert surface.regret(trail.best) < 0.03
    assert sum(method_of(c) == "pipeline" for c in surface.asked) == 1


def test_one_crash_is_an_accident_and_two_give_an_arm_up_and_keep_what_was_right() -> None:
    once = falling({32: DIED}).search()
    assert (num_sm(once.best), once.notes) == (28, ["dgrad bulk_sm32 failed: rank 3 died"])
    again = falling({32: DIED, 28: DIED, 24: DIED, 20: DIED}).search()
    assert (num_sm(again.best), len(again.failed)) == (16, 2)
    at_once = falling(dict.fromkeys(LADDER, DIED)).search()
    assert (at_once.best, settings_tried(at_once)) == (NONE, 2)


@pytest.mark.parametrize("failure", [WRONG, DIED])
def test_a_first_measurement_that_fails_costs_no_whole_method(failure: Failure) -> None:
    """Wrong numbers distrust its arm, and another is entered; after a crash another num_sm is."""
    candidates = one_slot(settings("pipeline", num_sm=LADDER, num_splits=(4, 2)), "fc2_fprop")
    first = next(iter(Surface(cell(candidates), lambda c: 800.0).search().samples))
    trail = Surface(cell(candidates), lambda c: 800.0, failures={first: failure}).search()
    assert first in trail.failed
    assert trail.best != NONE
    assert (trail.best.arm == first.arm) == (failure is DIED)


def test_a_knob_s_value_that_failed_is_not_tried_elsewhere() -> None:

    def knobs(candidate: Candidate) -> dict[str, Any]:
        return candidate.settings["fc1_fprop"]

    candidates = one_slot(settings("ring_exchange", num_sm=(1,), use_ce=(True, False), aggregate=(False, True)))
    failing = {candidate: WRONG for candidate in candidates if not knobs(candidate)["use_ce"]}
    surface = Surface(cell(candidates), lambda c: 700.0 if knobs(c)["aggregate"] else 800.0, failures=failing)
    assert knobs(surface.search().best) == {"method": "ring_exchange", "num_sm": 1, "use_ce": True, "aggregate": True}
    assert [knobs(c)["aggregate"] for c in surface.asked if not knobs(c)["use_ce"]] == [False]


@pytest.mark.parametrize("failure", [WRONG, DIED])
def test_where_everything_fails_the_answer_is_no_overlap(failure: Failure) -> None:
    candidates = two_methods(num_splits=(2, 4))
    trail = Surface(cell(candidates), lambda c: 500.0, failures=dict.fromkeys(candidates, failure)).search()
    assert (trail.best, trail.time_us(trail.best), trail.overlaps) == (NONE, 1000.0, [])
    assert settings_tried(trail) == len(trail.failed) <= 4
    assert trail.stopped == "no untested setting could be faster than those measured"


def test_a_contender_that_fails_when_it_is_measured_again_is_out() -> None:
    candidates = two_methods((16,))
    surface = Surface(cell(candidates), lambda candidate: 800.0, said_noise=0.01)
    answer, failing = surface.answer, candidates[0]

    def fails_the_second_time(candidate: Candidate) -> Any:
        found = answer(candidate)
        return WRONG if candidate == failing and surface.asked[candidate] == 2 else found

    surface.answer = fails_the_second_time  # type: ignore[method-assign]
    trail = surface.search()
    assert (trail.best, set(trail.failed), trail.evaluations) == (candidates[1], {failing}, 2 + 1)
