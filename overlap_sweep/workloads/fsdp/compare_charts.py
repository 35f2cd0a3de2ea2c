"""Charts of training runs: what each step's time went to, run by run, and the labels' steps beside each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from overlap_sweep.report.charts import Area, Axis, Event, Line, LinePoint, Lines
from overlap_sweep.report.charts.palette import SERIES
from overlap_sweep.report.comparison import Chart, timeline_file
from overlap_sweep.report.numbers import counted, shortened
from overlap_sweep.workloads.fsdp.compare import RunMatch, TelemetryComparison, TelemetryDataset
from overlap_sweep.workloads.fsdp.telemetry_steps import MeasuredRun, Series, series

MOST_POINTS = 720
"""Of a line: more steps are drawn as medians of several."""
MOST_PANELS = 30
MOST_NUMBERED_DIPS = 12
MOST_MARKED = 60
LONGEST_WORD = 60
LONGEST_RUN = 90

OVERLAY_FILE = "overlay.png"

LINES = {
    "step_ms": ("step, slowest rank", "ink"),
    "compute_ms": ("computation", "gemm"),
    "comm_ms": ("communication", "comm"),
    "hidden_comm_ms": ("overlapped", "series4"),
    "exposed_comm_ms": ("exposed", "bad"),
}
"""Of a timeline: name and colour by quantity."""
AREAS = ("hidden_comm_ms", "exposed_comm_ms")
"""Stacked they are the communication."""


class Drawn(NamedTuple):
    """One place of a line."""

    step: int
    part: int
    """Lines don't cross steps that were not recorded: they have parts."""
    values: dict[str, float]


def telemetry_charts(comparison: TelemetryComparison) -> list[Chart]:
    """A timeline of each label, and the labels' steps beside each other."""
    return [*map(_timeline, comparison.datasets), _overlay(comparison)]


def _timeline(dataset: TelemetryDataset) -> Chart:
    shown = dataset.runs[:MOST_PANELS]
    more = f" The first {len(shown)} of {len(dataset.runs)} runs." if len(shown) < len(dataset.runs) else ""
    return Chart(
        timeline_file(dataset.label),
        list(map(_run_lines, shown)),
        f"{_brief(dataset.label)}: what the time of each step went to",
        [
            "Mean over the ranks; the step itself: its slowest rank. Overlapped and exposed add up to communication.",
            f"Triangles: dips, much slower or less hidden than usual. Grey: warm-up, and what was profiled.{more}",
        ],
    )


def shortened_run(name: str) -> str:
    """Returns the name; what is too long loses its middle."""
    half = LONGEST_RUN // 2 - 2
    return name if len(name) <= LONGEST_RUN else f"{name[:half]}...{name[-half:]}"


def _run_lines(measured: MeasuredRun) -> Lines:
    selection = measured.selection
    numbers = sorted([*selection.warm_up, *selection.measured, *selection.profiled])
    left_out = {*selection.warm_up, *selection.profiled}
    drawn = list(_thinned(numbers, series(measured.run, numbers)))
    usual = {quantity: statistics.median(measured.steps[quantity].tolist()) for quantity in LINES}
    lines = [
        Line(
            of,
            [LinePoint(at.step, at.values[quantity], part=at.part) for at in drawn],
            own,
            shape="circle" if len(drawn) <= MOST_MARKED else "",
            label=f"{of} {_ms(usual[quantity])}",
            label_y=usual[quantity],
        )
        for quantity, (of, own) in LINES.items()
        if quantity not in AREAS
    ]
    stacked = {"exposed_comm_ms": (0.0, 0.75), "hidden_comm_ms": (usual["exposed_comm_ms"], 0.35)}
    areas = [
        Area(
            f"{LINES[quantity][0]} {_ms(usual[quantity])}",
            [_area_point(at, quantity) for at in drawn],
            LINES[quantity][1],
            opacity,
            below_ms + usual[quantity] / 2,
        )
        for quantity, (below_ms, opacity) in stacked.items()
    ]
    few = len(measured.dips) <= MOST_NUMBERED_DIPS
    return Lines(
        title=f"{shortened_run(measured.name)}: {counted(len(measured.run.ranks), 'rank')}, "
        f"{counted(len(selection.measured), 'step')}, {counted(len(measured.dips), 'dip')}",
        subtitle="",
        x=Axis("global step"),
        y=Axis("ms", domain=(0.0, max(float(measured.steps[quantity].max()) for quantity in LINES) * 1.12)),
        lines=lines,
        areas=areas,
        events=[Event(step, str(step) if few else "") for step in measured.dips],
        shaded=[
            (of_kind[0] - 0.5, of_kind[-1] + 0.5)
            for grey, group in groupby(numbers, key=lambda number: number in left_out)
            for of_kind in [list(group)]
            if grey
        ],
    )


