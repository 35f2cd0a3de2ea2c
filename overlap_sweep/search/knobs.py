"""Searches any knobs: one change at a time from the best so far, and what seems to help together.

Every knob has a few values without order, most of which change little: what matters is to tell the few that help from
the noise with few measurements, and not to miss those that help only together.

1. The baseline has the first value of every knob. All single changes of it are measured in one batch.
2. What is surely faster is measured together, and so is what seems to be, and what does no sure harm: in a joint
   setting effects add up that are too small alone, and knobs that need each other show. A value that is refused alone
   is tried with whatever single change makes it possible.
3. The simplest setting that the noise cannot tell from the fastest is the best. From it the single changes are measured
   again that have shown an effect, since that may be another now; those that changed nothing only together. This ends
   when the best stays the best.
4. Knobs that need other worker processes join after the others have settled.
5. The best, the baseline, and the best without each of its changes are measured again in alternation: only what is
   faster there is named, and a change that contributes nothing beyond the noise is taken back.
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
"""How many are measured again at most while the noise cannot tell them apart."""

PROOF_DEVIATIONS = 2.6
"""Nothing that is no faster should be named in more than one of a hundred searches."""


@dataclass(frozen=True)
class Knob:
    """A key of the configuration, and the values to choose from."""

    key: str
    values: tuple[str, ...]
    """The first is the baseline's, and what is preferred in a tie."""
    restarts: bool = False
    """Another value of it needs other worker processes."""


Answer = Sample | Failure | None
"""None: there was no time or point left for it."""

Steps = Generator[Sequence[Setting], Sequence[Answer]]
"""Yields what to measure next, each in this order, the same setting perhaps more than once; is sent what came of it."""


@dataclass
class KnobTrail:
    """A search's space and all its measurements so far."""

    knobs: tuple[Knob, ...]
    refusal: Callable[[Setting], str | None]
    """Why a setting makes no sense, or None: then it is never measured."""
    room: Callable[[], float]
    """How many more points may be measured."""
    found: Samples = field(default_factory=Samples)
    proof: Samples = field(default_factory=lambda: Samples(deviations=PROOF_DEVIATIONS))
    """Measured in alternation after the search, so that what was chosen for its luck has to show it again."""
    failed: dict[Setting, str] = field(default_factory=dict)
    effects: dict[tuple[int, str], Estimate] = field(default_factory=dict)
    """By knob's index and value, what the change to it gained when it was last made alone, in microseconds."""
    dropped: dict[tuple[int, str], float] = field(default_factory=dict)
    """By knob's index and value, the share by which it was slower: not tried again."""
    notes: list[str] = field(default_factory=list)
    cut: bool = False
    """Something was left out because no point or time was left."""
    chosen: Setting | None = None
    """What the proof came to."""

    @property
    def baseline(self) -> Setting:
        return tuple(knob.values[0] for knob in self.knobs)

    @property
    def grid(self) -> int:
        """Returns the number of settings that there are, valid or not."""
        return math.prod(len(knob.values) for knob in self.knobs)

    def changed(self, setting: Setting, origin: Setting | None = None) -> dict[int, str]:
        """Returns by knob's index the values that differ from the baseline's, or from another setting's."""
        pairs = zip(setting, origin or self.baseline, strict=True)
        return {index: value for index, (value, other) in enumerate(pairs) if value != other}

    def name(self, setting: Setting, origin: Setting | None = None) -> str:
        """Returns the setting's overrides, or those that differ from another setting; or `the baseline`."""
        return " ".join(f"{key}={value}" for key, value in self.overrides(setting, origin).items()) or "the baseline"

    def overrides(self, setting: Setting, origin: Setting | None = None) -> dict[str, str]:
        """Returns by key the values that differ from the baseline's, or from another setting's."""
        return {self.knobs[index].key: value for index, value in self.changed(setting, origin).items()}

    def possible(self, setting: Setting) -> bool:
        """Returns whether it is valid and may work. What failed fails with more changed, too: each failure costs a new
        process group."""
        changed = self.changed(setting).items()
        return not any(self.changed(bad).items() <= changed for bad in self.failed) and not self.refusal(setting)

    def simplicity(self, setting: Setting) -> tuple[int, int]:
        """Returns a key, less is simpler: values that are not the baseline's, and their places in their lists."""
        changed = self.changed(setting)
        return len(changed), sum(self.knobs[index].values.index(value) for index, value in changed.items())

    @property
    def fastest(self) -> Setting:
        return min(self.found.of, key=self.found.time_us)

    @property
    def best(self) -> Setting:
        """Returns the proof's answer, or else the simplest that the noise cannot tell from the fastest."""
        if self.chosen is not None:
            return self.chosen
        fastest = self.fastest
        ties = [setting for setting in self.found.of if not self.found.beats(fastest, setting)]
        return min(ties, key=lambda setting: (*self.simplicity(setting), self.found.time_us(setting)))

    def measure(self, settings: Iterable[Setting]) -> Steps:
        """Has those measured that never were and are possible."""
        known = self.found.of.keys()
        yield from self.measure_again([s for s in dict.fromkeys(settings) if s not in known and self.possible(s)])

    def measure_again(self, settings: Sequence[Setting]) -> Steps:
        """Takes one more sample of each, as long as enough points are left for the shortest proof."""
        proof_points = 2 * len(team(self, self.best)) if self.found.of and self.chosen is None else 0
        yield from self._ask(settings, self.found, self.room() - proof_points)

    def prove(self, settings: Sequence[Setting]) -> Steps:
        """Takes one more sample of each for the proof."""
        yield from self._ask(settings, self.proof, self.room())

    def _ask(self, settings: Sequence[Setting], into: Samples, room: float) -> Steps:
        costs = accumulate(map(self._cost, settings))
        asked = [setting for setting, cost in zip(settings, costs, strict=True) if cost - 1 < max(0.0, room)]
        self.cut = self.cut or len(asked) < len(settings)
        if asked:
            for setting, answer in zip(asked, (yield asked), strict=True):
                self._record(setting, answer, into)

    def _cost(self, setting: Setting) -> int:
        """Returns the cost in points: to start other processes takes about as long as one."""
        changed = (self.knobs[index].restarts for index in self.changed(setting))
        return 2 if any(changed) else 1

    def _record(self, setting: Setting, answer: Answer, into: Samples) -> None:
        if isinstance(answer, Sample):
            into.add(setting, answer)
        elif answer is None:
            self.cut = True
        else:
            self.notes.append(f"{self.name(setting)} failed: {answer.reason}")
            # It has run before: an accident, not its settings'.
            if setting not in self.found.of:
                self.failed[setting] = answer.reason


