"""The ranks' tracks written as a trace of Chrome's format: a process for each rank, a thread for each track."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.report.timeline.alignment import in_order, missing_ranks, shifts_ns
from overlap_sweep.report.timeline.ranks import RankTimeline
from overlap_sweep.report.timeline.tracks import KINDS, both_at_once, tracks
from overlap_sweep.trace.directories import TIMELINE_MARK

COUNTER = "GEMM and communication at once"


@dataclass(frozen=True)
class Timeline:
    """A trace of all ranks."""

    content: bytes
    """JSON."""
    ranks: int
    spans: int
    iterations: list[int]
    notes: list[str]
    """One sentence each: how the ranks were aligned, and which are missing."""


class _Event(msgspec.Struct, omit_defaults=True):
    """Of Chrome's trace format."""

    ph: str
    pid: int
    tid: int
    name: str
    ts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    dur: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cat: str = ""
    cname: str = ""
    args: dict[str, Any] = {}


def build(ranks: Sequence[RankTimeline], iteration: int | None = None) -> Timeline:
    """All iterations or one of them. UserError where two are of the same rank, or no rank has the iteration."""
    ordered = in_order(ranks)
    wanted = sorted({number for rank in ordered for number in rank.phases})
    if iteration is not None:
        if iteration not in wanted:
            raise UserError(
                f"There is no iteration {iteration}; choose among {', '.join(map(str, wanted[:20]))}, or all."
            )
        wanted = [iteration]
    shifts, notes = shifts_ns(ordered)
    first_ns = min(
        rank.span_ns(number)[0] + shift
        for rank, shift in zip(ordered, shifts, strict=True)
        for number in rank.phases
        if number in wanted
    )
    tids = itertools.count(1)
    events = [
        event
        for pid, (rank, shift) in enumerate(zip(ordered, shifts, strict=True), start=1)
        for event in _events(rank, pid, tids, first_ns - shift, [number for number in wanted if number in rank.phases])
    ]
    categories = {kind.category for kind in KINDS.values()}
    return Timeline(
        content=_encode(events, ordered),
        ranks=len(ordered),
        spans=sum(event.ph == "X" and event.cat in categories for event in events),
        iterations=wanted,
        notes=[*missing_ranks(ordered), *notes],
    )


def _events(
    rank: RankTimeline, pid: int, tids: Iterator[int], origin_ns: int, iterations: Sequence[int]
) -> Iterator[_Event]:
    """`origin_ns`: where the timeline begins, as the rank's own trace counts."""
    name = rank.path.name if rank.rank is None else f"rank {rank.rank}"
    yield _Event("M", pid, 0, "process_name", args={"name": f"{name} ({rank.device})"})
    yield _Event("M", pid, 0, "process_sort_index", args={"sort_index": pid - 1})
    if not iterations:
        return
    for title, spans in tracks(rank, iterations):
        tid = next(tids)
        yield _Event("M", pid, tid, "thread_name", args={"name": title})
        yield _Event("M", pid, tid, "thread_sort_index", args={"sort_index": tid})
        for span in spans:
            ts, dur = _us(span.start_ns - origin_ns), _us(span.end_ns - span.start_ns)
            yield _Event("X", pid, tid, span.name, ts, dur, **span.fields)
    for start_ns, end_ns in both_at_once(rank, iterations).tolist():
        yield _Event("C", pid, 0, COUNTER, _us(start_ns - origin_ns), args={"both": 1})
        yield _Event("C", pid, 0, COUNTER, _us(end_ns - origin_ns), args={"both": 0})


def _us(nanoseconds: int) -> msgspec.Raw:
    """Microseconds with three decimals: exact, where a float would have as many digits as it likes."""
    sign = "-" if nanoseconds < 0 else ""
    return msgspec.Raw(f"{sign}{abs(nanoseconds) // 1000}.{abs(nanoseconds) % 1000:03d}".encode())


def _encode(events: Sequence[_Event], ranks: Sequence[RankTimeline]) -> bytes:
    document = {
        # First, so that it is found without reading the rest.
        "otherData": {"made_by": TIMELINE_MARK, "traces": [str(rank.path) for rank in ranks]},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }
    return msgspec.json.encode(document)
