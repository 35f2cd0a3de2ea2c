"""Charts of comparisons, each a PNG: ratios of sweeps and how their baselines held; times of traces by phase and by
iteration."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.matching import Match
from overlap_sweep.compare.sweeps import SweepComparison
from overlap_sweep.compare.totals import Aggregate
from overlap_sweep.compare.trace_pairs import TraceDataset
from overlap_sweep.compare.trace_text import PHASE_NAMES
from overlap_sweep.compare.traces import PHASES, QuantityMatch, TraceComparison
from overlap_sweep.overlap import space
from overlap_sweep.report.charts import (
    Axis,
    Column,
    Dot,
    DotRow,
    Dots,
    Form,
    Key,
    Level,
    Line,
    LinePoint,
    Lines,
    Reference,
)
from overlap_sweep.report.charts.figures import column_spec, figure

NOTABLE_DRIFT = 0.02
COLOURS = {"faster": "good", "slower": "bad", "same": "wait"}
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


@dataclass(frozen=True)
class Chart:
    """One file: charts below each other, under a title where they are several."""

    file_name: str
    drawn: Sequence[Form]
    title: str = ""
    subtitle: Sequence[str] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite's."""
        figures = [figure(f"{self.file_name}_{i}", form) for i, form in enumerate(self.drawn)]
        return column_spec(figures, {"text": self.title, "subtitle": list(self.subtitle)} if self.title else None)


def ratios_file(label: str, candidates: Sequence[str]) -> str:
    """Of one of them."""
    return "ratios.png" if len(candidates) == 1 else f"{_word(label)}_ratios.png"


def timeline_file(label: str) -> str:
    return f"{_word(label)}_timeline.png"


def _word(label: str) -> str:
    """As part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", label).strip("-.") or "dataset"


def sweep_charts(comparison: SweepComparison) -> list[Chart]:
    """Returns the ratios of each dataset to the reference, and how the baseline of each held during its sweep."""
    charts: list[Chart] = []
    for label in comparison.candidates:
        matches = [match for match in comparison.matches if match.dataset == label]
        aggregates = [aggregate for aggregate in comparison.aggregates if aggregate.dataset == label]
        if matches:
            name = ratios_file(label, comparison.candidates)
            charts.append(Chart(name, [_ratio_dots(matches, aggregates, comparison)]))
    for dataset in comparison.datasets:
        drift = _drift(dataset)
        if drift:
            charts.append(Chart(timeline_file(dataset.label), [_drift_lines(dataset.label, drift)]))
    return charts


def _ratio_dots(matches: Sequence[Match], aggregates: Sequence[Aggregate], comparison: SweepComparison) -> Dots:
    """A row for each pass of an operator: a dot for each matching point, a tick for their mean."""
    label, reference = matches[0].dataset, comparison.reference
    dots: dict[str, list[Dot]] = defaultdict(list)
    for match in matches:
        key = match.ours.key
        row = _row(key.case(comparison.telling), key.tp_size, key.operator, key.pass_name)
        dots[row].append(Dot(match.ratio, colour=COLOURS[match.verdict]))
    rows = [(_row(one.case, one.tp_size, one.operator, one.pass_name), one.ratio) for one in aggregates]
    return Dots(
        title=f"{label} against {reference}",
        subtitle="a dot for each matching point; number: geometric mean",
        axis=Axis(f"time of {label} over {reference}: left is faster"),
        columns=[Column("mean")],
        rows=[
            DotRow(name=row, dots=[*dots[row], Dot(mean, colour="ink", shape="tick")], cells=[f"{mean:.3f}"])
            for row, mean in rows
        ],
        references=[Reference(1.0, f"{reference} = 1")],
        legend=[
            Key("faster", "good", shape="dot"),
            Key("slower", "bad", shape="dot"),
            Key("the same within the noise", "wait", shape="dot"),
            Key("geometric mean", "ink", shape="tick"),
        ],
    )


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


def _drift_lines(label: str, baselines: Sequence[_Baseline]) -> Lines:
    notable = [b for b in sorted(baselines, key=lambda b: -abs(b.change))[:3] if abs(b.change) >= NOTABLE_DRIFT]
    most = max(NOTABLE_DRIFT, *(abs(b.change) for b in baselines)) * 1.15
    points = [
        LinePoint(b.number, b.change, label=f"{b.name} {b.change:+.1%}" if b in notable else "") for b in baselines
    ]
    return Lines(
        title=f"{label}: how the baseline held",
        subtitle="A dot for each point: its operator without overlap, measured beside it. A trend is drift.",
        x=Axis("points in the order of measuring"),
        y=Axis("time without overlap, from its median", format="+.1%", domain=(-most, most)),
        lines=[Line("baseline", points, "series1", connected=False, label="")],
        levels=[Level("median", 0.0, "ink", width_px=1)],
    )


def trace_charts(comparison: TraceComparison) -> list[Chart]:
    """Returns the times of each dataset beside the reference's, and the iterations of each one by one."""
    charts: list[Chart] = []
    for label in comparison.candidates:
        quantities = [match for match in comparison.quantities if match.dataset == label and match.rank is None]
        name = ratios_file(label, comparison.candidates)
        charts.append(Chart(name, [_quantity_dots(quantities, label, comparison.reference)]))
    most_us = max(
        getattr(row, name)
        for dataset in comparison.datasets
        for file in dataset.files
        for row in file.rows
        if row.phase == "all"
        for name in LINES
    )
    for dataset in comparison.datasets:
        charts.append(Chart(timeline_file(dataset.label), [_iteration_lines(dataset, most_us)]))
    return charts


