"""Charts of traces beside each other: the times of every phase, and each iteration by iteration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from overlap_sweep.compare.charts import ROW_PX, TIMELINE_HEIGHT_PX, WIDTH_PX, Chart, ratios_file, timeline_file
from overlap_sweep.compare.trace_pairs import TraceDataset
from overlap_sweep.compare.trace_text import PHASE_NAMES
from overlap_sweep.compare.traces import PHASES, QuantityMatch, TraceComparison
from overlap_sweep.report.page.label_places import spread
from overlap_sweep.report.page.palette import colour

if TYPE_CHECKING:
    import altair as alt

LABEL_GAP_PX = 15.0

QUANTITIES = {
    "span_us": "whole span",
    "gemm_busy_us": "GEMM",
    "comm_busy_us": "communication",
    "overlap_us": "both at once",
    "exposed_comm_us": "exposed communication",
    "wait_us": "waiting",
    "idle_us": "idle",
}
LINES = {
    "gemm_busy_us": ("GEMM", "gemm"),
    "comm_busy_us": ("communication", "comm"),
    "overlap_us": ("both at once", "series4"),
    "exposed_comm_us": ("exposed communication", "bad"),
}
"""Of a timeline: name and colour by quantity."""


def trace_charts(comparison: TraceComparison) -> list[Chart]:
    """The times of each dataset beside the reference's, and the iterations of each one by one."""
    charts: list[Chart] = []
    for label in comparison.candidates:
        quantities = [match for match in comparison.quantities if match.dataset == label and match.rank is None]
        name = ratios_file(label, comparison.candidates)
        charts.append(Chart(name, _quantity_chart(quantities, label, comparison.reference)))
    most_us = max(
        getattr(row, name)
        for dataset in comparison.datasets
        for file in dataset.files
        for row in file.rows
        if row.phase == "all"
        for name in LINES
    )
    for dataset in comparison.datasets:
        charts.append(Chart(timeline_file(dataset.label), _iteration_chart(dataset, most_us)))
    return charts


def _quantity_chart(quantities: Sequence[QuantityMatch], label: str, reference: str) -> dict[str, Any]:
    """For each phase the times of both, and the ratio in a column of its own."""
    import altair as alt

    phases = [phase for phase in PHASES if any(match.phase == phase for match in quantities)]
    most_ms = max(
        (match.value or 0, match.reference_value or 0) for match in quantities if match.quantity in QUANTITIES
    )
    domain = [0, max(most_ms) / 1000 * 1.05]
    panels = [_phase_panel(quantities, phase, domain, label, reference, first=phase == phases[0]) for phase in phases]
    title = alt.TitleParams(
        f"{label} against {reference}",
        subtitle=[
            f"Medians over iterations and ranks. Ring: {reference}; dot: {label}, green where that is better,",
            "orange where it is worse; number: ratio of the two.",
        ],
    )
    return alt.vconcat(*panels, spacing=14).properties(title=title).to_dict()