def search(trail: KnobTrail, effort: Search) -> Steps:
    """Searches the trail's space; `trail.best` is the answer at any time, once the baseline was measured."""
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
        # A whole round of measurements goes out from the next one: it should be no stroke of luck.
        if best != origin and len(trail.found.of[best]) < min(2, effort.repeats):
            simpler = (s for s in trail.found.of if trail.simplicity(s)[0] < trail.simplicity(best)[0])
            yield from trail.measure_again([best, min(simpler, key=trail.found.time_us)])
        if trail.best == origin:
            return


def _around(trail: KnobTrail, effort: Search, origin: Setting, knobs: Sequence[int]) -> Steps:
    """Measures single changes of one setting, and what they suggest to try together."""
    changes = [change for change in _changes(trail, origin, knobs) if _telling(trail, origin, change)]
    possible = [change for change in changes if trail.possible(change)]
    if len(trail.found.of) == 1 and effort.repeats > 1 and possible:
        # Everything is compared with it, and it tells how far two measurements of one setting may lie apart.
        half = (len(possible) + 1) // 2
        yield from trail.measure_again([*possible[:half], origin, *possible[half:], origin])
    else:
        yield from trail.measure(possible)
    yield from trail.measure(_unlocked(trail, origin, changes))
    _learn(trail, effort, origin, changes)
    failed = len(trail.failed)
    yield from trail.measure(_joint(trail, origin, knobs))
    if len(trail.failed) > failed:
        # What does not go together is known now.
        yield from trail.measure(_joint(trail, origin, knobs))
    yield from _tell_apart(trail, effort)


