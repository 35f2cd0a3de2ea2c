"""Searches by what is expected of changes: with few runs, what helps is found together, proven and said."""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from overlap_sweep.config import Search
from overlap_sweep.results.records import Expected
from overlap_sweep.search import Failure, Setting, conduct, knob_sweeper
from overlap_sweep.search.knob_trail import Answer, Knob, KnobTrail, least_rounds
from overlap_sweep.search.knobs import search
from overlap_sweep.search.prior import Change, Prior
from overlap_sweep.workloads import Sample


@dataclass
class Training:
    """A training whose step takes 100 ms times the factor of each change, with noise within runs and between them."""

    expected: Mapping[Change, Expected]
    factors: Mapping[Change, float]
    alike: frozenset[Change] = frozenset()
    """Changes of which the best alone counts."""
    noise: float = 0.004
    fails: Callable[[Setting], str] = lambda setting: ""
    refuses: Callable[[Setting], str | None] = lambda setting: None
    asked: list[Setting] = field(default_factory=list)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        values = [[value for index, value in self.expected if index == knob] for knob in range(self.size)]
        return tuple(Knob("abcdefgh"[index], ("0", *own)) for index, own in enumerate(values))

    @property
    def size(self) -> int:
        return 1 + max(index for index, _ in self.expected)

    def factor(self, setting: Setting) -> float:
        changes = [one for one in enumerate(setting) if one in self.factors]
        once = [self.factors[one] for one in changes if one in self.alike]
        return math.prod([self.factors[one] for one in changes if one not in self.alike]) * min(once, default=1.0)

    @property
    def best(self) -> float:
        return min(map(self.factor, itertools.product(*(knob.values for knob in self.knobs))))

    def searched(self, runs: float, seed: int = 0) -> KnobTrail:
        chance = random.Random(seed)
        self.asked = []

        def answer(setting: Setting) -> Answer:
            self.asked.append(setting)
            if reason := self.fails(setting):
                return Failure(reason)
            time_us = 1e5 * self.factor(setting) * chance.gauss(1, self.noise)
            return Sample(tuple(time_us * chance.gauss(1, self.noise) for _ in range(20)), by_mean=True)

        prior = Prior(dict(self.expected))
        trail = KnobTrail(self.knobs, self.refuses, lambda: runs - len(self.asked), prior)
        conduct(search(trail, Search()), lambda wanted: [answer(setting) for setting in wanted])
        assert len(self.asked) <= runs
        return trail

    def idle(self, setting: Setting) -> list[Change]:
        """Returns the changes of a setting without which it is as fast."""
        without = {one: tuple("0" if i == one[0] else v for i, v in enumerate(setting)) for one in enumerate(setting)}
        return [one for one, other in without.items() if one[1] != "0" and self.factor(other) <= self.factor(setting)]


def predicted(gain: float, width: float = 0.04) -> Expected:
    return Expected(gain, gain - width, gain + width, is_predicted=True)


def bound(gain: float, most: float, why: str = "") -> Expected:
    return Expected(gain, 0.0, most, why=why)


TORCHTITAN = Training(
    {(0, "1"): predicted(0.1), (1, "1"): bound(0.077, 0.247, "fused"), (2, "1"): bound(0.077, 0.247, "fused")},
    {(0, "1"): 0.904, (1, "1"): 0.88, (2, "1"): 0.88},
    frozenset({(1, "1"), (2, "1")}),
)
"""What it computes again, and two ways to compile: a run took 34 s, so that eight minutes were 14 of them."""
DDP = Training(
    {
        (0, "1"): bound(0.08, 0.28),
        **{(1, "1"): predicted(0.067, 0.06), (1, "2"): predicted(0.05, 0.06), (1, "3"): predicted(0.06, 0.06)},
        **{(2, "1"): bound(0.02, 0.06), (3, "1"): bound(0.02, 0.05), (4, "1"): bound(0.01, 0.03)},
    },
    {(0, "1"): 0.89, (1, "1"): 0.94, (1, "2"): 0.96, (1, "3"): 0.95},
)
"""The optimizer and buckets, and three that gain nothing."""
LATE = Training(
    {(0, "1"): predicted(0.09), **{(i, "1"): bound(0.1 - 0.01 * i, 0.2 - 0.02 * i) for i in range(1, 6)}},
    {(0, "1"): 0.95, (3, "1"): 0.9, (5, "1"): 0.97},
)
"""What gains most is expected to be the fourth."""
FSDP2 = Training(
    {
        (0, "1"): predicted(0.091, 0.07),
        **{(1, value): predicted(gain, 0.07) for value, gain in (("1", 0.083), ("2", 0.081), ("3", 0.08))},
        **{
            (2, "1"): bound(0.03, 0.09),
            (3, "1"): bound(0.02, 0.08),
            (4, "1"): bound(0.02, 0.05),
            (5, "1"): bound(0.01, 0.05),
        },
    },
    {(0, "1"): 0.97, (1, "1"): 0.981, (1, "2"): 0.979, (1, "3"): 0.985, (4, "1"): 0.97},
    noise=0.005,
)
"""Five values that gain 2 to 3 %, and three that gain nothing."""
NOISY = Training({(i, "1"): bound(0.1, 0.3) for i in range(8)}, {(0, "1"): 0.79}, noise=0.04)
NOTHING = Training({(i, "1"): bound(0.05, 0.1) for i in range(6)}, {})


