"""Draws a timeline for each cause that `diagnose` knows, from the recordings of `record_causes.py`, as SVG for the
documentation.

    python benchmarks/record_causes.py RECORDINGS --device cuda --nproc 2
    python benchmarks/draw_causes.py RECORDINGS docs/images
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from timeline_svg import Bar, Row, Window, drawn

from overlap_sweep.diagnosis import NEVER, Loss
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.exposure import exposure_of, slowed_gemms
from overlap_sweep.diagnosis.facts import facts_of
from overlap_sweep.diagnosis.losses import RankView, losses_of, views_of
from overlap_sweep.trace import startup_iterations
from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.intervals import intersect, merge
from overlap_sweep.trace.iterations import overlap_rows
from overlap_sweep.trace.kineto import read_trace

SHORTEST_COPY_NS = 5_000
SOON_NS = 300_000
"""Longest time from a wait of the host to the kernel that is late because of it, to be shown."""

Mark = tuple[str, float, float, str]
"""Name of the row below it (`host`, `compute`, `comm`, or of the other rank `other compute`), start, end and text."""

Marks = Callable[[list[RankView], RankView, Loss], list[Mark]]


@dataclass(frozen=True)
class Picture:
    """What one picture shows: a loss of this cause, on this rank, with some time before and after."""

    cause: str
    scenario: str
    marks: Marks
    before_us: float
    after_us: float
    collective: str = ""
    both_ranks: bool = False
    which: float | None = None
    """Which of the larger losses, in the order of time: 0 the first, 1 the last; None: the largest."""
    twin: str = ""
    """Recording without the cause, to draw the same time of below."""


def views(directory: Path) -> list[RankView]:
    """Returns the views of all ranks of a recording."""
    facts = []
    for path in sorted(directory.glob("trace_rank*.json.gz")):
        trace = read_trace(path)
        startup = startup_iterations(overlap_rows(activity_of(trace), str(path), trace.rank))
        facts.append(facts_of(trace, path, startup))
    return views_of(facts, [exposure_of(own) for own in facts], arrivals(facts))


def loss_of(view: RankView, picture: Picture) -> Loss:
    """Returns the loss to show, of the larger half of those of its cause."""
    found = losses(view, picture)
    if picture.which is None:
        return max(found, key=lambda loss: loss.lost_ns)
    large = np.quantile([loss.lost_ns for loss in found], 0.5)
    found = [loss for loss in found if loss.lost_ns >= large]
    return found[round(picture.which * (len(found) - 1))]


def losses(view: RankView, picture: Picture) -> list[Loss]:
    """Returns the rank's losses of the picture's cause."""
    steady = {step.number for step in view.facts.steps if not step.startup}
    calls = view.facts.calls
    every = [Loss(float(call.end_ns - call.start_ns), "none", call.step, i) for i, call in enumerate(calls)]
    of_causes = [loss for loss in losses_of(view) if loss.cause != "contention"]
    return [
        loss
        for loss in every + of_causes + _slowed(view)
        if loss.cause == picture.cause
        and loss.step in steady
        and (loss.wait is None or span_of(view, loss)[1] - view.facts.waits[loss.wait].end_ns < SOON_NS)
        and (not picture.collective or (loss.call is not None and calls[loss.call].collective == picture.collective))
    ]


def _slowed(view: RankView) -> list[Loss]:
    step = view.facts.work.step
    return [
        Loss(extra, "contention", int(step[i]), work=i, numbers={"alone_ns": alone})
        for i, alone, extra in slowed_gemms(view.facts)
        if extra > 0
    ]


def span_of(view: RankView, loss: Loss) -> tuple[float, float]:
    """Returns from when to when the loss happened."""
    facts = view.facts
    if loss.wait is not None:
        start = facts.waits[loss.wait].start_ns
        return start, float(facts.work.start_ns[loss.work]) if loss.work is not None else facts.waits[loss.wait].end_ns
    if loss.call is not None:
        return facts.calls[loss.call].start_ns, facts.calls[loss.call].end_ns
    assert loss.work is not None
    return float(facts.work.start_ns[loss.work]), float(facts.work.end_ns[loss.work])


def none(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    call = view.facts.calls[loss.call or 0]
    computed = view.exposure.compute.between(call.start_ns, call.end_ns) / (call.end_ns - call.start_ns)
    return [
        ("comm", call.start_ns, call.end_ns, f"{_us(call.end_ns - call.start_ns)}, {computed:.0%} next to computation")
    ]


def dependency(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    call, work = view.facts.calls[loss.call or 0], view.facts.work
    assert loss.work is not None
    start, ahead = float(work.start_ns[loss.work]), float(work.start_ns[loss.work] - work.launch_ns[loss.work])
    text = f"{_us(call.end_ns - call.start_ns)}: the next kernel, launched {_us(ahead)} before, starts at its end"
    return [("comm", call.start_ns, start, text)]


def issued_late(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    call = view.facts.calls[loss.call or 0]
    before = max((other.end_ns for other in view.facts.calls if other.end_ns <= call.start_ns), default=call.start_ns)
    return [
        ("comm", before, call.start_ns, f"no communication for {_us(call.start_ns - before)}"),
        ("compute", call.start_ns, call.end_ns, f"waits {_us(loss.lost_ns)}"),
    ]


def queue_order(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    call = view.facts.calls[loss.call or 0]
    ready = loss.numbers["ready_ns"]
    return [
        ("comm", call.start_ns - ready, call.start_ns, f"launched and ready, starts {_us(ready)} later"),
        ("compute", call.start_ns, call.end_ns, f"waits {_us(loss.lost_ns)}"),
    ]


def bandwidth(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    calls = view.facts.calls
    call = calls[loss.call or 0]
    own = [one for one in calls if (one.step, one.pass_, one.group) == (call.step, call.pass_, call.group)]
    work = view.facts.work
    hiding = view.hiding_of(loss.call or 0)
    assert hiding is not None
    start = min(one.start_ns for one in own)
    last = int(work.end_ns[(work.step == call.step) & (work.start_ns < call.start_ns)].max())
    return [
        ("comm", start, max(one.end_ns for one in own), f"{_us(hiding.comm_ns)} of communication"),
        ("compute", hiding.start_ns, last, f"{_us(hiding.compute_ns)} of computation"),
    ]


def straggler(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    call, late = view.facts.calls[loss.call or 0], int(view.last_ns[loss.call or 0])
    return [
        ("comm", call.start_ns, late, f"waits {_us(late - call.start_ns)} for the other rank"),
        ("other compute", call.start_ns, late, "computes longer"),
    ]


def host_bound(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    work, after = view.facts.work, loss.work or 0
    launches = np.sort(work.launch_ns)
    place = int(np.searchsorted(launches, work.launch_ns[after]))
    return [
        (
            "host",
            launches[place - 1],
            launches[place],
            f"{_us(launches[place] - launches[place - 1])} between launches",
        ),
        (
            "compute",
            float(work.end_ns[after - 1]),
            float(work.start_ns[after]),
            f"nothing to run for {_us(loss.lost_ns)}",
        ),
    ]


def host_sync(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    wait, work = view.facts.waits[loss.wait or 0], view.facts.work
    assert loss.work is not None
    start = float(work.start_ns[loss.work])
    ended = max(float(end) for end in work.end_ns[: loss.work] if end <= start)
    return [
        (
            "host",
            wait.start_ns,
            wait.end_ns,
            f"waits {_us(wait.end_ns - wait.start_ns)} for the device ({wait.operator})",
        ),
        ("compute", ended, start, f"nothing to run for {_us(start - ended)}"),
    ]


def contention(_: list[RankView], view: RankView, loss: Loss) -> list[Mark]:
    work, i = view.facts.work, loss.work or 0
    same = np.flatnonzero((work.signature == work.signature[i]) & (work.step == loss.step))
    spans = ((float(work.start_ns[j]), float(work.end_ns[j])) for j in same)
    return [("compute", start, end, _us(end - start)) for start, end in spans]


PICTURES = (
    Picture("none", "ddp_overlapped", none, 1500, 900),
    Picture("dependency", "tp_blocking", dependency, 1000, 1000, collective="all_reduce", which=0.5),
    Picture("issued_late", "manual_gather_on_demand", issued_late, 2300, 900, collective="all_gather", which=0.3),
    Picture("queue_order", "manual_connections_1", queue_order, 2900, 500, twin="manual_connections_32", which=0.5),
    Picture("bandwidth", "ddp_tiny_batch", bandwidth, 10700, 600, which=1.0),
    Picture("straggler", "ddp_straggler", straggler, 1500, 500, both_ranks=True, which=0.0),
    Picture("host_bound", "tiny_kernels", host_bound, 200, 200, which=0.5),
    Picture("host_sync", "item_in_step_ddp", host_sync, 500, 500, which=0.5),
    Picture("contention", "many_ctas", contention, 1500, 3300, which=0.5),
)


def rows_of(views_: list[RankView], view: RankView, window: Window, title: str, marks: Sequence[Mark]) -> Iterator[Row]:
    """Yields the rows of one rank: host, streams that compute, others, and when communication is exposed."""
    facts, work = view.facts, view.facts.work
    yield Row(title, bold=True)
    host = Row("host: launches")
    columns = zip(work.launch_ns.tolist(), work.start_ns.tolist(), work.lane.tolist(), strict=True)
    launched = [(float(at), float(start), lane) for at, start, lane in columns]
    called = [(float(call.launch_ns), float(call.start_ns), call.lane) for call in facts.calls]
    host.ticks = [(at, colour) for of, colour in ((launched, "muted"), (called, "comm")) for at, _, _ in of]
    host.ticks = [(at, colour) for at, colour in host.ticks if window.shows(at, at + 1)]
    host.links = [one for one in launched + called if window.shows(*one[:2]) and window.shows(one[0], one[0] + 1)]
    host.bars = [Bar(w.start_ns, w.end_ns, "wait", w.name) for w in facts.waits if window.shows(w.start_ns, w.end_ns)]
    if host.ticks or host.bars:
        yield from _marked(host, "host", window, marks)
    shown = [i for i in range(len(work)) if window.shows(float(work.start_ns[i]), float(work.end_ns[i]))]
    lanes = sorted({int(work.lane[i]) for i in shown}, key=lambda lane: (lane not in view.compute_lanes, lane))
    of_calls = [i for i, call in enumerate(facts.calls) if window.shows(call.start_ns, call.end_ns)]
    for lane in dict.fromkeys([*lanes, *(facts.calls[i].lane for i in of_calls)]):
        own = [i for i in of_calls if facts.calls[i].lane == lane]
        row = Row(f"GPU, stream {facts.lanes[lane][1]}", lane=lane)
        for i in shown:
            if int(work.lane[i]) == lane:
                colour = "gemm" if work.is_gemm[i] else "compute"
                row.bars.append(Bar(float(work.start_ns[i]), float(work.end_ns[i]), colour))
        for i in own:
            call, last = facts.calls[i], int(view.last_ns[i])
            arrived = call.start_ns if last == NEVER else min(max(last, call.start_ns), call.end_ns)
            if arrived - call.start_ns > 20_000:
                row.bars.append(Bar(call.start_ns, arrived, "saved"))
            row.bars.append(Bar(arrived, call.end_ns, "comm", call.collective))
        yield from _marked(row, "comm" if own else "compute" if lane in view.compute_lanes else "", window, marks)
    copies = [Bar(a, b, "memory") for a, b in facts.copies.tolist() if window.shows(a, b) and b - a > SHORTEST_COPY_NS]
    if copies:
        yield Row("GPU, copies", copies)
    exposed = intersect(view.exposure.gaps, merge(np.array([(c.start_ns, c.end_ns) for c in facts.calls], np.int64)))
    pieces = [Bar(a, b, "bad") for a, b in exposed.tolist() if window.shows(a, b)]
    if pieces:
        yield Row("exposed", pieces)


def _marked(row: Row, name: str, window: Window, marks: Sequence[Mark]) -> Iterator[Row]:
    own = [(start, end, text) for of, start, end, text in marks if of == name and window.start_ns < end]
    own = [mark for mark in own if mark[1] < window.end_ns]
    if own:
        yield Row(marks=own)
    yield row


def _us(time_ns: float) -> str:
    return f"{time_ns / 1000:,.0f} us" if abs(time_ns) >= 9_500 else f"{time_ns / 1000:.1f} us"


def draw(recordings: Path, picture: Picture) -> str:
    """Returns the picture of one cause as SVG."""
    of_ranks = views(recordings / picture.scenario)
    rank = max(range(len(of_ranks)), key=lambda rank: sum(loss.lost_ns for loss in losses(of_ranks[rank], picture)))
    view = of_ranks[rank]
    loss = loss_of(view, picture)
    start, end = span_of(view, loss)
    window = Window(start - 1000 * picture.before_us, end + 1000 * picture.after_us)
    marks = picture.marks(of_ranks, view, loss)
    named = f"{picture.scenario}, rank {rank}, step {loss.step}"
    rows = [(window, row) for row in rows_of(of_ranks, view, window, named, marks)]
    if picture.both_ranks:
        other = 1 - rank
        own = [(of.removeprefix("other "), a, b, text) for of, a, b, text in marks if of.startswith("other ")]
        rows += [(window, row) for row in rows_of(of_ranks, of_ranks[other], window, f"rank {other}", own)]
    if picture.twin:
        twin = views(recordings / picture.twin)
        call = twin[rank].facts.calls[loss.call or 0]
        same = Window(call.start_ns - (window.end_ns - window.start_ns) * 0.1, 0.0)
        same = Window(same.start_ns, same.start_ns + window.end_ns - window.start_ns)
        rows += [(same, row) for row in rows_of(twin, twin[rank], same, f"{picture.twin}: the same", [])]
    return drawn(rows, f"{picture.cause}: {named}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, help="directory of record_causes.py")
    parser.add_argument("images", type=Path, help="where diagnosis-<cause>.svg are written")
    parser.add_argument("--only", default="", help="causes, separated by commas")
    arguments = parser.parse_args()
    for picture in PICTURES:
        if arguments.only and picture.cause not in arguments.only.split(","):
            continue
        path = arguments.images / f"diagnosis-{picture.cause}.svg"
        path.write_text(draw(arguments.recordings, picture))
        print(f"{path}: {path.stat().st_size / 1000:.1f} KB")


if __name__ == "__main__":
    main()
