"""Searches one cell: brackets num_sm, eliminates everything else one value at a time.

Time over num_sm falls like 1 / num_sm while communication is exposed, and rises once the communication takes more SMs
from the GEMM than it needs: it is convex in 1 / num_sm, so that two measurements bound what lies beyond them, and two
pairs what lies between. What cannot become the fastest is not measured.

The other knobs have no order. Their values are *arms*: each is entered with one measurement, and searched along num_sm
only while it is within reach of the fastest. Everything goes from the fastest arm to slower ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from overlap_sweep.config import Search as Effort
from overlap_sweep.overlap import space
from overlap_sweep.search.cell import NONE, Arm, Candidate, Search, Steps, Trail, distance

REACH_TUNED = 0.05
"""As `search.reach`, of an arm that was entered at the num_sm that is best for the arm next to it."""
CONTENDERS = 2
"""How many are measured again at most while the noise cannot tell which of them is fastest."""

USUAL_NUM_SM = 16
"""Where a search starts: what Transformer Engine gives to every kernel that moves data by SMs, about what fills the
links."""

Flip = tuple[str, str, str, object]
"""Slot, method, knob and its value."""


@dataclass
class _Progress:
    """Where the search of one cell stands, beside its measurements."""

    trail: Trail
    effort: Effort
    searched: set[Arm] = field(default_factory=set)
    flipped: set[Candidate] = field(default_factory=set)
    tuned: set[Arm] = field(default_factory=set)
    """Arms that were entered at a num_sm that was found to be best."""
    flip_of: dict[Arm, Flip] = field(default_factory=dict)
    """By arm, the value of a knob that led to it."""

    def within_reach(self, candidate: Candidate) -> bool:
        reach = REACH_TUNED if candidate.arm in self.tuned else self.effort.reach
        return self.trail.time_us(candidate) <= (1 + reach) * self.trail.time_us(self.trail.best)

    def has_more(self, candidate: Candidate) -> bool:
        """Returns whether the candidate's arm is not searched yet."""
        arm = candidate.arm
        return arm not in self.searched and not self.trail.given_up(arm)

    def next(self) -> Candidate | None:
        """Returns what to go on from, fastest first: a candidate whose arm is not searched yet, or else the fastest
        one, if its knobs were not flipped yet."""
        within_reach = list(filter(self.within_reach, self.trail.overlaps))
        # One measurement bounds nothing: the fastest ladder gets a second one before everything is dropped.
        second_look = [] if within_reach or self.searched else self.trail.overlaps
        unsearched = next(filter(self.has_more, within_reach or second_look), None)
        return unsearched or next((c for c in within_reach[:1] if c not in self.flipped), None)


def bisect(trail: Trail, effort: Effort) -> Search:
    """Searches the trail's cell."""
    progress, groups = _Progress(trail, effort), trail.cell.groups
    yield from trail.measure(map(_entry, groups))
    # One failure must not cost a whole method: those that nothing was measured of are entered once more.
    failed = [group for group in groups if not any(c in trail.samples for c in group)]
    left = [[c for c in group if c not in trail.failed and not trail.given_up(c.arm)] for group in failed]
    yield from trail.measure(_entry(group) for group in left if group)
    while (candidate := progress.next()) is not None:
        if progress.has_more(candidate):
            progress.searched.add(candidate.arm)
            yield from _search_arm(trail, candidate, effort)
        else:
            progress.flipped.add(candidate)
            yield from _flip(progress, candidate)
    yield from _tell_apart(trail, effort)
    return f"nothing left that could be faster than {trail.best}"


