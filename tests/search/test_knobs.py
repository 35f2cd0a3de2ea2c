"""The search over knobs on made-up workloads: what it finds, how few points it takes, and what it never claims."""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from overlap_sweep.config import Search
from overlap_sweep.results.records import KnobSearch, Noises
from overlap_sweep.search import (
    DISTURBED,
    Failure,
    Samples,
    Setting,
    conduct,
    disturbed_baselines,
    knob_sweeper,
)
from overlap_sweep.search.knob_trail import Answer, Knob, KnobTrail
from overlap_sweep.search.knobs import search
from overlap_sweep.workloads import Sample

KNOBS = (
    Knob("prefetch", ("false", "1", "2")),
    Knob("backward", ("pre", "post", "null")),
    Knob("reshard", ("true", "false")),
    Knob("limit", ("false", "true")),
    Knob("own_streams", ("false", "true")),
    Knob("priority", ("high", "normal")),
    Knob("ctas", ("null", "8", "32"), restarts=True),
)
NONE_US = 1100.0

Values = dict[str, str]


def values_of(setting: Setting) -> Values:
    return dict(zip((knob.key for knob in KNOBS), setting, strict=True))


@dataclass
class Machine:
    """Measures settings: `step_us` of their values, times noise within a point, between points, and a drift that slows
    down everything alike."""

    step_us: Callable[[Values], float]
    seed: int = 0
    between: float = 0.003
    drift: float = 0.02
    fails: Callable[[Values], str | None] = lambda values: None
    refuses: Callable[[Values], str | None] = lambda values: None
    max_points: float = math.inf
    floor_us: Callable[[Values], float] = lambda values: 800.0
    work: Callable[[Values], str] = lambda values: "same"
    disturbs: float = 0.0
    """Probability of a point that its floor takes twice as long."""
    asked: list[Setting] = field(default_factory=list)

    def searched(self, effort: Search | None = None) -> KnobTrail:
        """After the whole search."""
        self._random = random.Random(self.seed)
        room = lambda: self.max_points - len(self.asked)  # noqa: E731
        trail = KnobTrail(KNOBS, lambda setting: self.refuses(values_of(setting)), room)
        conduct(search(trail, effort or Search()), lambda wanted: [self._measure(setting) for setting in wanted])
        return trail

    def answer(self, effort: Search | None = None) -> KnobSearch:
        return knob_sweeper.answer(self.searched(effort), {})

    @property
    def optimum_us(self) -> float:
        return min(self.step_us(values_of(setting)) for setting in itertools.product(*(knob.values for knob in KNOBS)))

    def _measure(self, setting: Setting) -> Answer:
        values = values_of(setting)
        assert not self.refuses(values)
        assert len(self.asked) < self.max_points
        self.asked.append(setting)
        if reason := self.fails(values):
            return Failure(reason)
        clock = 1 + self.drift * math.sin(len(self.asked) / 5) + self._random.gauss(0, self.drift / 4)
        own = clock * (1 + self._random.gauss(0, self.between))
        floor_clock = clock * (2 if self._random.random() < self.disturbs else 1) if self.disturbs else clock
        point_us, floor_us, none_us = (
            tuple(time_us * (1 + self._random.gauss(0, 0.004)) for _ in range(7))
            for time_us in (own * self.step_us(values), floor_clock * self.floor_us(values), clock * NONE_US)
        )
        return Sample(point_us, floor_us, none_us, self.work(values))


def flat(values: Values) -> float:
    return 1000.0


def independent(values: Values) -> float:
    """Prefetching and keeping parameters help, post hurts; the rest is idle."""
    step_us = 1000.0 - 50 * (values["prefetch"] == "1") - 40 * (values["prefetch"] == "2")
    return step_us - 40 * (values["reshard"] == "false") + 30 * (values["backward"] == "post")


def interacting(values: Values) -> float:
    """Limiting gathers hurts alone, and helps with two layers ahead; few CTAs help a little, and need a restart."""
    step_us = 1000.0 - 40 * (values["prefetch"] == "1") - 55 * (values["prefetch"] == "2")
    step_us -= 30 * (values["reshard"] == "false") + 25 * (values["ctas"] == "8")
    return step_us + (-40 if values["prefetch"] == "2" else 20) * (values["limit"] == "true")