def _quantity_dots(quantities: Sequence[QuantityMatch], label: str, reference: str) -> Dots:
    """Returns for each phase the times of both, and their ratios."""
    found = {(match.phase, match.quantity): match for match in quantities}
    rows: list[DotRow] = []
    for phase in PHASES:
        of_phase = [
            (name, found[phase, quantity]) for quantity, name in QUANTITIES.items() if (phase, quantity) in found
        ]
        if of_phase:
            rows.append(DotRow(name=PHASE_NAMES[phase], bold=True))
        rows += [_quantity_row(name, match) for name, match in of_phase if match.value or match.reference_value]
    most_ms = max(dot.at for row in rows for dot in row.dots)
    return Dots(
        title=f"{label} against {reference}",
        subtitle="medians over iterations and ranks; number: ratio of the two",
        axis=Axis("ms", domain=(0.0, most_ms * 1.05)),
        columns=[Column("ratio")],
        rows=rows,
        legend=[
            Key(reference, "ink", shape="ring"),
            Key(f"{label}, better", "good", shape="dot"),
            Key(f"{label}, worse", "bad", shape="dot"),
            Key(f"{label}, the same", "wait", shape="dot"),
        ],
        connected=True,
    )


def _quantity_row(name: str, match: QuantityMatch) -> DotRow:
    ours, theirs = (match.value or 0.0) / 1000, (match.reference_value or 0.0) / 1000
    worse = ours > theirs if match.quantity != "overlap_us" else ours < theirs
    own = "wait" if ours == theirs else "bad" if worse else "good"
    ratio = "new" if math.isnan(match.ratio) else f"{match.ratio:.2f}x"
    dots = [Dot(theirs, colour="ink", shape="ring"), Dot(ours, colour=own)]
    return DotRow(name=name, dots=dots, cells=[ratio])


def _iteration_lines(dataset: TraceDataset, most_us: float) -> Lines:
    """Returns medians over the ranks, with their range."""
    by_turn: dict[int, list[Any]] = defaultdict(list)
    for file in dataset.files:
        for row in file.rows:
            if row.phase == "all":
                by_turn[row.iteration].append(row)
    numbers = sorted(by_turn)
    lines = []
    for quantity, (name, own) in LINES.items():
        times_ms = {number: [getattr(row, quantity) / 1000 for row in by_turn[number]] for number in numbers}
        points = [LinePoint(n, statistics.median(of), min(of), max(of)) for n, of in times_ms.items()]
        lines.append(Line(name, points, own))
    ranks = f"{len(dataset.files)} ranks: medians, and from the lowest to the highest" if len(dataset.files) > 1 else ""
    return Lines(
        title=f"{dataset.label}, iteration by iteration",
        subtitle=ranks,
        x=Axis("iteration"),
        y=Axis("ms, whole iteration", domain=(0.0, most_us / 1000 * 1.06)),
        lines=lines,
    )