def _entry(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the candidate with most knobs at the library's defaults, closest to the usual num_sm."""

    def rank(candidate: Candidate) -> tuple[float, float]:
        usual = [
            space.USERBUFFERS_DEFAULTS[setting["method"]].items() & setting.items()
            for setting in candidate.settings.values()
        ]
        away = sum(abs(math.log2(count / USUAL_NUM_SM)) for count in candidate.num_sms.values())
        return -sum(map(len, usual)), away

    return min(candidates, key=rank)


def _search_arm(trail: Trail, entered: Candidate, effort: Effort) -> Steps:
    """Searches along the ladder of each slot in turn, once: dgrad and wgrad run one after the other, so that the best
    num_sm of one does not depend on the other's."""
    for slot in entered.num_sms:
        ladders = [trail.cell.ladder(c, slot) for c in trail.overlaps if c.arm == entered.arm]
        # That of the fastest candidate; in a recording with holes it may have none.
        ladder = next((ladder for ladder in ladders if len(ladder) > 1), ladders[0])
        while probe := next(_promising(trail, ladder, slot, effort), None):
            yield from trail.measure([probe])
            if trail.given_up(entered.arm):
                return


def _promising(trail: Trail, ladder: Sequence[Candidate], slot: str, effort: Effort) -> Iterator[Candidate]:
    """Yields what to measure next on a ladder that has one measurement at least, most useful first.

    Half and twice the best num_sm, then what lies between the best and its neighbours: each only if the bound that
    convexity puts on its time is worth it.
    """
    by_num_sm = {candidate.num_sms[slot]: candidate for candidate in ladder}
    times_us = {n: trail.time_us(c) for n, c in by_num_sm.items() if c in trail.samples}
    untried = [n for n, c in by_num_sm.items() if c not in trail.samples and c not in trail.failed]
    best = min(times_us, key=times_us.__getitem__)
    lower = max((n for n in times_us if n < best), default=None)
    upper = min((n for n in times_us if n > best), default=None)
    outside = [] if lower else [_nearest([n for n in untried if n < best], best / 2)]
    outside += [] if upper else [_nearest([n for n in untried if n > best], best * 2)]
    bounds_us = {n: least_us(n, times_us) for n in untried}
    between = [n for n in untried if (lower or best) < n < (upper or best)]
    if not upper and best < max(by_num_sm):
        # Twice as many promise nothing, so half as many cost next to nothing: there is no bend between the two.
        between = []
    target_us = (1 - effort.worth) * trail.time_us(trail.best)
    for n in (*outside, min(between, key=bounds_us.__getitem__, default=None)):
        if n and bounds_us[n] < target_us:
            yield by_num_sm[n]


def _nearest(choices: Sequence[int], wanted: float) -> int | None:
    return min(choices, key=lambda n: abs(n - wanted), default=None)


def least_us(num_sm: int, times_us: Mapping[int, float]) -> float:
    """Returns the least time that convexity in 1 / num_sm allows, given those at other counts; 0 where it says nothing.

    Outside of two points a convex function lies above the line through them.
    """
    u, known = 1 / num_sm, sorted((1 / n, time_us) for n, time_us in times_us.items())
    pairs = [point for point in known if point[0] < u][-2:], [point for point in known if point[0] > u][:2]
    bounds = [a_us + (b_us - a_us) * (u - a) / (b - a) for (a, a_us), (b, b_us) in (p for p in pairs if len(p) == 2)]
    return max(bounds, default=0.0)


def _flip(progress: _Progress, candidate: Candidate) -> Steps:
    """Enters the arms that differ from the candidate in one categorical knob: one knob after the other, since what was
    found faster is what the next search starts from."""
    trail = progress.trail
    on_ladder = any(len(trail.cell.ladder(candidate, slot)) > 1 for slot in candidate.num_sms)
    for (slot, knob), values in trail.cell.flips(candidate).items():
        entries = []
        entered = {other.arm for other in (*trail.samples, *trail.failed)}
        # What failed where it was tried is not tried elsewhere.
        forbidden = {progress.flip_of.get(failed.arm) for failed in trail.failed}
        for value, others in values.items():
            arm, flip = others[0].arm, (slot, candidate.methods[slot], knob, value)
            if arm in entered or flip in forbidden:
                continue
            progress.flip_of[arm] = flip
            if on_ladder:
                progress.tuned.add(arm)
            entries.append(min(others, key=partial(distance, candidate)) if on_ladder else _entry(others))
        yield from trail.measure(entries)


def _tell_apart(trail: Trail, effort: Effort) -> Steps:
    """Measures the contenders again while the noise hides which of them is fastest."""
    for _ in range(effort.repeats - 1):
        best = trail.estimate(trail.best)
        close = [c for c in trail.overlaps if not trail.estimate(c).differs_from(best)][:CONTENDERS]
        rivals = len(close) + (not trail.estimate(NONE).differs_from(best))
        if rivals < 2:
            return
        yield from trail.measure_again(close)