def together(values: Values) -> float:
    """Neither helps without the other."""
    return 1000.0 - 60 * (values["own_streams"] == "true" and values["limit"] == "true")


@pytest.mark.parametrize("surface", [independent, interacting, together])
def test_the_fastest_setting_is_found_in_far_fewer_points_than_the_grid_has(surface: Callable[[Values], float]) -> None:
    machines = [Machine(surface, seed) for seed in range(12)]
    trails = [machine.searched() for machine in machines]
    regrets = [m.step_us(values_of(t.best)) / m.optimum_us - 1 for m, t in zip(machines, trails, strict=True)]
    assert sum(regret < 0.01 for regret in regrets) >= 10
    assert max(regrets) < 0.08
    assert statistics.mean(len(machine.asked) for machine in machines) < 0.2 * trails[0].grid
    assert max(len(machine.asked) for machine in machines) < 0.4 * trails[0].grid


@pytest.mark.parametrize("between", [0.0, 0.003, 0.02])
def test_where_nothing_helps_nothing_is_named(between: float) -> None:
    """The noise that counts is what is true in about one of a hundred cases."""
    machines = [Machine(flat, seed, between) for seed in range(60)]
    assert sum(bool(machine.answer().best) for machine in machines) <= 1
    assert max(len(machine.asked) for machine in machines) < 50


@pytest.mark.parametrize(("drift", "seeds"), [(0.02, 25), (0.15, 8)])
def test_idle_values_are_never_named_beside_those_that_help(drift: float, seeds: int) -> None:
    """Whatever slows down everything alike."""
    for seed in range(seeds):
        found = Machine(independent, seed, drift=drift).answer()
        assert set(found.best) == {"prefetch", "reshard"}
        assert not found.by_time


def test_a_simpler_setting_is_taken_where_the_noise_hides_the_difference() -> None:
    """Of two values that help alike the one that stands first; of two changes that each suffice only one."""

    def answers(surface: Callable[[Values], float]) -> list[dict[str, str]]:
        return [Machine(surface, seed).answer().best for seed in range(12)]

    of_values = answers(lambda values: 1000.0 - 50 * (values["prefetch"] != "false"))
    assert of_values.count({"prefetch": "1"}) >= 10
    assert all(set(best) == {"prefetch"} for best in of_values)
    for best in answers(lambda values: 1000.0 - 60 * (values["reshard"] == "false" or values["limit"] == "true")):
        assert best in ({"reshard": "false"}, {"limit": "true"})


def test_what_each_knob_contributes() -> None:
    found = Machine(interacting, seed=1).answer()
    assert found.best == {"prefetch": "2", "reshard": "false", "limit": "true", "ctas": "8"}
    assert found.proven
    assert found.gain.share == pytest.approx(0.15, abs=0.01)
    assert found.over_none.share == pytest.approx(1 - 850 / NONE_US, abs=0.015)
    alone = {"prefetch": 0.055, "reshard": 0.03, "limit": -0.02, "ctas": 0.025}
    taken_away = {"prefetch": 115 / 965, "reshard": 30 / 880, "limit": 40 / 890, "ctas": 25 / 875}
    of = {contribution.key: contribution for contribution in found.contributions}
    assert {key: one.alone and one.alone.share for key, one in of.items()} == pytest.approx(alone, abs=0.015)
    back = {key: one.taken_away and one.taken_away.share for key, one in of.items()}
    assert back == pytest.approx(taken_away, abs=0.015)
    assert all(one.taken_away and one.taken_away.sure for one in of.values())


def test_the_proof_is_of_fresh_measurements_in_alternation() -> None:
    machine = Machine(independent)
    trail = machine.searched(Search(repeats=3))
    members = list(trail.proof.of)
    assert members[:2] == [trail.baseline, trail.best]
    assert {len(samples) for samples in trail.proof.of.values()} == {3}
    assert machine.asked[-3 * len(members) :] == [*members, *members[::-1], *members]


def test_knobs_that_need_other_processes_come_last() -> None:
    machine = Machine(independent)
    trail = machine.searched()
    first = next(index for index, setting in enumerate(machine.asked) if values_of(setting)["ctas"] != "null")
    assert {"prefetch": "1", "reshard": "false"}.items() <= values_of(machine.asked[first]).items()
    assert trail.best in machine.asked[:first]


