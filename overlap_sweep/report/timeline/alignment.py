"""Ranks beside each other: in order, on one clock, and which of them are missing."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import some_ranks
from overlap_sweep.report.timeline.ranks import RankTimeline


def in_order(ranks: Sequence[RankTimeline]) -> list[RankTimeline]:
    """By rank. UserError where two are of the same."""
    seen: dict[int, RankTimeline] = {}
    for rank in ranks:
        if rank.rank is not None and rank.rank in seen:
            raise UserError(
                f"{seen[rank.rank].path} and {rank.path} are both of rank {rank.rank}; give the traces of one run."
            )
        if rank.rank is not None:
            seen[rank.rank] = rank
    return sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0))


def missing_ranks(ranks: Sequence[RankTimeline]) -> list[str]:
    """In a sentence, if any are."""
    sizes = {rank.world_size for rank in ranks if rank.world_size}
    if len(sizes) > 1:
        return [f"The traces are of runs of {' and '.join(map(str, sorted(sizes)))} ranks; are they of one run?"]
    if not sizes or any(rank.rank is None for rank in ranks):
        return []
    (size,) = sizes
    missing = sorted(set(range(size)) - {rank.rank for rank in ranks})
    if not missing:
        return []
    of_them = f"{len(missing)} of {size} ranks {'are' if len(missing) > 1 else 'is'} missing"
    return [f"{of_them}: {some_ranks(missing)}."]


def shifts_ns(ranks: Sequence[RankTimeline]) -> tuple[list[int], list[str]]:
    """What to add to each rank's own times so that they are of one clock, and a note if it is a guess."""
    common = sorted(set.intersection(*(set(rank.phases) for rank in ranks)))
    spans_ns = [rank.span_ns(common[0] if common else min(rank.phases)) for rank in ranks]
    since_1970_ns = [rank.base_time_ns for rank in ranks]
    starts = [start_ns + base_ns for (start_ns, _), base_ns in zip(spans_ns, since_1970_ns, strict=True)]
    ends = [end_ns + base_ns for (_, end_ns), base_ns in zip(spans_ns, since_1970_ns, strict=True)]
    same_base = all(since_1970_ns) or not any(since_1970_ns)
    # Ranks that communicate work on the same iteration at the same time.
    if len(ranks) == 1 or (common and same_base and max(starts) < min(ends)):
        return since_1970_ns, []
    what = f"iteration {common[0]}" if common else "each rank's first iteration, for none is common to all"
    note = f"The ranks' clocks don't agree: aligned at the start of {what}, so that skew between them is not shown."
    return [-start_ns for start_ns, _ in spans_ns], [note]
