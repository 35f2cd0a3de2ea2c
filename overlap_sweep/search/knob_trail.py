"""The space of a search over knobs, and all its measurements so far."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from overlap_sweep.results.gain import Gain
from overlap_sweep.search import DEVIATIONS, Failure, Samples, Setting, certain
from overlap_sweep.search.prior import Change, Prior
from overlap_sweep.workloads import Sample

PROOF_DEVIATIONS = 2.6
"""Standard deviations of a proof: fewer than one in a hundred searches report a setting that is not faster."""

LEAST_IN_PROOF = 2
"""Measurements of a setting in the proof from which on they say more than those of the search."""
MOST_KEPT = 3
"""Most rounds of a proof that are kept free while changes are tried."""


@dataclass(frozen=True)
class Knob:
    """A key of the configuration and its values."""

    key: str
    """Knobs may share one, whose values are then for different process groups (`scopes`), and are joined by `+`."""
    values: tuple[str, ...]
    """Values to search. The first is the baseline's and wins ties."""
    restarts: bool = False
    """Whether changing it needs new worker processes."""


def joined(values: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns values of knobs by key."""
    found: dict[str, str] = {}
    for key, value in values:
        found[key] = f"{found[key]}+{value}" if key in found else value
    return found


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
    prior: Prior | None = None
    """What single changes of the baseline are expected to gain: they are then measured one by one, the best first."""
    found: Samples = field(default_factory=Samples)
    proof: Samples = field(default_factory=lambda: Samples(deviations=PROOF_DEVIATIONS))
    """Measurements in alternation after the search, in which a lucky choice does not win again."""
    failed: dict[Setting, str] = field(default_factory=dict)
    origin: Setting | None = None
    """The baseline, if the first values of the knobs do not fit into memory."""
    refused: set[Setting] = field(default_factory=set)
    """Those of them that were refused when they were run."""
    fixed: set[int] = field(default_factory=set)
    """Indices of knobs that cannot be changed there."""
    effects: dict[tuple[int, str], Gain] = field(default_factory=dict)
    """Latest gain of the single change to each value, by knob's index and value."""
    dropped: dict[tuple[int, str], float] = field(default_factory=dict)
    """Slowdown of values that are not tried again, as a fraction, by knob's index and value."""
    left_out: dict[tuple[int, str], float] = field(default_factory=dict)
    """The most that values were expected to gain, as a share, of which none was measured for that reason."""
    tried_on: dict[Setting, Setting] = field(default_factory=dict)
    """The setting that one was made of by changing something, where changes are tried one on top of the other."""
    notes: list[str] = field(default_factory=list)
    cut: bool = False
    """Whether measurements were left out because the budget ended."""
    proof_cut: bool = False
    """Whether measurements of the proof were."""
    chosen: Setting | None = None
    """The setting that the proof chose; None if it ended before it could choose."""

    @property
    def drops(self) -> list[str]:
        """Returns a note on each value that is not tried again."""
        of_values = ((self.knobs[index].key, value, slower) for (index, value), slower in self.dropped.items())
        return [f"{key}={value} is {slower:.0%} slower; not tried again" for key, value, slower in of_values]

    @property
    def baseline(self) -> Setting:
        return self.origin or self.first_values

    @property
    def first_values(self) -> Setting:
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

    def name_of(self, change: Change) -> str:
        index, value = change
        return f"{self.knobs[index].key}={value}"

    def overrides(self, setting: Setting, origin: Setting | None = None) -> dict[str, str]:
        """Returns the values that differ from the baseline's or from `origin`'s, by key."""
        return joined((self.knobs[index].key, value) for index, value in self.changed(setting, origin).items())

    def possible(self, setting: Setting) -> bool:
        """Returns whether the setting is valid and includes no failed one: it would probably fail too, and each failure
        costs a new process group."""
        changed = self.changed(setting).items()
        failed = (bad for bad in self.failed if bad != self.baseline)
        return not any(self.changed(bad).items() <= changed for bad in failed) and not self.refusal(setting)

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
        return min(ties, key=self._preference)

    def _preference(self, setting: Setting) -> tuple[float, ...]:
        """Returns a sort key of settings that tie: the simplest first. Where something is expected of changes, the
        order of their values says nothing: of as many changes those that are surely fast."""
        found, (changes, positions) = self.found.estimate(setting), self.simplicity(setting)
        if self.prior:
            return changes, found.time_us + found.noise_us
        return changes, positions, found.time_us

    def compared(self, setting: Setting, origin: Setting | None = None) -> Gain | None:
        """Returns the setting's gain over the baseline or `origin`: of the proof, if it has measured both repeatedly,
        else of the search; None if they were not measured."""
        both = (origin or self.baseline, setting)
        if all(len(self.proof.of.get(one, [])) >= LEAST_IN_PROOF for one in both):
            return self.proof.share(*both)
        return self.found.share(*both) if {*both} <= self.found.of.keys() else None

    def measure(self, settings: Iterable[Setting]) -> Steps:
        """Measures the new and possible settings."""
        known = self.found.of.keys()
        yield from self.measure_again([s for s in dict.fromkeys(settings) if s not in known and self.possible(s)])

    def measure_again(self, settings: Sequence[Setting]) -> Steps:
        """Measures each setting once more, as long as enough points are left for the shortest proof."""
        yield from self._request(settings, self.found, self.room() - self.kept_for_proof)

    def try_on(self, top: Setting, setting: Setting) -> Steps:
        """Measures the setting, which is `top` with something changed, if it is new and possible."""
        if setting != top:
            self.tried_on.setdefault(setting, top)
            yield from self.measure([setting])

    @property
    def kept_for_proof(self) -> int:
        """Returns the points that the shortest proof of the best takes: that of all its changes, or, where something is
        expected of them, so that each was faster than what was there before, of all together."""
        if not self.found.of or self.chosen is not None or self.best == self.baseline:
            return 0
        if self.prior:
            return 2 * least_rounds(self, self.best)
        return 2 * len(proof_team(self, self.best))

    def prove(self, settings: Sequence[Setting]) -> Steps:
        """Measures each setting once more for the proof, in turns."""
        self.proof.rounds.append({})
        yield from self._request(settings, self.proof, self.room())

    def _request(self, settings: Sequence[Setting], into: Samples, room: float) -> Steps:
        costs = accumulate(map(self._cost, settings))
        requested = [setting for setting, cost in zip(settings, costs, strict=True) if cost - 1 < max(0.0, room)]
        if len(requested) < len(settings):
            self._leave_out(into)
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
            self._leave_out(into)
        else:
            self.notes.append(f"{self.name(setting)} failed: {answer.reason}")
            if answer.refused:
                self.refused.add(setting)
            # If it has run before, the failure is an accident.
            if setting not in self.found.of:
                self.failed[setting] = answer.reason

    def _leave_out(self, into: Samples) -> None:
        self.cut = True
        self.proof_cut = self.proof_cut or into is self.proof


def proof_team(trail: KnobTrail, best: Setting) -> list[Setting]:
    """Returns the settings of a proof: the baseline, the best, and the best without each of its changes."""
    without = [setting for setting in one_by_one(trail, best, trail.baseline).values() if setting]
    return list(dict.fromkeys([trail.baseline, best, *without])) if best != trail.baseline else []


def least_rounds(trail: KnobTrail, best: Setting) -> int:
    """Returns the rounds of the best and the baseline by which a proof would show its gain, with the noise so far: 2 at
    least, MOST_KEPT at most."""
    base, gain = trail.found.estimate(trail.baseline), trail.compared(best)
    if gain is None:
        return LEAST_IN_PROOF
    deviation = base.noise_us / base.time_us * math.sqrt(len(trail.found.of[trail.baseline])) / DEVIATIONS
    for rounds in range(LEAST_IN_PROOF, MOST_KEPT):
        # As `Samples` states the noise of a gain, of two settings.
        if certain(PROOF_DEVIATIONS, 2 * (rounds - 1)) * deviation * math.sqrt(2 / rounds) < gain.share:
            return rounds
    return MOST_KEPT


def one_by_one(trail: KnobTrail, setting: Setting, other: Setting) -> dict[int, Setting | None]:
    """Returns the settings made by taking over one value from `other`, by the index of the knob; None if the setting is
    refused or fails."""
    taken_over = {index: with_values(setting, {index: value}) for index, value in trail.changed(other, setting).items()}
    return {index: changed if trail.possible(changed) else None for index, changed in taken_over.items()}


def with_values(setting: Setting, values: dict[int, str]) -> Setting:
    return tuple(values.get(index, value) for index, value in enumerate(setting))
