"""Searches any knobs: single changes of the best setting so far, and joint changes that may help.

Every knob has a few unordered values, most with little effect. The search must tell the few that help from noise with
few measurements, and not miss those that help only together.

1. The baseline has the first value of every knob. All its single changes are measured in one batch.
2. Three joint settings are measured: of changes that are faster beyond the noise, that are faster, and that are not
   slower beyond the noise. Together, small effects add up and knobs that need each other show. A value that is refused
   alone is tried with each single change that makes it valid.
3. The best is the simplest setting that ties with the fastest. From it, single changes that had an effect are measured
   again, since the effect may differ now; those without an effect only jointly. This ends when the best stays the same.
4. Knobs that need new worker processes join after the others have settled.
5. Proof: the best, the baseline, and the best without each of its changes are measured again in alternation. Only a
   setting that is faster there is reported, and changes that contribute nothing beyond the noise are reverted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from overlap_sweep.config import Search
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.search import Failure, Samples, Setting
from overlap_sweep.workloads import Sample

CONTENDERS = 3
"""Most settings that are measured again while noise hides which is fastest."""

PROOF_DEVIATIONS = 2.6
"""Standard deviations of a proof: fewer than one in a hundred searches report a setting that is not faster."""


@dataclass(frozen=True)
class Knob:
    """A key of the configuration and its values."""

    key: str
    values: tuple[str, ...]
    """Values to search. The first is the baseline's and wins ties."""
    restarts: bool = False
    """Whether changing it needs new worker processes."""


Answer = Sample | Failure | None
"""Outcome of one measurement; None if the budget ended before it."""

Steps = Generator[Sequence[Setting], Sequence[Answer]]
"""Yields the settings to measure next, in order and perhaps repeated, and is sent their answers."""


@dataclass
class KnobTrail:
    """A search's space and all its measurements so far."""

    knobs: tuple[Knob, ...]
    refusal: Callable[[Setting], str | None]
    """Returns why a setting is invalid and must not be measured, or None."""
    room: Callable[[], float]
    """Returns how many more points may be measured."""
    found: Samples = field(default_factory=Samples)
    proof: Samples = field(default_factory=lambda: Samples(deviations=PROOF_DEVIATIONS))
    """Measurements in alternation after the search, in which a lucky choice does not win again."""
    failed: dict[Setting, str] = field(default_factory=dict)
    effects: dict[tuple[int, str], Estimate] = field(default_factory=dict)
    """Latest gain of the single change to each value, in microseconds, by knob's index and value."""
    dropped: dict[tuple[int, str], float] = field(default_factory=dict)
    """Slowdown of values that are not tried again, as a fraction, by knob's index and value."""
    notes: list[str] = field(default_factory=list)
    cut: bool = False
    """Whether measurements were left out because the budget ended."""
    chosen: Setting | None = None
    """The setting that the proof chose."""

    @property
    def baseline(self) -> Setting:
        return tuple(knob.values[0] for knob in self.knobs)

    @property
    def grid(self) -> int:
        """Returns the number of all combinations, valid or not."""
        return math.prod(len(knob.values) for knob in self.knobs)

    def changed(self, setting: Setting, origin: Setting | None = None) -> dict[int, str]:
        """Returns the values that differ from the baseline's or from `origin`'s, by knob's index."""
        pairs = zip(setting, origin or self.baseline, strict=True)
        return {index: value for index, (value, other) in enumerate(pairs) if value != other}

    def name(self, setting: Setting, origin: Setting | None = None) -> str:
        """Returns the overrides that differ from the baseline or from `origin`, or `the baseline`."""
        return " ".join(f"{key}={value}" for key, value in self.overrides(setting, origin).items()) or "the baseline"

    def overrides(self, setting: Setting, origin: Setting | None = None) -> dict[str, str]:
        """Returns the values that differ from the baseline's or from `origin`'s, by key."""
        return {self.knobs[index].key: value for index, value in self.changed(setting, origin).items()}

    def possible(self, setting: Setting) -> bool:
        """Returns whether the setting is valid and includes no failed one: it would probably fail too, and each failure
        costs a new process group."""
        changed = self.changed(setting).items()
        return not any(self.changed(bad).items() <= changed for bad in self.failed) and not self.refusal(setting)

    def simplicity(self, setting: Setting) -> tuple[int, int]:
        """Returns a sort key, simplest first: the number of changed values, and their positions in their lists."""
        changed = self.changed(setting)
        return len(changed), sum(self.knobs[index].values.index(value) for index, value in changed.items())

    @property
    def fastest(self) -> Setting:
        return min(self.found.of, key=self.found.time_us)

    @property
    def best(self) -> Setting:
        """Returns the setting that the proof chose, else the simplest that ties with the fastest."""
        if self.chosen is not None:
            return self.chosen
        fastest = self.fastest
        ties = [setting for setting in self.found.of if not self.found.beats(fastest, setting)]
        return min(ties, key=lambda setting: (*self.simplicity(setting), self.found.time_us(setting)))

    def measure(self, settings: Iterable[Setting]) -> Steps:
        """Measures the new and possible settings."""
        known = self.found.of.keys()
        yield from self.measure_again([s for s in dict.fromkeys(settings) if s not in known and self.possible(s)])

    def measure_again(self, settings: Sequence[Setting]) -> Steps:
        """Measures each setting once more, as long as enough points are left for the shortest proof."""
        proof_points = 2 * len(proof_team(self, self.best)) if self.found.of and self.chosen is None else 0
        yield from self._request(settings, self.found, self.room() - proof_points)

    def prove(self, settings: Sequence[Setting]) -> Steps:
        """Measures each setting once more for the proof."""
        yield from self._request(settings, self.proof, self.room())

    def _request(self, settings: Sequence[Setting], into: Samples, room: float) -> Steps:
        costs = accumulate(map(self._cost, settings))
        requested = [setting for setting, cost in zip(settings, costs, strict=True) if cost - 1 < max(0.0, room)]
        self.cut = self.cut or len(requested) < len(settings)
        if requested:
            for setting, answer in zip(requested, (yield requested), strict=True):
                self._record(setting, answer, into)

    def _cost(self, setting: Setting) -> int:
        """Returns the cost in points; starting new processes takes about as long as one point."""
        changed = (self.knobs[index].restarts for index in self.changed(setting))
        return 2 if any(changed) else 1

    def _record(self, setting: Setting, answer: Answer, into: Samples) -> None:
        if isinstance(answer, Sample):
            into.add(setting, answer)
        elif answer is None:
            self.cut = True
        else:
            self.notes.append(f"{self.name(setting)} failed: {answer.reason}")
            # If it has run before, the failure is an accident.
            if setting not in self.found.of:
                self.failed[setting] = answer.reason