def _area_point(at: Drawn, quantity: str) -> LinePoint:
    """Hidden communication is stacked on the exposed one."""
    low = at.values["exposed_comm_ms"] if quantity == "hidden_comm_ms" else 0.0
    high = low + at.values[quantity]
    return LinePoint(at.step, high, low, high, at.part)


def _overlay(comparison: TelemetryComparison) -> Chart:
    """For each run of the reference that others have: step times and hidden communication of all of them."""
    labels = [dataset.label for dataset in comparison.datasets]
    shades = {label: SERIES[i % len(SERIES)] for i, label in enumerate(labels)}
    groups: dict[str, list[RunMatch]] = {}
    for match in comparison.matches:
        groups.setdefault(match.theirs.name, []).append(match)
    shown = list(groups.values())[:MOST_PANELS]
    more = f"The first {len(shown)} of {len(groups)} runs. " if len(shown) < len(groups) else ""
    drawn = []
    for matches in shown:
        runs = {matches[0].reference: matches[0].theirs, **{match.dataset: match.ours for match in matches}}
        title = "; ".join(dict.fromkeys(shortened_run(run.name) for run in runs.values()))
        drawn.append(_beside(title, runs, "step_ms", Axis("step, ms", from_zero=True), shades))
        hidden = Axis("hidden communication", format=".0%", domain=(0.0, 1.0))
        drawn.append(_beside("", runs, "hidden_share", hidden, shades))
    return Chart(
        OVERLAY_FILE,
        drawn,
        f"{', '.join(_brief(label) for label in comparison.candidates)} against {_brief(comparison.reference)}",
        [f"{more}Steps of the slowest rank, and the hidden share of all ranks' communication; without warm-up."],
    )


def _beside(title: str, runs: Mapping[str, MeasuredRun], quantity: str, y: Axis, shades: Mapping[str, str]) -> Lines:
    lines = []
    for label, measured in runs.items():
        if quantity in measured.steps:
            drawn = _thinned(measured.selection.measured, {quantity: measured.steps[quantity]})
            # JSON has no NaN.
            known = [(at, at.values[quantity]) for at in drawn if not math.isnan(at.values[quantity])]
            points = [LinePoint(at.step, value, part=at.part) for at, value in known]
            usual = statistics.median(value for _, value in known) if known else None
            lines.append(Line(label, points, shades[label], shape="", label=_brief(label), label_y=usual))
    return Lines(title, "", Axis("global step"), y, lines)


def _thinned(numbers: Sequence[int], every: Series) -> Iterator[Drawn]:
    """Each step, or of many steps the medians of several neighbours under the first one's number."""
    width = math.ceil(len(numbers) / MOST_POINTS)
    gaps = [i for i in range(1, len(numbers)) if numbers[i] > numbers[i - 1] + 1]
    for part, (first, end) in enumerate(pairwise([0, *gaps, len(numbers)])):
        for start in range(first, end, width):
            chosen = slice(start, min(start + width, end))
            yield Drawn(numbers[start], part, {name: float(np.median(of[chosen])) for name, of in every.items()})


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _brief(label: str) -> str:
    return shortened(label, LONGEST_WORD)