def test_what_makes_no_sense_is_never_measured_and_what_unlocks_it_is_found() -> None:
    """A priority is of streams of our own, which alone are slower."""

    def refused(values: Values) -> str | None:
        return "no such stream" if values["priority"] == "normal" and values["own_streams"] == "false" else None

    def surface(values: Values) -> float:
        own = values["own_streams"] == "true"
        return 1000.0 + 15 * own - 60 * (own and values["priority"] == "normal")

    for seed in range(8):
        found = Machine(surface, seed, refuses=refused).answer()
        assert found.best == {"own_streams": "true", "priority": "normal"}
        contributions = {c.key: c for c in found.contributions}
        assert contributions["priority"].alone is None
        assert contributions["own_streams"].taken_away is None


def test_a_failure_costs_all_that_contains_it_and_nothing_else() -> None:
    machine = Machine(interacting, fails=lambda values: "no memory" if values["reshard"] == "false" else None)
    found = machine.answer()
    assert sum(values_of(setting)["reshard"] == "false" for setting in machine.asked) == 1
    assert found.best == {"prefetch": "2", "limit": "true", "ctas": "8"}
    assert "reshard=false failed: no memory" in found.notes
    together = {"reshard": "false", "prefetch": "1"}
    machine = Machine(independent, fails=lambda values: "no memory" if together.items() <= values.items() else None)
    assert machine.answer().best == {"prefetch": "2", "reshard": "false"}
    # Without a baseline there is no answer.
    machine = Machine(flat, fails=lambda values: "rank 1 died")
    found = machine.answer()
    assert (found.time_us, found.dropped, len(machine.asked)) == (None, "rank 1 died", 1)


def test_a_baseline_without_memory_is_replaced_by_the_first_single_change_that_fits() -> None:
    lacks = "rank 0: CUDA out of memory. Tried to allocate 2 GiB"
    machine = Machine(interacting, fails=lambda values: lacks if values["reshard"] == "true" else None)
    found = machine.answer()
    assert (found.best, found.proven) == ({"prefetch": "2", "limit": "true", "ctas": "8"}, True)
    assert found.knobs["reshard"] == ["false", "true"]
    assert found.baseline_us == pytest.approx(interacting(values_of(machine.asked[5])), rel=0.03)
    assert "Compared with reshard=false instead of the baseline" in found.notes
    # The baseline, four changes of the knobs before, and nothing without memory from then on.
    assert [values_of(setting)["reshard"] for setting in machine.asked].count("true") == 5
    machine = Machine(flat, fails=lambda values: lacks)
    found = machine.answer()
    assert (found.time_us, found.dropped) == (None, lacks)
    assert len(set(machine.asked)) == len(machine.asked) == 1 + sum(len(knob.values) - 1 for knob in KNOBS)


def test_values_out_of_reach_are_not_tried_again() -> None:
    machine = Machine(lambda values: interacting(values) * (1.4 if values["backward"] == "null" else 1))
    found = machine.answer(Search(reach=0.25))
    assert sum(values_of(setting)["backward"] == "null" for setting in machine.asked) == 1
    assert any("backward=null is 4" in note and note.endswith("; not tried again") for note in found.notes)


@pytest.mark.parametrize("most", [1, 2, 5, 12, 20, 40])
def test_limits_hold_and_what_is_named_is_proven_or_said_not_to_be(most: int) -> None:
    trail = Machine(interacting, max_points=most).searched()
    assert trail.cut
    found = knob_sweeper.answer(trail, {})
    assert found.time_us is not None
    if found.best and found.proven:
        assert {trail.baseline, trail.best} <= trail.proof.of.keys()
    assert found.proven == (most >= 20 or not found.best)