def search(trail: KnobTrail, effort: Search) -> Steps:
    """Searches the trail's space. Once the baseline is measured, `trail.best` is the answer so far."""
    yield from trail.measure([trail.baseline])
    if trail.baseline not in trail.found.of:
        return
    settled = [index for index, knob in enumerate(trail.knobs) if not knob.restarts]
    everything = range(len(trail.knobs))
    yield from _descend(trail, effort, settled)
    if len(settled) < len(everything) and not trail.cut:
        yield from _descend(trail, effort, everything)
    yield from _prove(trail, effort)


def _descend(trail: KnobTrail, effort: Search, knobs: Sequence[int]) -> Steps:
    """Changes these knobs until nothing is faster than the best."""
    while not trail.cut:
        origin = trail.best
        yield from _around(trail, effort, origin, knobs)
        best = trail.best
        # The next round starts from the new best, so its lead is confirmed first.
        if best != origin and len(trail.found.of[best]) < min(2, effort.repeats):
            simpler = (s for s in trail.found.of if trail.simplicity(s)[0] < trail.simplicity(best)[0])
            yield from trail.measure_again([best, min(simpler, key=trail.found.time_us)])
        if trail.best == origin:
            return


def _around(trail: KnobTrail, effort: Search, origin: Setting, knobs: Sequence[int]) -> Steps:
    """Measures the single changes of one setting, and the joint settings that they suggest."""
    changes = [change for change in _changes(trail, origin, knobs) if _is_worthwhile(trail, origin, change)]
    possible = [change for change in changes if trail.possible(change)]
    if len(trail.found.of) == 1 and effort.repeats > 1 and possible:
        # Repeats the baseline: everything is compared with it, and the repetitions show the noise.
        half = (len(possible) + 1) // 2
        yield from trail.measure_again([*possible[:half], origin, *possible[half:], origin])
    else:
        yield from trail.measure(possible)
    yield from trail.measure(_unlocked(trail, origin, changes))
    _learn(trail, effort, origin, changes)
    failed = len(trail.failed)
    yield from trail.measure(_joint(trail, origin, knobs))
    if len(trail.failed) > failed:
        # Some changes turned out to be incompatible.
        yield from trail.measure(_joint(trail, origin, knobs))
    yield from _tell_apart(trail, effort)