def _changes(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """Yields the setting's single changes, except values that were dropped."""
    for index in knobs:
        for value in trail.knobs[index].values:
            if value != origin[index] and (index, value) not in trail.dropped:
                yield _with(origin, {index: value})


def _telling(trail: KnobTrail, origin: Setting, change: Setting) -> bool:
    """Returns whether the change is worth a measurement of its own here."""
    ((index, value),) = trail.changed(change, origin).items()
    if value == trail.baseline[index]:
        # What helped when it was made is put back in the proof only.
        made = trail.effects.get((index, origin[index]))
        return not made or made.time_us <= made.noise_us
    effect = trail.effects.get((index, value))
    return not effect or abs(effect.time_us) > effect.noise_us


def _learn(trail: KnobTrail, effort: Search, origin: Setting, changes: Sequence[Setting]) -> None:
    """Records the effects of the single changes here; drops what is out of reach."""
    origin_us = trail.found.time_us(origin)
    for setting in (change for change in changes if change in trail.found.of):
        ((index, value),) = trail.changed(setting, origin).items()
        # The baseline's values stay: whatever leads away from them may be taken back.
        if value == trail.baseline[index]:
            continue
        effect = trail.effects[index, value] = trail.found.gain(origin, setting)
        slower = -effect.time_us / origin_us
        if slower - effect.noise_us / origin_us > effort.reach:
            trail.dropped[index, value] = slower
            trail.notes.append(f"{trail.knobs[index].key}={value} is {slower:.0%} slower: not tried again")


def _unlocked(trail: KnobTrail, origin: Setting, changes: Sequence[Setting]) -> Iterator[Setting]:
    """Yields each refused single change together with each other change that makes it possible."""
    for refused in (change for change in changes if trail.refusal(change)):
        for key in (change for change in changes if change in trail.found.of):
            if trail.changed(refused, origin).keys() != trail.changed(key, origin).keys():
                yield _with(refused, trail.changed(key, origin))


def _joint(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """Yields each knob's best change together: of those that surely help, that seem to, that do no sure harm."""
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
    """Returns `origin` with each knob's first change applied in turn; and changes impossible with those before."""
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
    """Measures the fastest and the simpler ones again while the noise hides which of them is faster."""
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


def team(trail: KnobTrail, best: Setting) -> list[Setting]:
    """Returns what is measured again as proof: the baseline, the best, and the best without each of its changes."""
    without = [setting for setting in one_by_one(trail, best, trail.baseline).values() if setting]
    return list(dict.fromkeys([trail.baseline, best, *without])) if best != trail.baseline else []


def one_by_one(trail: KnobTrail, setting: Setting, other: Setting) -> dict[int, Setting | None]:
    """Returns by the index of each knob in which they differ the setting with the other's value there; None where that
    is refused or fails."""
    taken_over = {index: _with(setting, {index: value}) for index, value in trail.changed(other, setting).items()}
    return {index: changed if trail.possible(changed) else None for index, changed in taken_over.items()}


def _prove(trail: KnobTrail, effort: Search) -> Steps:
    """Measures the best against the baseline and against itself without each of its changes, and takes back what does
    not help. Without room for that the best stays what the search says, unproven."""
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
            # Each was idle beside the others, and one of them is needed.
            best, instead = instead, None
            continue
        if trail.chosen:
            trail.notes.append(f"{trail.name(trail.chosen, best)} does not help beside the rest: taken back")
        trail.chosen = best
        if not proof.beats(best, trail.baseline):
            trail.notes.append(f"{trail.name(best)} seemed faster than the baseline, and was not when measured again")
            trail.chosen = trail.baseline
            break
        # Many small losses make a large one: what is taken back is measured against what the search found, too.
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
    """Measures rounds of all that proves the best; without room for two, only of itself and the baseline."""
    new = [setting for setting in team(trail, best) if setting not in trail.proof.of]
    if not new:
        return
    # The best takes part again: what was measured before it was not in turns with this.
    members = list(dict.fromkeys([*new, best]))
    # One round alone says nothing of what two measurements differ by.
    most = max(2, effort.repeats)
    rounds = min(most, int(min(trail.room(), sys.maxsize)) // len(members))
    if rounds < 2:
        trail.cut, members = True, [setting for setting in (trail.baseline, best) if setting in members]
        rounds = min(most, int(trail.room()) // len(members))
    for turn in range(rounds):
        # There and back: what drifts steadily hits all alike.
        yield from trail.prove(members if turn % 2 == 0 else members[::-1])


def agree(proof: Samples, one: Setting, other: Setting) -> bool:
    """Returns whether the gain is the same with the machine's drift taken out as by times alone. Those are noisier, but
    don't rest on what is measured beside a setting being the same for both."""
    gain, by_time = proof.gain(one, other), proof.by_time().gain(one, other)
    return abs(gain.time_us - by_time.time_us) <= math.hypot(gain.noise_us, by_time.noise_us)
