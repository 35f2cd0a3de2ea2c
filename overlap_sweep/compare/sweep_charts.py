"""Charts of sweeps beside each other: ratios, and how the baseline of each held over time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_sweep.compare.charts import ROW_PX, TIMELINE_HEIGHT_PX, WIDTH_PX, Chart, ratios_file, timeline_file
from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.matching import Match
from overlap_sweep.compare.sweeps import SweepComparison
from overlap_sweep.compare.totals import Aggregate
from overlap_sweep.overlap import space
from overlap_sweep.report.page.palette import colour

LOGARITHMIC_FROM = 4.0
"""Largest over smallest ratio from which on the axis is logarithmic."""
NOTABLE_DRIFT = 0.02

COLOURS = {"faster": "good", "slower": "bad", "same": "wait"}


def sweep_charts(comparison: SweepComparison) -> list[Chart]:
    """The ratios of each dataset to the reference, and how the baseline of each held during its sweep."""
    charts: list[Chart] = []
    for label in comparison.candidates:
        matches = [match for match in comparison.matches if match.dataset == label]
        aggregates = [aggregate for aggregate in comparison.aggregates if aggregate.dataset == label]
        if matches:
            name = ratios_file(label, comparison.candidates)
            charts.append(Chart(name, _ratio_chart(matches, aggregates, comparison)))
    for dataset in comparison.datasets:
        drift = _drift(dataset)
        if drift:
            charts.append(Chart(timeline_file(dataset.label), _drift_chart(dataset.label, drift)))
    return charts


def _ratio_chart(
    matches: Sequence[Match], aggregates: Sequence[Aggregate], comparison: SweepComparison
) -> dict[str, Any]:
    """A row for each pass of an operator: a dot for each matching point, a bar for their mean."""
    import altair as alt

    label, reference = matches[0].dataset, comparison.reference
    rows = [_row(a.case, a.tp_size, a.operator, a.pass_name) for a in aggregates]
    dots = [
        {
            "row": _row(key.case(comparison.telling), key.tp_size, key.operator, key.pass_name),
            "ratio": match.ratio,
            "colour": colour(COLOURS[match.verdict]),
        }
        for match in matches
        for key in [match.ours.key]
    ]
    means = [
        {"row": row, "ratio": aggregate.ratio, "text": f"{aggregate.ratio:.3f}"}
        for row, aggregate in zip(rows, aggregates, strict=True)
    ]
    low, high = min(1.0, *(match.ratio for match in matches)), max(1.0, *(match.ratio for match in matches))
    logarithmic = high > LOGARITHMIC_FROM * low
    margin = 0.08 * (high - low) or 0.01
    domain = [low / 1.15, high * 1.15] if logarithmic else [low - margin, high + margin]
    scale = alt.Scale(domain=domain, type="log" if logarithmic else "linear", zero=False, nice=False)
    x = alt.X("ratio:Q", scale=scale, title=f"time of {label} over {reference}: left is faster")
    y = alt.Y("row:N", sort=rows, title=None, axis=alt.Axis(labelLimit=420, grid=True, ticks=False))
    own = alt.Color("colour:N", scale=None)
    at_one = alt.Chart(alt.InlineData(values=[{"ratio": 1.0, "text": f"{reference} = 1"}]))
    layers = [
        at_one.mark_rule(color=colour("ink"), strokeWidth=1.2).encode(x=x),
        at_one.mark_text(align="center", baseline="bottom", dy=-4).encode(x=x, y=alt.value(0), text="text:N"),
        alt.Chart(alt.InlineData(values=dots)).mark_circle(size=46, opacity=0.7).encode(x=x, y=y, color=own),
        alt.Chart(alt.InlineData(values=means)).mark_tick(color=colour("ink"), thickness=2, size=16).encode(x=x, y=y),
        alt.Chart(alt.InlineData(values=means))
        .mark_text(align="left", dx=8, fontWeight=600)
        .encode(x=alt.value(WIDTH_PX), y=y, text="text:N"),
    ]
    title = alt.TitleParams(
        f"{label} against {reference}",
        subtitle=[
            "A dot for each matching point: green is faster, orange slower, grey the same within the noise;",
            "bar and number: geometric mean.",
        ],
        offset=26,
    )
    return alt.layer(*layers).properties(width=WIDTH_PX, height=ROW_PX * len(rows), title=title).to_dict()


def _row(case: str, tp_size: int | None, operator: str | None, pass_name: str | None) -> str:
    return f"{case} TP={tp_size} {operator} {pass_name}".strip() if operator else "all"


@dataclass(frozen=True)
class _Baseline:
    """The time without overlap that was measured beside one point."""

    number: int
    change: float
    """From the median of its TP size, operator and pass, as a fraction."""
    name: str


def _drift(dataset: Dataset) -> list[_Baseline]:
    """In the order of measuring."""
    measured = [(p, p.result) for p in dataset.points if p.status == "ok" and p.is_operator and p.result]
    measured.sort(key=lambda pair: (pair[1].started or "", str(pair[0].directory)))
    cells: dict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
    for number, (point, result) in enumerate(measured, start=1):
        for name in space.passes(point.config):
            cell = (point.case, point.config["tp_size"], point.config["operator"], name)
            cells[cell].append((number, result.measured.times[name].none.median_us))
    found = []
    for (_, tp_size, operator, name), times in cells.items():
        middle_us = statistics.median(time_us for _, time_us in times)
        shown = f"TP={tp_size} {operator} {name}"
        found += [_Baseline(number, time_us / middle_us - 1, shown) for number, time_us in times]
    return sorted(found, key=lambda baseline: baseline.number)


def _drift_chart(label: str, baselines: Sequence[_Baseline]) -> dict[str, Any]:
    import altair as alt

    values = [{"number": b.number, "change": b.change, "name": b.name} for b in baselines]
    notable = sorted(baselines, key=lambda b: -abs(b.change))[:3]
    named: list[dict[str, Any]] = [
        {"number": b.number, "change": b.change, "name": f"{b.name} {b.change:+.1%}"}
        for b in notable
        if abs(b.change) >= NOTABLE_DRIFT
    ]
    most = max(NOTABLE_DRIFT, *(abs(b.change) for b in baselines)) * 1.15
    last = max(2, *(b.number for b in baselines))
    x = alt.X("number:Q", title="points in the order of measuring", scale=alt.Scale(domain=[0, last + 1], nice=False))
    y = alt.Y(
        "change:Q",
        title="time without overlap, from its median",
        axis=alt.Axis(format="+.1%"),
        scale=alt.Scale(domain=[-most, most], nice=False),
    )
    layers: list[Any] = [
        alt.Chart(alt.InlineData(values=[{"change": 0}])).mark_rule(color=colour("ink"), strokeWidth=1).encode(y=y),
        alt.Chart(alt.InlineData(values=values))
        .mark_circle(size=34, opacity=0.65, color=colour("series1"))
        .encode(x=x, y=y),
        alt.Chart(alt.InlineData(values=[one for one in named if one["number"] <= last / 2]))
        .mark_text(align="left", dx=8)
        .encode(x=x, y=y, text="name:N"),
        alt.Chart(alt.InlineData(values=[one for one in named if one["number"] > last / 2]))
        .mark_text(align="right", dx=-8)
        .encode(x=x, y=y, text="name:N"),
    ]
    title = alt.TitleParams(
        f"{label}: how the baseline held",
        subtitle="A dot for each point: its operator without overlap, measured beside it. A trend is drift.",
    )
    return alt.layer(*layers).properties(width=WIDTH_PX, height=TIMELINE_HEIGHT_PX, title=title).to_dict()