def _changes(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """Yields the setting's single changes, without dropped values."""
    for index in knobs:
        for value in trail.knobs[index].values:
            if value != origin[index] and (index, value) not in trail.dropped:
                yield _with(origin, {index: value})


def _is_worthwhile(trail: KnobTrail, origin: Setting, change: Setting) -> bool:
    """Returns whether the single change is worth a measurement."""
    ((index, value),) = trail.changed(change, origin).items()
    if value == trail.baseline[index]:
        # A change that helped is reverted in the proof only.
        made = trail.effects.get((index, origin[index]))
        return not made or made.time_us <= made.noise_us
    effect = trail.effects.get((index, value))
    return not effect or abs(effect.time_us) > effect.noise_us


def _learn(trail: KnobTrail, effort: Search, origin: Setting, changes: Sequence[Setting]) -> None:
    """Records the effects of the single changes; drops values that are too slow."""
    origin_us = trail.found.time_us(origin)
    for setting in (change for change in changes if change in trail.found.of):
        ((index, value),) = trail.changed(setting, origin).items()
        # The baseline's values are never dropped, since any change may be reverted.
        if value == trail.baseline[index]:
            continue
        effect = trail.effects[index, value] = trail.found.gain(origin, setting)
        slower = -effect.time_us / origin_us
        if slower - effect.noise_us / origin_us > effort.reach:
            trail.dropped[index, value] = slower
            trail.notes.append(f"{trail.knobs[index].key}={value} is {slower:.0%} slower; not tried again")


def _unlocked(trail: KnobTrail, origin: Setting, changes: Sequence[Setting]) -> Iterator[Setting]:
    """Yields each refused single change together with every other measured change, which may make it valid."""
    for refused in (change for change in changes if trail.refusal(change)):
        for key in (change for change in changes if change in trail.found.of):
            if trail.changed(refused, origin).keys() != trail.changed(key, origin).keys():
                yield _with(refused, trail.changed(key, origin))


def _joint(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """Yields joint settings of each knob's best change: of changes that help beyond the noise, that help, and that do
    not harm beyond the noise."""
    effects = {
        (index, value): effect
        for (index, value), effect in trail.effects.items()
        if index in knobs and value != origin[index] and (index, value) not in trail.dropped
    }
    best_first = sorted(effects, key=lambda change: -effects[change].time_us)
    sure = [change for change in best_first if effects[change].time_us > effects[change].noise_us]
    hopeful = [change for change in best_first if effects[change].time_us > 0]
    harmless = [change for change in best_first if effects[change].time_us >= -effects[change].noise_us]
    for chosen in (sure, hopeful, harmless):
        together, misfits = _joined(trail, origin, chosen)
        yield together
        for misfit in misfits:
            yield _joined(trail, origin, [misfit, *chosen])[0]


def _joined(
    trail: KnobTrail, origin: Setting, changes: Sequence[tuple[int, str]]
) -> tuple[Setting, list[tuple[int, str]]]:
    """Returns `origin` with each knob's first change applied in turn, and the changes that were impossible."""
    together, misfits = origin, []
    for index, value in changes:
        more = _with(together, {index: value})
        if together[index] != origin[index]:
            continue
        if trail.possible(more):
            together = more
        else:
            misfits.append((index, value))
    return together, misfits


def _with(setting: Setting, values: dict[int, str]) -> Setting:
    return tuple(values.get(index, value) for index, value in enumerate(setting))


def _tell_apart(trail: KnobTrail, effort: Search) -> Steps:
    """Measures the fastest setting and simpler ones again while noise hides which is faster."""
    while not trail.cut and trail.fastest != trail.best:
        fastest, found = trail.fastest, trail.found
        ties = [s for s in sorted(found.of, key=found.time_us) if s != fastest and not found.beats(fastest, s)]
        simpler = sorted((s for s in ties if trail.simplicity(s) < trail.simplicity(fastest)), key=trail.simplicity)
        contenders = list(dict.fromkeys([fastest, trail.best, *simpler]))[:CONTENDERS]
        wanting = [setting for setting in contenders if len(found.of[setting]) < effort.repeats]
        lead = found.gain(trail.best, fastest).time_us / found.time_us(fastest)
        if lead < effort.worth or fastest not in wanting:
            return
        yield from trail.measure_again(wanting)


def proof_team(trail: KnobTrail, best: Setting) -> list[Setting]:
    """Returns the settings of a proof: the baseline, the best, and the best without each of its changes."""
    without = [setting for setting in one_by_one(trail, best, trail.baseline).values() if setting]
    return list(dict.fromkeys([trail.baseline, best, *without])) if best != trail.baseline else []


def one_by_one(trail: KnobTrail, setting: Setting, other: Setting) -> dict[int, Setting | None]:
    """Returns the settings made by taking over one value from `other`, by the index of the knob; None if the setting is
    refused or fails."""
    taken_over = {index: _with(setting, {index: value}) for index, value in trail.changed(other, setting).items()}
    return {index: changed if trail.possible(changed) else None for index, changed in taken_over.items()}


def _prove(trail: KnobTrail, effort: Search) -> Steps:
    """Measures the best against the baseline and against itself without each of its changes, and reverts changes that
    do not help. If the budget does not allow that, the search's best stays, unproven."""
    best = fastest = trail.best
    instead: Setting | None = None
    while best != trail.baseline:
        yield from _alternate(trail, effort, best)
        proof = trail.proof
        if not {trail.baseline, best} <= proof.of.keys():
            return
        if not agree(proof, trail.baseline, best):
            proof = trail.proof = proof.by_time()
        if instead and proof.beats(fastest, best):
            # Each change was useless while the others were there, but one of them is needed.
            best, instead = instead, None
            continue
        if trail.chosen:
            trail.notes.append(f"{trail.name(trail.chosen, best)} does not help with the other changes; reverted")
        trail.chosen = best
        if not proof.beats(best, trail.baseline):
            trail.notes.append(f"{trail.name(best)} seemed faster than the baseline, but not when measured again")
            trail.chosen = trail.baseline
            break
        # Small losses add up, so each reverted setting is also compared with the search's best.
        idle = [
            setting
            for setting in one_by_one(trail, best, trail.baseline).values()
            if setting in proof.of and not proof.beats(best, setting) and not proof.beats(fastest, setting)
        ]
        if not idle:
            break
        one = min(idle, key=proof.time_us)
        every = _with(best, {index: trail.baseline[index] for s in idle for index in trail.changed(s, best)})
        known_worse = every in proof.of and proof.beats(fastest, every)
        best, instead = (one, None) if known_worse or not trail.possible(every) else (every, one)
    yield from trail.measure([setting for setting in one_by_one(trail, trail.baseline, trail.best).values() if setting])


def _alternate(trail: KnobTrail, effort: Search, best: Setting) -> Steps:
    """Measures rounds of the best's proof team; if the budget allows less than two, only of the best and the
    baseline."""
    new = [setting for setting in proof_team(trail, best) if setting not in trail.proof.of]
    if not new:
        return
    # The best takes part again, since its earlier samples did not alternate with the new settings.
    members = list(dict.fromkeys([*new, best]))
    # One round alone does not show the noise between measurements.
    most = max(2, effort.repeats)
    rounds = min(most, int(min(trail.room(), sys.maxsize)) // len(members))
    if rounds < 2:
        trail.cut, members = True, [setting for setting in (trail.baseline, best) if setting in members]
        rounds = min(most, int(trail.room()) // len(members))
    for turn in range(rounds):
        # In alternating order, so that steady drift affects all alike.
        yield from trail.prove(members if turn % 2 == 0 else members[::-1])


def agree(proof: Samples, one: Setting, other: Setting) -> bool:
    """Returns whether the drift-corrected gain agrees with that of plain times. Those are noisier, but don't assume
    that both settings have the same baseline."""
    gain, by_time = proof.gain(one, other), proof.by_time().gain(one, other)
    return abs(gain.time_us - by_time.time_us) <= math.hypot(gain.noise_us, by_time.noise_us)
