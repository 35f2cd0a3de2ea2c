"""What ran when on one rank: a typical iteration without overlap above one with the best, on the same time axis."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_sweep.cache import cached_bytes
from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import PASS_WORDS, as_us
from overlap_sweep.report.page.chart_parts import drawn_from, tooltip
from overlap_sweep.report.page.lanes import CLASSES, at_once_us, lanes
from overlap_sweep.report.page.palette import colour
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.trace import spans
from overlap_sweep.trace.kernel_classes import function_name
from overlap_sweep.trace.spans import Iteration, Span, typical_iteration
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice
from overlap_sweep.workloads.operator.failures import frozen, of_pass
from overlap_sweep.workloads.operator.hidden_chart import short_name

if TYPE_CHECKING:
    import altair as alt

ROW_PX = 17
AT_ONCE_US = 1.0
"""From which on a GEMM and communication are said to run at once; less is how two kernels meet."""
INDEPENDENT = (
    "Without overlap, too, a GEMM and communication run at once here: such as do not depend on each other, for example "
    "the GEMM of the weight gradient and the reduce-scatter of the input gradient. What depends on each other runs one "
    "after the other."
)
"""What to know of the upper half."""
MOST_SPANS = 800
"""Drawn of one iteration: the longest."""
LONGEST_NAME = 90
RANK = 0


@dataclass(frozen=True)
class Bar:
    row: str
    start_us: float
    end_us: float
    kind: str
    name: str
    stream: str


@dataclass(frozen=True)
class Extent:
    """A pass, or all of what is shown."""

    row: str
    start_us: float
    end_us: float
    text: str


@dataclass(frozen=True)
class Half:
    """One iteration."""

    title: str
    rows: list[str]
    """From top to bottom; what they are called follows the bar."""
    bars: list[Bar]
    extents: list[Extent]


@dataclass(frozen=True)
class TimelinePanel:
    name: str
    title: str
    halves: list[Half]
    notes: list[str]
    """What is missing, and why."""


@dataclass(frozen=True)
class Side:
    """What one half is to be taken from."""

    title: str
    path: Path | None


def pass_timelines(case: CaseAnalysis, tp_size: int) -> Iterator[tuple[str, TimelinePanel]]:
    """By operator its passes, those whose overlap some trace shows."""
    points = [point for point in case.points if point.config["tp_size"] == tp_size and point.result]
    for choice in case.plans[tp_size].choices if tp_size in case.plans else ():
        own = [point for point in points if point.config["operator"] == choice.operator]
        shown = _shown(choice)
        if shown is None:
            continue
        verb = "chosen" if shown is choice.chosen else "not chosen"
        best = Side(f"{short_name(shown.settings)} ({verb})", _trace_of(shown, own, choice.pass_name))
        if best.path:
            none = Side("no overlap", _none_trace(own, best.path))
            title = f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={tp_size}"
            panel = _panel(f"{choice.operator}_{choice.pass_name}", title, none, best, choice.pass_name)
            if panel:
                yield choice.operator, panel


Named = tuple[str, str]
"""What a variant is called, and its name in the point."""


def layer_timeline(name: str, title: str, point: Point, variants: tuple[Named, Named]) -> TimelinePanel | None:
    """Of a layer point the variant without overlap and the best; None where the latter has no trace."""
    none, best = (Side(label, _listed(point, trace_file(RANK, variant))) for label, variant in variants)
    return _panel(name, title, none, best, None) if best.path else None


def describe(panel: TimelinePanel) -> str:
    extents = (f"{half.title}: {', '.join(extent.text for extent in half.extents)}" for half in panel.halves)
    return f"Timeline of streams, {panel.title}. {'; '.join(extents)}."


def _shown(choice: PassChoice) -> Candidate | None:
    """The chosen one, or where that is no overlap the fastest that was measured."""
    if choice.chosen.settings and choice.chosen.measured:
        return choice.chosen
    overlaps = [candidate for candidate in choice.candidates if candidate.settings and candidate.measured]
    return min(overlaps, key=lambda candidate: candidate.time_us, default=None)


def _trace_of(candidate: Candidate, points: Sequence[Point], pass_name: str) -> Path | None:
    """Of the first point that measured the candidate and has one."""
    wanted = frozen(candidate.settings)
    for point in points:
        own = frozen(of_pass(point.result.settings, pass_name)) if point.result else None
        if own == wanted and (path := _listed(point, trace_file(RANK))):
            return path
    return None


def _none_trace(points: Sequence[Point], best: Path) -> Path | None:
    """The one recorded beside the best if there is one, else that of any point, or of a point without overlap."""
    beside_first = sorted(points, key=lambda point: point.directory != best.parent)
    for point in beside_first:
        if path := _listed(point, trace_file(RANK, "none")):
            return path
    plain = (point for point in points if point.result and not point.result.settings)
    return next((path for point in plain if (path := _listed(point, trace_file(RANK)))), None)


def _listed(point: Point, name: str) -> Path | None:
    path = point.directory / name
    return path if point.result and name in point.result.traces and path.is_file() else None


def _panel(name: str, title: str, none: Side, best: Side, pass_name: str | None) -> TimelinePanel | None:
    halves, notes = [], []
    for key, side in (("none", none), ("best", best)):
        if side.path is None:
            notes.append(f"Of {side.title} there is no trace to draw beside it.")
            continue
        iteration = _iteration(side.path)
        if iteration is None:
            notes.append(f"{side.path.name} of {side.title} cannot be read.")
            continue
        shown = [span for span in iteration.spans if pass_name in (None, span.phase)]
        if not shown:
            notes.append(f"The trace of {side.title} shows nothing of this pass.")
            continue
        half, left_out = _half(key, side.title, shown, pass_name)
        halves.append(half)
        if key == "none" and at_once_us(shown) > AT_ONCE_US:
            notes.append(INDEPENDENT)
        if left_out:
            notes.append(f"{side.title}: the {left_out} shortest spans are left out.")
    return TimelinePanel(name, title, halves, notes) if halves else None


def _iteration(path: Path) -> Iteration | None:
    """None where the trace cannot be read, which analysis has said already. Kept, since reading takes a while."""

    def read() -> bytes:
        return msgspec.json.encode(typical_iteration(path))

    try:
        key = hashlib.sha256(path.read_bytes()).digest() + _reader_digest()
        return msgspec.json.decode(cached_bytes("timelines", key, read), type=Iteration)
    except (UserError, OSError):
        return None


@cache
def _reader_digest() -> bytes:
    """Of all that decides what is read from a trace."""
    digest = hashlib.sha256()
    for path in sorted(Path(spans.__file__).parent.iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.digest()


def _half(key: str, title: str, shown: Sequence[Span], pass_name: str | None) -> tuple[Half, int]:
    """With times from the first start on, and how many spans it leaves out."""
    origin_us = min(span.start_us for span in shown)
    longest = sorted(shown, key=lambda span: span.start_us - span.end_us)[:MOST_SPANS]
    rows, bars = [f"{key}|"], []
    for lane in lanes(longest):
        row = f"{key}|{lane.name}"
        rows.append(row)
        bars += [
            Bar(
                row,
                round(span.start_us - origin_us, 2),
                round(span.end_us - origin_us, 2),
                span.kind,
                (function_name(span.name) or span.name)[:LONGEST_NAME],
                span.stream,
            )
            for span in lane.spans
        ]
    passes = [pass_name] if pass_name else ["fwd", "bwd"]
    extents = []
    for name in passes:
        own = [span for span in shown if span.phase == name]
        if own:
            start_us, end_us = min(span.start_us for span in own), max(span.end_us for span in own)
            text = f"{PASS_WORDS[name]} {as_us(end_us - start_us)} us"
            extents.append(Extent(f"{key}|", round(start_us - origin_us, 2), round(end_us - origin_us, 2), text))
    return Half(title, rows, bars, extents), len(shown) - len(longest)


def chart(panel: TimelinePanel) -> alt.TopLevelMixin:
    import altair as alt

    rows: list[str] = []
    for half in panel.halves:
        rows += [*([f"gap{len(rows)}|"] if rows else []), *half.rows]
    bars = [_numbers(bar) for half in panel.halves for bar in half.bars]
    extents = [{**_numbers(extent), "title": half.title} for half in panel.halves for extent in half.extents]
    end_us = max(extent["end_us"] for extent in (*extents, *bars))
    x_scale = alt.Scale(domain=[0, end_us], nice=False)
    x_axis = alt.Axis(format=",.0f", tickCount=8, domain=False, ticks=False, titleAnchor="end")
    names = alt.Axis(
        labelExpr="split(datum.label, '|')[1]", domain=False, ticks=False, labelLimit=210, labelPadding=6, grid=False
    )
    y = alt.Y("row:N", sort=rows, title=None, axis=names, scale=alt.Scale(domain=rows, paddingInner=0.12))

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title="us", scale=x_scale, axis=x_axis)

    kinds = alt.Color(
        "kind:N", scale=alt.Scale(domain=list(CLASSES), range=[colour(kind) for kind in CLASSES]), legend=None
    )
    drawn = drawn_from(bars)
    # A border of the page's colour parts neighbours, and would hide what is as thin as it.
    wide = f"datum.end_us - datum.start_us > {end_us / 250}"
    edge = alt.Stroke("kind:N", scale=alt.Scale(domain=list(CLASSES), range=[colour(kind) for kind in CLASSES]))
    spans_of = drawn.mark_bar(height=ROW_PX * 0.82, strokeWidth=0.7).encode(
        stroke=alt.when(wide).then(alt.value(colour("page"))).otherwise(edge),
        x=x("start_us"),
        x2="end_us:Q",
        y=y,
        color=kinds,
        tooltip=tooltip({"name": "runs", "lane": "class", "stream": "stream", "time": "takes", "from": "from"}),
    )
    whole = drawn_from(extents)
    told = tooltip({"title": "setting", "text": "takes"})
    band = whole.mark_bar(height=ROW_PX, color=colour("panel"), stroke=colour("line"), cornerRadius=3).encode(
        x=x("start_us"), x2="end_us:Q", y=y, tooltip=told
    )
    middle = whole.transform_calculate(middle="(datum.start_us + datum.end_us) / 2")
    said = middle.mark_text(fontSize=11).encode(x=x("middle"), y=y, text="text:N", tooltip=told)
    titles = drawn_from({"row": half.rows[0], "title": half.title} for half in panel.halves)
    title = titles.mark_text(align="left", fontSize=12, fontWeight=600, dy=-ROW_PX).encode(
        x=alt.value(0), y=y, text="title:N"
    )
    ends = drawn_from({"at": extent["end_us"]} for extent in extents)
    border = ends.mark_rule(color=colour("line"), strokeDash=[3, 3]).encode(x=x("at"))
    return alt.layer(border, band, said, spans_of, title).properties(
        width="container", height=ROW_PX * len(rows), title=alt.TitleParams(panel.title, offset=14)
    )


def _numbers(shown: Bar | Extent) -> dict[str, Any]:
    """What a tooltip says of it, too."""
    fields: dict[str, Any] = msgspec.to_builtins(shown)
    if isinstance(shown, Bar):
        fields["lane"] = CLASSES[shown.kind]
        fields["time"] = f"{as_us(shown.end_us - shown.start_us)} us"
        fields["from"] = f"{as_us(shown.start_us)} to {as_us(shown.end_us)} us"
    return fields