@pytest.mark.parametrize(
    ("training", "runs", "left", "idle"),
    [
        (TORCHTITAN, 10, 0.001, 4),
        (TORCHTITAN, 14, 0.001, 2),
        (DDP, 10, 0.01, 4),
        (LATE, 14, 0.01, 4),
        (NOISY, 24, 0.01, 2),
        (NOTHING, 20, 0.0, 1),
    ],
)
def test_what_helps_is_found_and_proven_together_in_few_runs(
    training: Training, runs: int, left: float, idle: int
) -> None:
    """`left`: of the fastest setting's time, what the answers miss of it on average; `idle`: answers of 20 that name a
    change that does nothing."""
    trails = [training.searched(runs, seed) for seed in range(20)]
    chosen = [trail.chosen or trail.baseline for trail in trails]
    assert sum(training.factor(one) / training.best - 1 for one in chosen) / len(chosen) <= left
    assert sum(bool(training.idle(one)) for one in chosen) <= idle


def test_changes_are_tried_on_what_has_helped_and_said_so() -> None:
    trail = TORCHTITAN.searched(12)
    assert list(dict.fromkeys(TORCHTITAN.asked))[:4] == [
        ("0", "0", "0"),
        ("1", "0", "0"),
        ("1", "1", "0"),
        ("1", "1", "1"),
    ]
    found = knob_sweeper.answer(trail, {})
    tried = {tuple(one.changed): one for one in found.tried}
    assert (tried["a",].change, tried["a", "b"].change, tried["a", "b", "c"].change) == ("a=1", "b=1", "c=1")
    assert [one.added.share for one in tried.values() if one.added] == pytest.approx([0.12, 0.0, 0.096], abs=0.02)
    assert (tried[()].change, tried[()].added) == ("", None)
    # In the order in which they were added.
    assert [(one.key, one.added and round(one.added.share, 1)) for one in found.contributions] == [
        ("a", 0.1),
        ("b", 0.1),
    ]


def test_what_fails_with_what_helped_is_tried_alone_if_it_may_gain_more() -> None:
    both = {(0, "1"): predicted(0.1), (1, "1"): bound(0.05, 0.13), (2, "1"): bound(0.02, 0.05)}
    factors = {(0, "1"): 0.95, (1, "1"): 0.9}

    def out_of_memory(setting: Setting) -> str:
        return "CUDA out of memory" if setting[:2] == ("1", "1") else ""

    training = Training(both, factors, fails=out_of_memory)
    trail = training.searched(20)
    assert ("0", "1", "0") in training.asked
    assert trail.chosen == ("0", "1", "0")
    # It is not, if it can gain no more than was gained.
    training = Training(both, {(0, "1"): 0.85, (1, "1"): 0.9}, fails=out_of_memory)
    assert training.searched(20).chosen == ("1", "0", "0")
    assert ("0", "1", "0") not in training.asked
    # Nor if nothing is known of what it may gain.
    knobs = (Knob("a", ("0", "1")), Knob("b", ("0", "1")))
    trail = KnobTrail(knobs, lambda setting: None, lambda: math.inf, Prior({(0, "1"): predicted(0.1)}))
    asked: list[Setting] = []

    def answer(setting: Setting) -> Answer:
        asked.append(setting)
        failed = Failure("it computes something else")
        return failed if setting[1] == "1" else Sample((90.0 if setting[0] == "1" else 100.0,) * 5, by_mean=True)

    conduct(search(trail, Search()), lambda wanted: [answer(setting) for setting in wanted])
    assert (trail.chosen, ("0", "1") in asked) == (("1", "0"), False)
    (failed,) = knob_sweeper.answer(training.searched(20), {}).failed
    assert (failed.changed, failed.change) == ({"a": "1", "b": "1"}, "b=1")


def test_what_makes_no_sense_alone_is_tried_with_what_makes_it_possible() -> None:
    training = Training(
        {(0, "1"): predicted(0.05), (1, "1"): predicted(0.2)},
        {(0, "1"): 0.95, (1, "1"): 0.85},
        refuses=lambda setting: "needs a=1" if setting == ("0", "1") else None,
    )
    assert training.searched(16).chosen == ("1", "1")
    assert ("0", "1") not in training.asked


def test_small_gains_are_tried_together() -> None:
    training = Training(
        {(index, "1"): bound(0.03, 0.06) for index in range(4)},
        {(index, "1"): 0.99 for index in range(4)},
        noise=0.005,
    )
    chosen = [training.searched(60, seed).chosen for seed in range(10)]
    assert sum(one is not None and training.factor(one) < 0.98 for one in chosen) >= 6


@pytest.mark.parametrize(
    ("base_ms", "best_ms", "rounds"),
    [((100.0, 100.2, 99.8), 90.0, 2), ((100.0, 102.0, 98.0), 90.0, 3), ((100.0, 105.0, 95.0), 90.0, 3)],
)
def test_as_many_rounds_are_kept_for_the_proof_as_the_noise_needs(
    base_ms: Sequence[float], best_ms: float, rounds: int
) -> None:
    trail = KnobTrail((Knob("a", ("0", "1")),), lambda setting: None, lambda: 9.0, Prior({(0, "1"): predicted(0.1)}))
    for ms in base_ms:
        trail.found.add(("0",), Sample((ms,) * 5, by_mean=True))
    trail.found.add(("1",), Sample((best_ms,) * 5, by_mean=True))
    assert least_rounds(trail, ("1",)) == rounds


def test_where_the_proof_has_no_room_for_all_changes_the_least_sure_are_proven() -> None:
    training = Training(
        {(0, "1"): predicted(0.2), (1, "1"): predicted(0.1), (2, "1"): predicted(0.05)},
        {(0, "1"): 0.8, (1, "1"): 0.9, (2, "1"): 0.97},
    )
    trail = training.searched(12)
    assert trail.chosen == ("1", "1", "1")
    # Six runs were left for two rounds: of the baseline, the best, and the best without what gained least.
    assert set(trail.proof.of) == {("0", "0", "0"), ("1", "1", "1"), ("1", "1", "0")}
