"""Which calls of optimizers make up a step."""

import gc
from collections.abc import Iterable

import pytest

from overlap_sweep.recorder import step_calls
from overlap_sweep.recorder.step_calls import StepCalls


class Party:
    """An optimizer as `StepCalls` sees it: parameters in groups."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, list[object]]] = [{"params": [set()]}]


class Found:
    """What was found in a sequence of calls, a letter for each optimizer."""

    def __init__(self, calls: Iterable[str], per_step: int | None = None) -> None:
        self.calls, parties = StepCalls(per_step), {letter: Party() for letter in set(calls)}
        self.ends = "".join(".|"[self.calls.add(parties[letter])] for letter in calls)


@pytest.mark.parametrize(
    ("calls", "per_step", "changes"),
    [
        ("aaaaaaaa", 1, 0),
        ("abababab", 2, 1),
        ("aaaaab" * 3, 6, 1),
        ("abc" * 4, 3, 2),
        ("ababac" * 3, 6, 2),
        ("aabb" * 3, 4, 3),
        ("abbc" * 3, 4, 3),
        # Trained alone at first.
        ("aaaa" + "ab" * 4, 2, 2),
        # More often at first.
        ("a" * 20 + "b" + "aab" * 4, 3, 2),
        # A GradScaler leaves one out.
        ("ababbababab", 2, 4),
    ],
)
def test_the_calls_of_a_step_are_the_smallest_period(calls: str, per_step: int, changes: int) -> None:
    found = Found(calls + calls[-per_step:] * 5)
    assert (found.calls.per_step, found.calls.changes) == (per_step, changes)
    # Once found, it stays, and the ends are that far apart.
    assert Found(calls).calls.changes == changes
    assert {len(step) for step in found.ends.split("|")[-4:-1]} == {per_step - 1}


def test_whole_steps_are_counted_again_when_the_calls_of_a_step_have_changed() -> None:
    assert Found("aaaaa").calls.steps == 5
    assert Found("aaaaab").calls.steps == 1
    assert Found("aaaaabaaaaa").calls.steps == 1
    assert Found("aaaaabaaaaab").calls.steps == 2


def test_a_given_number_is_taken_whoever_is_called() -> None:
    assert Found("aaaabaaaa", per_step=4).ends == "...|...|."
    assert Found("ab" * 4, per_step=1).ends == "||||||||"


def test_an_optimizer_that_steps_one_group_after_the_other_is_as_many() -> None:
    optimizer, calls, groups = Party(), StepCalls(), [[{"params": [{1}]}], [{"params": []}, {"params": [{2}]}]]
    for i in range(8):
        optimizer.param_groups = groups[i % 2]  # type: ignore[assignment]
        calls.add(optimizer)
    assert (calls.per_step, calls.steps) == (2, 4)


def test_an_optimizer_that_is_made_anew_for_every_step_is_one() -> None:
    calls = StepCalls()
    for _ in range(6):
        party = Party()
        calls.add(party)
        del party
        gc.collect()
    assert (calls.per_step, calls.steps, calls.changes) == (1, 6, 0)


def test_an_optimizer_whose_parameter_is_made_anew_for_every_step_is_one() -> None:
    optimizer, calls = Party(), StepCalls()
    for _ in range(6):
        optimizer.param_groups = [{"params": [set()]}]
        calls.add(optimizer)
        gc.collect()
    assert (calls.per_step, calls.changes) == (1, 0)


def test_where_nothing_repeats_a_bounded_number_of_calls_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_calls, "LONGEST_CYCLE", 50)
    parties, calls = [Party() for _ in range(200)], StepCalls()
    for party in parties:
        calls.add(party)
    assert calls.per_step == 50
    for _ in range(60):
        calls.add(parties[0])
    assert calls.per_step == 1
