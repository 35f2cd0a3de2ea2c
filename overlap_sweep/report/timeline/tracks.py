"""The tracks of one rank, from top to bottom: iterations, passes, then one for each kind of kernels and stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from overlap_sweep.report.numbers import PASS_WORDS
from overlap_sweep.report.timeline.ranks import RankTimeline
from overlap_sweep.trace.activity import COMM, COMPUTE, GEMM, MEMORY, WAIT
from overlap_sweep.trace.intervals import Intervals, intersect, merge, rows_without_overlap
from overlap_sweep.trace.kernel_classes import function_name
from overlap_sweep.trace.spans import PHASE_OF_PASS


class Kind(NamedTuple):
    """How one kind of kernels is drawn."""

    title: str
    category: str
    colour: str
    """One of chrome://tracing's names; Perfetto colours by name."""


KINDS = {
    GEMM: Kind("GEMM", "gemm", "thread_state_running"),
    COMPUTE: Kind("computation", "compute", "rail_response"),
    COMM: Kind("communication", "comm", "thread_state_iowait"),
    WAIT: Kind("wait", "wait", "grey"),
    MEMORY: Kind("copies", "memory", "rail_load"),
}
"""From top to bottom."""

LONGEST_NUMBER = 20
"""What is longer is a name."""

STREAMS_NAMED = 3
"""In the name of a track that several share."""


class Span(NamedTuple):
    """Something on a track, in the trace's own nanoseconds."""

    start_ns: int
    end_ns: int
    name: str
    fields: Mapping[str, Any]
    """The other fields of the event."""


def tracks(rank: RankTimeline, iterations: Sequence[int]) -> Iterator[tuple[str, list[Span]]]:
    """The title of each and its spans, by start; what overlaps with others on its track is on a track below."""
    for title, spans in (
        ("iterations", _iterations(rank, iterations)),
        ("passes", _passes(rank, iterations)),
        *_kernels(rank, iterations),
    ):
        for number, of_lane in enumerate(_lanes(spans), start=1):
            yield title if number == 1 else f"{title} ({number})", of_lane


def both_at_once(rank: RankTimeline, iterations: Sequence[int]) -> Intervals:
    """When GEMM and communication ran at the same time."""
    activity, chosen = rank.activity, rank.events_in(iterations)
    gemm, comm = (merge(activity.events.intervals[chosen[activity.kind[chosen] == kind]]) for kind in (GEMM, COMM))
    return intersect(gemm, comm)


def _iterations(rank: RankTimeline, iterations: Sequence[int]) -> list[Span]:
    return sorted(
        (Span(*rank.span_ns(number), f"iteration {number}", {"cat": "iteration"}) for number in iterations),
        key=_by_time,
    )


def _passes(rank: RankTimeline, iterations: Sequence[int]) -> list[Span]:
    found = [
        Span(*rank.span_ns(number, phase), name, {"cat": "pass", "args": {"iteration": number}})
        for number in iterations
        for phase, name in PASS_WORDS.items()
        if phase in rank.phases[number]
    ]
    return sorted(found, key=_by_time)


def _kernels(rank: RankTimeline, iterations: Sequence[int]) -> Iterator[tuple[str, list[Span]]]:
    """By kind, then by stream. Streams that are never busy at once share a track, since userbuffers take some for every
    slot."""
    activity, events = rank.activity, rank.activity.events
    chosen = rank.events_in(iterations)
    chosen = chosen[np.lexsort((events.end_ns[chosen], events.start_ns[chosen]))]
    for kind, drawn in KINDS.items():
        of_kind = chosen[activity.kind[chosen] == kind]
        shared: list[tuple[list[int], Intervals]] = []
        for lane in sorted(np.unique(events.lane[of_kind]).tolist(), key=lambda lane: _natural(activity.lanes[lane])):
            busy = merge(events.intervals[of_kind[events.lane[of_kind] == lane]])
            free = next((i for i, (_, taken) in enumerate(shared) if not len(intersect(taken, busy))), None)
            if free is None:
                shared.append(([lane], busy))
            else:
                lanes, taken = shared[free]
                shared[free] = [*lanes, lane], merge(np.concatenate((taken, busy)))
        for lanes, _ in shared:
            spans = [_kernel(rank, int(i), drawn) for i in of_kind[np.isin(events.lane[of_kind], lanes)]]
            yield f"{drawn.title} · {_streams(rank, lanes)}", spans


def _kernel(rank: RankTimeline, event: int, drawn: Kind) -> Span:
    activity, events = rank.activity, rank.activity.events
    category, name = activity.labels[events.label[event]]
    short = (function_name(name) if category == "kernel" else name) or name
    args = {
        "kernel": name,
        "library": activity.classes[int(events.label[event])].library,
        "stream": rank.streams[events.lane[event]],
        "phase": PHASE_OF_PASS.get(int(activity.assignment.pass_[event]), ""),
        "iteration": int(activity.assignment.iteration[event]),
    }
    fields = {"cat": drawn.category, "cname": drawn.colour, "args": args}
    return Span(int(events.start_ns[event]), int(events.end_ns[event]), short, fields)


def _streams(rank: RankTimeline, lanes: Sequence[int]) -> str:
    """`stream 7`, `streams 7, 359, 366 and 5 more`, `threads 12, 13`."""
    named = [rank.streams[lane] for lane in lanes]
    noun = ("thread" if rank.device == "CPU" else "stream") + ("s" if len(named) > 1 else "")
    more = f" and {len(named) - STREAMS_NAMED} more" if len(named) > STREAMS_NAMED else ""
    return f"{noun} {', '.join(named[:STREAMS_NAMED])}{more}"


def _natural(lane: tuple[str, str]) -> tuple[tuple[bool, int, str], ...]:
    """Numbers by value."""
    numbers = [int(part) if part.isdecimal() and len(part) < LONGEST_NUMBER else None for part in lane]
    return tuple((number is None, number or 0, part) for number, part in zip(numbers, lane, strict=True))


def _by_time(span: Span) -> tuple[int, int]:
    return span.start_ns, span.end_ns


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans by start, in as many tracks as it takes: what overlaps on one track is drawn wrong."""
    spans = list(spans)
    return [[spans[i] for i in row] for row in rows_without_overlap((s.start_ns, s.end_ns) for s in spans)]
