"""The headline of a comparison of sweeps: which is faster, and whether it was the machine that changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from overlap_sweep.compare.sweeps import Aggregate, Match, SweepComparison
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE
from overlap_sweep.report.headline import Change, Times, mean_change

MACHINE_CHANGE = 0.01
"""Change of the baselines from which the machine is said to have changed."""


def headline(compared: SweepComparison, label: str) -> list[str]:
    """Returns sentences on one dataset: by how much it is faster or slower than the reference, and if the machine
    changed, by how much relative to no overlap."""
    *passes, whole = (one for one in compared.aggregates if one.dataset == label)
    # The baselines show the machine, and count only where nothing else was measured.
    *of_passes, of_all = map(_without_baselines, (*passes, whole))
    if not of_all.matches:
        of_passes, of_all = passes, whole
    change = _mean(of_passes, lambda match: (match.ours.time, match.theirs.time))
    if not change:
        return [f"{label} and {compared.reference} have no points in common."]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in of_all.counts.items() if count)
    mean = f" in the geometric mean of {len(of_all.matches)} points ({counts})" if len(of_all.matches) > 1 else ""
    return [f"{change.in_words(label, compared.reference)}{mean}.", *_machine(compared, label, passes)]


def _machine(compared: SweepComparison, label: str, passes: Sequence[Aggregate]) -> list[str]:
    """Returns that the machine changed, if the times without overlap and those without communication moved alike: no
    setting of an overlap changes either. Empty where the two differ in what was measured."""
    none = _mean(passes, lambda match: _with_noise_of(match, match.ours.none_us, match.theirs.none_us))
    floor = _mean(passes, lambda match: _with_noise_of(match, match.ours.floor_us, match.theirs.floor_us))
    if compared.compared or not none or not floor or not _moved_alike(none, floor):
        return []
    changes = (
        f"{abs(none.ratio - 1):.1%} {none.word}, and the same GEMMs without communication {abs(floor.ratio - 1):.1%}"
    )
    relative = _mean(passes, _relative_to_none)
    words = relative and relative.in_words(label, compared.reference)
    return [f"The machine changed: no overlap is {changes}.", *([f"Relative to no overlap, {words}."] if words else [])]


def _moved_alike(none: Change, floor: Change) -> bool:
    moved = [math.log(change.ratio) for change in (none, floor)]
    notable = all(change.differs for change in (none, floor)) and min(map(abs, moved)) > MACHINE_CHANGE
    return notable and moved[0] * moved[1] > 0 and abs(moved[0] - moved[1]) < min(map(abs, moved)) / 2


def _mean(passes: Sequence[Aggregate], times: Callable[[Match], Times | None]) -> Change | None:
    """Returns the mean change over the matches that have such times; None if none has."""
    found = [[known for match in one.matches if (known := times(match))] for one in passes]
    return mean_change(found) if any(found) else None


def _with_noise_of(match: Match, ours_us: float | None, theirs_us: float | None) -> Times | None:
    """Returns baselines' times, with the noise of those next to which they were measured: as shares they are alike."""
    if not ours_us or not theirs_us:
        return None
    both = ((match.ours.time, ours_us), (match.theirs.time, theirs_us))
    ours, theirs = (time.relative_to(time.time_us / time_us) for time, time_us in both)
    return ours, theirs


def _without_baselines(found: Aggregate) -> Aggregate:
    return replace(found, matches=[match for match in found.matches if match.ours.key.setting not in (NONE, FLOOR)])


def _relative_to_none(match: Match) -> Times | None:
    ours, theirs = match.ours, match.theirs
    if not ours.none_us or not theirs.none_us or ours.key.setting in (NONE, FLOOR):
        return None
    return ours.time.relative_to(ours.none_us), theirs.time.relative_to(theirs.none_us)
