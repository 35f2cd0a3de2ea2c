"""Steps in which Python collected garbage for long.

Python collects all that a process has only when enough is new: in trainings of large models once in some dozens of
steps, for a tenth of a second or more. Whether there is one among the timed steps is chance, which would decide between
settings, or hide what they differ by.
"""

from collections.abc import Sequence
from statistics import median

from overlap_sweep.levers import chosen, levers
from overlap_sweep.recorder.recording import Recording
from overlap_sweep.workloads.job.config import Resolved

LONG = 0.01
"""Share of a step from which on a collection is long."""
RARE = 0.2
"""Share of steps with a long one up to which they are left out. More of them are there in any measurement."""


def long_collections(recordings: Sequence[Recording], steps: int) -> list[int]:
    """Returns the numbers of those of the first `steps` timed steps in which any rank collected garbage for long, as
    others wait for it; none if there are more than a few."""
    found: set[int] = set()
    for one in recordings:
        if not one.collecting_us:
            continue
        usual_us, long_us = median(one.collecting_us), LONG * median(one.host_us)
        found |= {step for step, spent_us in enumerate(one.collecting_us[:steps]) if spent_us - usual_us > long_us}
    return sorted(found) if len(found) <= RARE * steps else []


def changes_collecting(point: Resolved) -> bool:
    """Returns whether a lever of the point says when garbage is collected. Then all its steps count, for what it spares
    or costs is in them."""
    return any(levers()[name].collects for name in chosen(point.job.levers))


def collecting_share(recordings: Sequence[Recording]) -> float | None:
    """Returns the share of the timed steps in which the rank that collects garbage longest does; None if unknown."""
    shares = [sum(one.collecting_us) / sum(one.host_us) for one in recordings if one.collecting_us]
    return min(max(shares), 1.0) if shares else None