def _phase_panel(
    quantities: Sequence[QuantityMatch], phase: str, domain: list[float], label: str, reference: str, first: bool
) -> alt.LayerChart | alt.FacetChart:
    import altair as alt

    rows: list[dict[str, Any]] = []
    for quantity, name in QUANTITIES.items():
        for match in quantities:
            if (match.phase, match.quantity) == (phase, quantity) and (match.value or match.reference_value):
                ours, theirs = (match.value or 0.0) / 1000, (match.reference_value or 0.0) / 1000
                ratio = "" if math.isnan(match.ratio) else f"{match.ratio:.2f}x"
                worse = ours > theirs if quantity != "overlap_us" else ours < theirs
                rows.append(
                    {
                        "name": name,
                        "ours": ours,
                        "theirs": theirs,
                        "text": ratio or "new",
                        "colour": colour("wait" if ours == theirs else "bad" if worse else "good"),
                    }
                )
    scale = alt.Scale(domain=domain, nice=False)
    y = alt.Y(
        "name:N",
        sort=[row["name"] for row in rows],
        title=PHASE_NAMES[phase],
        axis=alt.Axis(labelLimit=200, labelPadding=8, ticks=False, minExtent=150),
    )
    data = alt.Chart(alt.InlineData(values=rows))
    own = alt.Color("colour:N", scale=None)
    layers: list[Any] = [
        data.mark_rule(strokeWidth=3, opacity=0.55).encode(
            x=alt.X("theirs:Q", scale=scale, title="ms"), x2="ours:Q", y=y, color=own
        ),
        data.mark_point(size=60, color=colour("ink"), filled=False, opacity=1).encode(x="theirs:Q", y=y),
        data.mark_point(size=60, filled=True, opacity=1).encode(x="ours:Q", y=y, color=own),
        data.mark_text(align="left", dx=8).encode(x=alt.value(WIDTH_PX), y=y, text="text:N"),
    ]
    if first and rows:
        (left, left_text), (right, right_text) = sorted(((rows[0]["theirs"], reference), (rows[0]["ours"], label)))
        at_left = alt.Chart(alt.InlineData(values=[{"x": left, "name": rows[0]["name"], "text": left_text}]))
        at_right = alt.Chart(alt.InlineData(values=[{"x": right, "name": rows[0]["name"], "text": right_text}]))
        layers += [
            at_left.mark_text(align="right", dx=-6, dy=-11).encode(x="x:Q", y=y, text="text:N"),
            at_right.mark_text(align="left", dx=6, dy=-11).encode(x="x:Q", y=y, text="text:N"),
        ]
    return alt.layer(*layers).properties(width=WIDTH_PX, height=ROW_PX * max(len(rows), 1))


def _iteration_chart(dataset: TraceDataset, most_us: float) -> dict[str, Any]:
    """Medians over the ranks, the range of the ranks behind them."""
    import altair as alt

    by_turn: dict[int, list[Any]] = {}
    for file in dataset.files:
        whole = [row for row in file.rows if row.phase == "all"]
        for row in whole:
            by_turn.setdefault(row.iteration, []).append(row)
    numbers = sorted(by_turn)
    values = [
        {
            "iteration": number,
            "name": name,
            "ms": statistics.median(getattr(row, quantity) for row in by_turn[number]) / 1000,
            "low": min(getattr(row, quantity) for row in by_turn[number]) / 1000,
            "high": max(getattr(row, quantity) for row in by_turn[number]) / 1000,
            "colour": colour(shade),
        }
        for number in numbers
        for quantity, (name, shade) in LINES.items()
    ]
    high_ms = most_us / 1000 * 1.06
    per_px = high_ms / TIMELINE_HEIGHT_PX
    ends = values[-len(LINES) :]
    places = spread([end["ms"] for end in ends], LABEL_GAP_PX * per_px, 0.0, high_ms)
    labels = [{**end, "place": place} for end, place in zip(ends, places, strict=True)]
    x = alt.X(
        "iteration:Q",
        title="iteration",
        axis=alt.Axis(values=numbers[:: math.ceil(len(numbers) / 20)], format="d", grid=False),
        scale=alt.Scale(domain=[numbers[0] - 0.3, numbers[-1] + 0.3], nice=False),
    )
    scale = alt.Scale(domain=[0, high_ms], nice=False)
    y = alt.Y("ms:Q", title="ms, whole iteration", scale=scale)
    own = alt.Color("colour:N", scale=None)
    data = alt.Chart(alt.InlineData(values=values))
    layers = [
        data.mark_rule(opacity=0.4, strokeWidth=5).encode(x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q", color=own),
        data.mark_line(strokeWidth=1.8).encode(x=x, y=y, color=own, detail="name:N"),
        data.mark_point(filled=True, size=44, opacity=1).encode(x=x, y=y, color=own),
        alt.Chart(alt.InlineData(values=labels))
        .mark_text(align="left", dx=8)
        .encode(x=alt.value(WIDTH_PX), y=alt.Y("place:Q", scale=scale), text="name:N", color=own),
    ]
    ranks = f"{len(dataset.files)} ranks: medians, and from the lowest to the highest" if len(dataset.files) > 1 else ""
    title = alt.TitleParams(f"{dataset.label}, iteration by iteration", subtitle=ranks)
    return alt.layer(*layers).properties(width=WIDTH_PX, height=TIMELINE_HEIGHT_PX, title=title).to_dict()
