"""What a search says when a machine was disturbed, how it goes on then, and which of several settings it proves."""

import random
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest

from overlap_sweep.config import Search
from overlap_sweep.results.records import Expected
from overlap_sweep.search import Samples, Setting, conduct
from overlap_sweep.search.knob_trail import Knob, KnobTrail
from overlap_sweep.search.knobs import search
from overlap_sweep.search.prior import Prior
from overlap_sweep.search.undecided import rivals, verdict
from overlap_sweep.workloads import Sample

KNOBS = (Knob("workers", ("null", "1", "4")), Knob("pin", ("null", "true")))
BASE, ONE, FOUR, PIN = ("null", "null"), ("1", "null"), ("4", "null"), ("null", "true")
PRIOR = Prior({(0, "1"): Expected(0.1, 0.0, 0.3), (0, "4"): Expected(0.1, 0.0, 0.3), (1, "true"): Expected(0.1, 0, 1)})


def sample(ms: float) -> Sample:
    return Sample(tuple(1000 * ms * share for share in (0.995, 1.0, 1.005, 1.0, 1.0)), by_mean=True)


def measured(**runs_ms: Sequence[float]) -> KnobTrail:
    """Returns a search that has measured these runs of settings."""
    trail = KnobTrail(KNOBS, lambda setting: None, lambda: 0.0, PRIOR)
    for name, times_ms in runs_ms.items():
        for ms in times_ms:
            trail.found.add({"base": BASE, "one": ONE, "four": FOUR, "pin": PIN}[name], sample(ms))
    return trail


@pytest.mark.parametrize(
    ("runs_ms", "unfinished", "said", "open_settings"),
    [
        # Steady times, by which a gain of 5 % would have been seen.
        ({"base": (100, 100.5, 99.5), "one": (100.2,), "four": (103,)}, False, "keep", []),
        # Nothing was tried yet.
        ({"base": (100, 100.5)}, True, "undecided", []),
        # A command that takes between 16 and 194 ms: whatever was tried may be faster.
        ({"base": (194, 16, 20), "one": (90,), "four": (150,)}, False, "undecided", [ONE, FOUR]),
        # What seems faster by a gain worth having.
        ({"base": (100, 104, 97), "four": (96,), "pin": (108,)}, False, "undecided", [FOUR]),
        # What seems faster by less.
        ({"base": (100, 100.5, 99.5), "four": (99.2,)}, False, "keep", []),
    ],
)
def test_the_command_is_kept_only_if_the_runs_could_have_shown_a_gain(
    runs_ms: dict[str, Sequence[float]], unfinished: bool, said: str, open_settings: list[Setting]
) -> None:
    trail = measured(**runs_ms)
    assert (verdict(trail, unfinished=unfinished), rivals(trail)) == (said, open_settings)


def test_a_steady_setting_is_preferred_to_a_lucky_one() -> None:
    trail = measured(base=(115, 118, 121), one=(91, 103, 125), four=(94.5, 95.2, 95.2))
    assert rivals(trail)[0] == FOUR
    trail = measured(base=(115, 118, 121), one=(94,), four=(94.5, 95.2, 95.2))
    assert rivals(trail)[0] == FOUR
    assert trail.best == FOUR


def test_runs_in_turns_are_compared_round_by_round_while_the_machine_is_disturbed() -> None:
    """Both take longer in later rounds: by plain times nothing is known, by ratios all."""
    samples = Samples()
    for base_ms, one_ms in ((100, 90), (180, 163), (171, 153), (98, 88.5), (240, 216)):
        samples.rounds.append({})
        samples.add(BASE, sample(base_ms))
        samples.add(ONE, sample(one_ms))
    gain = samples.share(BASE, ONE)
    assert gain.share == pytest.approx(0.1, abs=0.005)
    assert gain.noise < 0.02
    assert samples.beats(ONE, BASE)
    alone = Samples()
    alone.of = samples.of
    assert not alone.beats(ONE, BASE)


def searched(step_ms: Callable[[Setting], float], most: int, seed: int = 0, noise: float = 0.01) -> KnobTrail:
    """Returns a whole search on a machine that from some run on takes two thirds longer, and for single runs twice as
    long."""
    chance, asked = random.Random(seed), list[Setting]()
    from_run = chance.randint(2, 20)

    def answer(setting: Setting) -> Sample:
        asked.append(setting)
        slowed = (1.7 if len(asked) > from_run else 1.0) * (2 if chance.random() < 0.04 else 1)
        return sample(step_ms(setting) * slowed * chance.gauss(1, noise))

    trail = KnobTrail(KNOBS, lambda setting: None, lambda: most - len(asked), PRIOR)
    conduct(search(trail, Search()), lambda wanted: [answer(setting) for setting in wanted])
    assert len(asked) <= most
    return trail


def test_a_search_uses_its_budget_until_something_is_decided() -> None:
    found = [searched(lambda setting: 90 if setting[0] == "4" else 100, 100, seed) for seed in range(12)]
    assert [trail.best for trail in found].count(FOUR) >= 9
    assert {verdict(trail, unfinished=False) for trail in found if trail.best == FOUR} == {"proven"}
    # With the budget of the first rounds alone it is rarely said that nothing is faster.
    short = [searched(lambda setting: 90 if setting[0] == "4" else 100, 14, seed) for seed in range(12)]
    assert [verdict(trail, unfinished=False) for trail in short].count("keep") <= 2


def test_what_comes_close_takes_turns_in_the_same_proof() -> None:
    """One value is once the fastest, and takes longer later: it is not what is proven."""
    runs_ms = {"null": cycle((120.0, 122.0, 118.0)), "1": cycle((91.0, 103.0, 125.0)), "4": cycle((94.5, 95.2, 95.2))}
    asked = list[Setting]()

    def answer(setting: Setting) -> Sample:
        asked.append(setting)
        return sample(next(runs_ms[setting[0]]))

    trail = KnobTrail(KNOBS[:1], lambda setting: None, lambda: 40 - len(asked), PRIOR)
    conduct(search(trail, Search()), lambda wanted: [answer(setting) for setting in wanted])
    assert (trail.best, verdict(trail, unfinished=False)) == (("4",), "proven")
    first, *_ = trail.proof.rounds
    assert first.keys() == {("null",), ("1",), ("4",)}


@pytest.mark.parametrize("noise", [0.003, 0.02])
def test_where_nothing_helps_nothing_is_proven_however_long_it_goes_on(noise: float) -> None:
    found = [searched(lambda setting: 100.0, 100, seed, noise) for seed in range(40)]
    assert sum(trail.best != trail.baseline for trail in found) <= 2
    assert sum(verdict(trail, unfinished=False) == "keep" for trail in found) >= 30
