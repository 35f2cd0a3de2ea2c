"""Searches one cell: brackets num_sm, eliminates everything else one value at a time.

Time over num_sm falls like 1 / num_sm while communication is exposed, and rises once it takes more SMs from the GEMM
than it needs. It is convex in 1 / num_sm, so two measurements bound the times beyond them, and two pairs the times in
between. Settings that cannot become the fastest are not measured.

The other knobs have no order. Their values are *arms*: each is entered with one measurement and searched along num_sm
only while it is within reach of the fastest. Faster arms come first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from overlap_sweep.config import Search as Effort
from overlap_sweep.overlap import space
from overlap_sweep.search.cell import NONE, Arm, Candidate, Search, Steps, Trail, distance

REACH_TUNED = 0.05
"""`search.reach` for arms that were entered at the best num_sm of a neighbouring arm."""
CONTENDERS = 2
"""Most candidates that are measured again while noise hides which is fastest."""

USUAL_NUM_SM = 16
"""num_sm at which a search starts: Transformer Engine's default for kernels that move data with SMs, which about fills
the links."""

Flip = tuple[str, str, str, object]
"""Slot, method, knob and its value."""


@dataclass
class _Progress:
    """The state of the search of one cell, besides its measurements."""

    trail: Trail
    effort: Effort
    searched: set[Arm] = field(default_factory=set)
    flipped: set[Candidate] = field(default_factory=set)
    tuned: set[Arm] = field(default_factory=set)
    """Arms that were entered at the best num_sm of another arm."""
    flip_of: dict[Arm, Flip] = field(default_factory=dict)
    """The change of a knob that led to each arm."""

    def within_reach(self, candidate: Candidate) -> bool:
        reach = REACH_TUNED if candidate.arm in self.tuned else self.effort.reach
        return self.trail.time_us(candidate) <= (1 + reach) * self.trail.time_us(self.trail.best)

    def has_more(self, candidate: Candidate) -> bool:
        """Returns whether the candidate's arm is not searched yet."""
        arm = candidate.arm
        return arm not in self.searched and not self.trail.given_up(arm)

    def next(self) -> Candidate | None:
        """Returns the candidate to continue with: the fastest whose arm is not searched yet, else the fastest of all if
        its knobs were not flipped yet, else None."""
        within_reach = list(filter(self.within_reach, self.trail.overlaps))
        # One measurement gives no bound: the fastest ladder gets a second one before all are dropped.
        second_look = [] if within_reach or self.searched else self.trail.overlaps
        unsearched = next(filter(self.has_more, within_reach or second_look), None)
        return unsearched or next((c for c in within_reach[:1] if c not in self.flipped), None)


def bisect(trail: Trail, effort: Effort) -> Search:
    """Searches the trail's cell."""
    progress, groups = _Progress(trail, effort), trail.cell.groups
    yield from trail.measure(map(_entry, groups))
    # One failure must not cost a whole method: groups without any measurement are entered once more.
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
    return "no untested setting could be faster than those measured"


def _entry(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the candidate with most knobs at the library's defaults, closest to the usual num_sm."""

    def rank(candidate: Candidate) -> tuple[float, float]:
        usual = [
            space.USERBUFFERS_DEFAULTS[space.method_of(setting)].items() & setting.items()
            for setting in candidate.settings.values()
        ]
        away = sum(abs(math.log2(count / USUAL_NUM_SM)) for count in candidate.num_sms.values())
        return -sum(map(len, usual)), away

    return min(candidates, key=rank)


def _search_arm(trail: Trail, entered: Candidate, effort: Effort) -> Steps:
    """Searches along the ladder of each slot in turn, once: dgrad and wgrad run one after the other, so their best
    num_sm are independent."""
    for slot in entered.num_sms:
        ladders = [trail.cell.ladder(c, slot) for c in trail.overlaps if c.arm == entered.arm]
        # The fastest candidate's ladder; in a recording with gaps it may have only one rung.
        ladder = next((ladder for ladder in ladders if len(ladder) > 1), ladders[0])
        while probe := next(_promising(trail, ladder, slot, effort), None):
            yield from trail.measure([probe])
            if trail.given_up(entered.arm):
                return


def _promising(trail: Trail, ladder: Sequence[Candidate], slot: str, effort: Effort) -> Iterator[Candidate]:
    """Yields the candidates to measure next on a ladder with at least one measurement, most useful first.

    These are half and twice the best num_sm, then values between the best and its neighbours, each only if convexity
    allows a time that is worth it.
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
        # Larger counts promise no gain, so the curve is nearly flat below the best and nothing in between can gain.
        between = []
    target_us = (1 - effort.worth) * trail.time_us(trail.best)
    for n in (*outside, min(between, key=bounds_us.__getitem__, default=None)):
        if n and bounds_us[n] < target_us:
            yield by_num_sm[n]


def _nearest(choices: Sequence[int], wanted: float) -> int | None:
    return min(choices, key=lambda n: abs(n - wanted), default=None)


def least_us(num_sm: int, times_us: Mapping[int, float]) -> float:
    """Returns the lower bound of the time at `num_sm` from convexity in 1 / num_sm and the times at other counts; 0 if
    there is none.

    Outside of two points, a convex function lies above the line through them.
    """
    u, known = 1 / num_sm, sorted((1 / n, time_us) for n, time_us in times_us.items())
    pairs = [point for point in known if point[0] < u][-2:], [point for point in known if point[0] > u][:2]
    bounds = [a_us + (b_us - a_us) * (u - a) / (b - a) for (a, a_us), (b, b_us) in (p for p in pairs if len(p) == 2)]
    return max(bounds, default=0.0)


def _flip(progress: _Progress, candidate: Candidate) -> Steps:
    """Enters the arms that differ from the candidate in one categorical knob, one knob after the other."""
    trail = progress.trail
    on_ladder = any(len(trail.cell.ladder(candidate, slot)) > 1 for slot in candidate.num_sms)
    for (slot, knob), values in trail.cell.flips(candidate).items():
        entries = []
        entered = {other.arm for other in (*trail.samples, *trail.failed)}
        # A value that failed once is not tried in other arms.
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
    """Measures the contenders again while noise hides which of them is fastest."""
    for _ in range(effort.repeats - 1):
        best = trail.estimate(trail.best)
        close = [c for c in trail.overlaps if not trail.estimate(c).differs_from(best)][:CONTENDERS]
        rivals = len(close) + (not trail.estimate(NONE).differs_from(best))
        if rivals < 2:
            return
        yield from trail.measure_again(close)