@pytest.mark.parametrize(
    ("most", "again_us", "best", "proven", "rounds"),
    [
        (6, 20.0, {"ctas": "8"}, False, "1 of 3"),
        (8, 20.0, {"ctas": "8"}, False, "2 of 3"),
        (math.inf, 20.0, {}, True, "3 of 3"),
        (6, 120.0, {}, True, "1 of 3"),
    ],
)
def test_a_proof_that_the_budget_cut_short_decides_nothing_while_the_setting_is_faster(
    most: float, again_us: float, best: Values, proven: bool, rounds: str
) -> None:
    """In the proof one of few steps is slow, so the noise is as large as the difference."""
    asked: list[Setting] = []

    def measured(setting: Setting) -> Sample:
        asked.append(setting)
        proves = asked.count(("null",)) > 3
        step_us = 100.0 if setting == ("null",) else again_us if proves else 20.0
        return Sample((step_us,) * 7 + (8 * step_us if proves else step_us,), by_mean=True)

    trail = KnobTrail((Knob("ctas", ("null", "8")),), lambda setting: None, lambda: most - len(asked))
    conduct(search(trail, Search()), lambda wanted: [measured(setting) for setting in wanted])
    found = knob_sweeper.answer(trail, {})
    assert (found.best, found.proven, trail.cut) == (best, proven, most < math.inf)
    (note,) = found.notes
    assert note.startswith("The budget ended" if not proven else "Seemed faster")
    assert f"instead of 187.5 after {rounds} rounds" in note


def test_one_round_proves_nothing_however_much_faster_the_setting_is() -> None:
    """It does not show what runs differ by."""
    asked: list[Setting] = []

    def measured(setting: Setting) -> Sample:
        asked.append(setting)
        return Sample((50.0 if setting == ("8",) else 100.0,) * 8, by_mean=True)

    for most, proven, rounds in ((6, False, 1), (8, True, 2)):
        asked.clear()
        trail = KnobTrail((Knob("ctas", ("null", "8")),), lambda setting: None, lambda most=most: most - len(asked))
        conduct(search(trail, Search()), lambda wanted: [measured(setting) for setting in wanted])
        found = knob_sweeper.answer(trail, {})
        assert (found.best, found.proven, len(trail.proof.of[trail.baseline])) == ({"ctas": "8"}, proven, rounds)


def test_with_one_repeat_nothing_is_measured_twice_before_the_proof() -> None:
    machine = Machine(flat, between=0.0)
    trail = machine.searched(Search(repeats=1))
    assert machine.asked.count(trail.baseline) <= 1 + 2


def test_knobs_that_change_the_work_are_compared_by_times() -> None:
    """Half the floor, and a step that is a tenth shorter: relative to its own floor it would look far slower."""
    told = Machine(
        lambda values: 1000.0 - 100 * (values["reshard"] == "false"),
        floor_us=lambda values: 400.0 if values["reshard"] == "false" else 800.0,
        work=lambda values: values["reshard"],
        drift=0.002,
    )
    found = told.answer()
    assert found.best == {"reshard": "false"}
    assert found.gain.share == pytest.approx(0.1, abs=0.01)


def test_a_proof_does_not_rest_on_a_floor_that_differs() -> None:
    """Nobody has said that this knob makes the floor longer: relative to it the step seems to gain."""
    floor_us = {"false": 1000.0, "true": 800.0}
    trail = Machine(flat, floor_us=lambda values: floor_us[values["reshard"]], drift=0.006).searched()
    assert trail.best == trail.baseline
    assert not trail.proof.paired


def test_disturbed_baselines_hide_no_gain_and_make_none() -> None:
    """A third of the floors take twice as long: ratios to them scatter by more than any knob is worth."""
    told = [Machine(independent, seed, disturbs=0.33, drift=0.002).answer() for seed in range(12)]
    assert sum({"prefetch", "reshard"} == {*found.best} for found in told) >= 10
    for found in told:
        assert found.by_time
        assert found.disturbed
        assert found.disturbed.ratios > DISTURBED * found.disturbed.times
    told = [Machine(flat, seed, disturbs=0.33, drift=0.002).answer() for seed in range(30)]
    assert sum(bool(found.best) for found in told) <= 1


def points(*pairs: tuple[float, float]) -> list[Sample]:
    """Returns measurements of one setting: (time, baseline) of each."""
    return [Sample((time_us,) * 3, (baseline_us,) * 3) for time_us, baseline_us in pairs]


