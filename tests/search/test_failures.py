"""Settings that cannot be measured, or compute something else than without overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from overlap_sweep.search.cell import NONE, Candidate
from overlap_sweep.search.trail import Failure
from tests.search.surfaces import (
    LADDER,
    Surface,
    bulk_ladder,
    cell,
    hyperbola,
    method_of,
    num_sm,
    one_slot,
    settings,
    two_methods,
)

WRONG = Failure("relative error output 0.5", wrong_numbers=True)
DIED = Failure("rank 3 died")


def falling(failures: Mapping[int, Failure]) -> Surface:
    """The more SMs the faster; these counts fail."""
    ladder = bulk_ladder()
    failing = {c: failures[num_sm(c)] for c in ladder.candidates if num_sm(c) in failures}
    return Surface(ladder, lambda candidate: 600.0 + 3000.0 / num_sm(candidate), failures=failing)


def tried(surface: Surface) -> list[int]:
    return [num_sm(candidate) for batch in surface.batches for candidate in batch]


def test_wrong_numbers_at_one_count_distrust_all_of_them_also_what_looked_fine() -> None:
    surface = falling({32: WRONG})
    trail = surface.search()
    assert tried(surface)[-1] == 32
    assert trail.best == NONE
    assert trail.samples == {}
    assert all(failure.wrong_numbers for failure in trail.failed.values())
    assert "dgrad bulk_sm32 failed: relative error output 0.5" in trail.notes
    assert any(note.startswith("dgrad bulk_sm16 is not trusted: dgrad bulk_sm32") for note in trail.notes)


def test_another_arm_is_searched_all_the_same() -> None:
    candidates = two_methods()
    failing = {c: WRONG for c in candidates if method_of(c) == "pipeline" and num_sm(c) == 16}
    surface = Surface(cell(candidates), lambda c: hyperbola(8, 0.8, 0.7)(num_sm(c)), failures=failing)
    trail = surface.search()
    assert method_of(trail.best) == "ring_exchange"
    assert surface.regret(trail.best) < 0.03
    assert sum(method_of(c) == "pipeline" for c in surface.asked) == 1


def test_one_crash_is_an_accident_and_two_give_an_arm_up_and_keep_what_was_right() -> None:
    once = falling({32: DIED}).search()
    assert num_sm(once.best) == 28
    assert once.notes == ["dgrad bulk_sm32 failed: rank 3 died"]
    again = falling({32: DIED, 28: DIED, 24: DIED, 20: DIED}).search()
    assert (num_sm(again.best), len(again.failed)) == (16, 2)


@pytest.mark.parametrize("failure", [WRONG, DIED])
def test_a_first_measurement_that_fails_costs_no_whole_method(failure: Failure) -> None:
    """Wrong numbers distrust its arm, and another is entered; after a crash another num_sm is."""
    candidates = one_slot(settings("pipeline", num_sm=LADDER, num_splits=(4, 2)), "fc2_fprop")
    (first,) = next(iter(Surface(cell(candidates), lambda c: 800.0).search().samples.items()))[:1]
    surface = Surface(cell(candidates), lambda c: 800.0, failures={first: failure})
    trail = surface.search()
    assert first in trail.failed
    assert trail.best != NONE
    same_arm = trail.cell.arm(trail.best) == trail.cell.arm(first)
    assert same_arm == (failure is DIED)


def test_two_first_measurements_that_crash_leave_the_arm() -> None:
    surface = falling(dict.fromkeys(LADDER, DIED))
    trail = surface.search()
    assert (trail.best, len(tried(surface))) == (NONE, 2)


def test_a_knob_s_value_that_failed_is_not_tried_elsewhere() -> None:

    def knobs(candidate: Candidate) -> dict[str, Any]:
        return candidate.settings["fc1_fprop"]

    candidates = one_slot(settings("ring_exchange", num_sm=(1,), use_ce=(True, False), aggregate=(False, True)))
    failing = {candidate: WRONG for candidate in candidates if not knobs(candidate)["use_ce"]}
    surface = Surface(cell(candidates), lambda c: 700.0 if knobs(c)["aggregate"] else 800.0, failures=failing)
    trail = surface.search()
    assert knobs(trail.best) == {"method": "ring_exchange", "num_sm": 1, "use_ce": True, "aggregate": True}
    assert [knobs(c)["aggregate"] for c in surface.asked if not knobs(c)["use_ce"]] == [False]


@pytest.mark.parametrize("failure", [WRONG, DIED])
def test_where_everything_fails_the_answer_is_no_overlap(failure: Failure) -> None:
    candidates = two_methods(num_splits=(2, 4))
    surface = Surface(cell(candidates), lambda c: 500.0, failures=dict.fromkeys(candidates, failure))
    trail = surface.search()
    assert (trail.best, trail.time_us(trail.best)) == (NONE, 1000.0)
    assert trail.overlaps == []
    assert trail.settings_tried == len(trail.failed) <= 4
    assert trail.stopped == "nothing left that could be faster than none"


def test_a_contender_that_fails_when_it_is_measured_again_is_out() -> None:
    candidates = two_methods((16,))
    surface = Surface(cell(candidates), lambda candidate: 800.0, said_noise=0.01)
    answer, failing = surface.answer, candidates[0]

    def fails_the_second_time(candidate: Candidate) -> Any:
        found = answer(candidate)
        return WRONG if candidate == failing and surface.asked[candidate] == 2 else found

    surface.answer = fails_the_second_time  # type: ignore[method-assign]
    trail = surface.search()
    assert trail.best == candidates[1]
    assert set(trail.failed) == {failing}
    assert trail.evaluations == 2 + 1


def test_a_preset_that_fails_is_only_noted() -> None:
    surface = falling({3: DIED})
    seed = next(c for c in surface.cell.candidates if num_sm(c) == 3)
    trail = surface.search(seeds=[seed])
    assert num_sm(trail.best) == 32
    assert trail.notes == ["dgrad bulk_sm3 failed: rank 3 died"]