@pytest.mark.parametrize(
    ("measurements", "disturbed"),
    [
        # A quiet machine, whose baselines are as steady as the times.
        ([points((100, 80), (101, 80.5), (99, 79.6)), points((90, 80), (90.5, 79.7), (89.8, 80.3))], None),
        # Drift, which slows both down.
        ([points((100, 80), (110, 88), (120, 96)), points((90, 80), (99, 88), (108, 96))], None),
        # Times that scatter themselves: the baselines' own scatter matters little.
        ([points((100, 80), (130, 81), (80, 79)), points((90, 80), (120, 79), (70, 81))], None),
        (
            [points((100, 80), (101, 160), (99, 80)), points((90, 80), (91, 79), (89, 81))],
            Noises(times=0.0153, ratios=0.348),
        ),
        # Four repetitions of one setting tell as well, three don't; and single measurements add nothing.
        ([points((100, 80), (101, 160), (99, 80), (100, 160), (100, 80))], Noises(times=0.0079, ratios=0.379)),
        ([points((100, 80), (101, 160), (99, 80), (100, 160))], None),
        ([points((100, 80), (101, 160), (99, 80)), points((90, 80)), points((91, 160))], None),
        # Points without a baseline.
        ([[Sample((100.0,)), Sample((200.0,))] * 3], None),
        ([], None),
    ],
)
def test_plain_times_count_where_repetitions_show_that_baselines_are_disturbed(
    measurements: list[list[Sample]], disturbed: Noises | None
) -> None:
    found = disturbed_baselines(measurements)
    assert (found is None) == (disturbed is None)
    if found and disturbed:
        assert (found.times, found.ratios) == pytest.approx((disturbed.times, disturbed.ratios), rel=0.01)


ON_A_BUSY_MACHINE = {
    ("1",): (
        ((205, 251, 221, 309, 206), (34, 27, 31, 29, 45)),
        ((266, 229, 193, 195, 251), (38, 28, 17, 42, 24)),
        ((235, 247, 199, 249, 220), (25, 38, 24, 12, 26)),
    ),
    ("nodes",): (
        ((138, 100, 107, 103, 117), (40, 19, 26, 56, 62)),
        ((125, 109, 123, 150, 98), (36, 51, 38, 60, 34)),
        ((112, 124, 122, 132, 120), (39, 44, 50, 27, 51)),
    ),
}
"""Milliseconds of the steps and floors of an FSDP2 training over a slow link, by `fsdp.replicas`; two other processes
kept both cores busy now and then, which changed floors within each point more than between points."""


def test_floors_that_scatter_within_points_hide_no_gain() -> None:
    samples = Samples()
    for setting, measured in ON_A_BUSY_MACHINE.items():
        for times_ms, floors_ms in measured:
            samples.add(setting, Sample(*(tuple(1000.0 * ms for ms in each) for each in (times_ms, floors_ms))))
    assert samples.disturbed
    assert samples.disturbed == Noises(times=pytest.approx(0.191, rel=0.01), ratios=pytest.approx(0.579, rel=0.01))
    assert samples.beats(("nodes",), ("1",))


def test_samples_are_compared_by_what_scatters_less() -> None:
    samples = Samples()
    for one in points((100, 80), (101, 160), (99, 80)):
        samples.add(("slow",), one)
    samples.add(("fast",), points((90, 45))[0])
    assert samples.paired
    assert samples.time_us(("fast",)) > samples.time_us(("slow",))
    for one in points((90, 80), (91, 80)):
        samples.add(("fast",), one)
    assert not samples.paired
    assert samples.time_us(("fast",)) == pytest.approx(90.33, abs=0.01)
    assert samples.gain(("slow",), ("fast",)).time_us == pytest.approx(9.67, abs=0.01)
    assert samples.beats(("fast",), ("slow",))


@pytest.mark.parametrize(
    ("settings", "room", "asked"),
    [
        (["1 null", "2 null", "3 null"], 2.0, 2),
        (["0 8", "0 16", "0 32"], 3.0, 1),
        (["1 null", "0 8", "2 null"], 3.0, 2),
        (["0 8"], 0.5, 0),
    ],
)
def test_what_needs_other_processes_takes_the_room_of_two(settings: list[str], room: float, asked: int) -> None:
    knobs = (Knob("a", ("0", "1", "2", "3")), Knob("env", ("null", "8", "16", "32"), restarts=True))
    trail = KnobTrail(knobs, lambda setting: None, lambda: room)
    assert len(next(trail.measure([tuple(setting.split()) for setting in settings]), [])) == asked
    assert trail.cut == (asked < len(settings))
