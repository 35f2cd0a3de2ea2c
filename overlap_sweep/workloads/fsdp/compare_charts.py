"""Charts of training runs: what each step's time went to, run by run, and the labels' steps beside each other."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from overlap_sweep.compare.charts import Chart, timeline_file
from overlap_sweep.compare.tables import counted
from overlap_sweep.report.page.label_places import spread
from overlap_sweep.report.page.palette import SERIES, colour
from overlap_sweep.workloads.fsdp.compare import MeasuredRun, RunMatch, TelemetryComparison, TelemetryDataset
from overlap_sweep.workloads.fsdp.telemetry_steps import Series, series

if TYPE_CHECKING:
    import altair as alt

WIDTH_PX = 720
PANEL_HEIGHT_PX = 210
OVERLAY_HEIGHT_PX = 150
LABEL_GAP_PX = 14.0

MOST_POINTS = 720
"""Of a line: more steps are drawn as medians of several."""
MOST_PANELS = 30
MOST_NUMBERED_DIPS = 12
LONGEST_WORD = 60
LONGEST_RUN = 90
LONGEST_FILE_WORD = 120

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

_SETTING = re.compile(r"_(?=[a-z]+\.|(?:profile|repetition)=)")
"""Between the settings in a run directory's name."""
_CUT_NAME = re.compile(r"_[0-9a-f]{8}$")


class Drawn(NamedTuple):
    """One place of a line."""

    step: int
    part: int
    """Lines don't cross steps that were not recorded: they have parts."""
    values: dict[str, float]


def telemetry_charts(comparison: TelemetryComparison) -> list[Chart]:
    """A timeline of each label, and the labels' steps beside each other."""
    files = timeline_files([dataset.label for dataset in comparison.datasets])
    charts = [Chart(files[dataset.label], _timeline(dataset)) for dataset in comparison.datasets]
    return [*charts, Chart(OVERLAY_FILE, _overlay(comparison))]


def timeline_files(labels: Sequence[str]) -> dict[str, str]:
    """`<label>_timeline.png`, with a number where labels differ only in what no file's name should have."""
    found: dict[str, str] = {}
    for label in labels:
        plain = timeline_file(label[:LONGEST_FILE_WORD])
        taken = {name.lower() for name in found.values()}
        names = [plain, *(plain.replace("_timeline.png", f"-{i}_timeline.png") for i in range(2, len(labels) + 1))]
        found[label] = next(name for name in names if name.lower() not in taken)
    return found


def _timeline(dataset: TelemetryDataset) -> dict[str, Any]:
    import altair as alt

    shown = dataset.runs[:MOST_PANELS]
    more = f" The first {len(shown)} of {len(dataset.runs)} runs." if len(shown) < len(dataset.runs) else ""
    title = alt.TitleParams(
        f"{_shortened(dataset.label)}: what the time of each step went to",
        subtitle=[
            "Mean over the ranks; the step itself: its slowest rank. Overlapped and exposed add up to communication.",
            f"Triangles: dips, much slower or less hidden than usual. Grey: warm-up, and what was profiled.{more}",
        ],
    )
    names = distinct_names([measured.name for measured in shown])
    panels = [_panel(measured, name) for measured, name in zip(shown, names, strict=True)]
    return alt.vconcat(*panels, spacing=22).properties(title=title).to_dict(validate=False)


def distinct_names(runs: Sequence[str]) -> list[str]:
    """Without the settings that all of several have: `fsdp.forward_prefetch=1` of `model_dp2_fsdp.forward_prefetch=1`.
    What is still too long loses its middle."""
    words = {run: _SETTING.split(run) for run in runs}
    # Long names end in a hash instead of their last settings.
    whole = [set(of_run) for run, of_run in words.items() if not _CUT_NAME.search(run)]
    common = set.intersection(*whole) if len(whole) > 1 else set()
    names = [" ".join(word for word in words[run] if word not in common) or run for run in runs]
    if len(set(names)) < len(words):
        names = list(runs)
    half = LONGEST_RUN // 2 - 2
    return [name if len(name) <= LONGEST_RUN else f"{name[:half]}...{name[-half:]}" for name in names]


def _panel(measured: MeasuredRun, name: str) -> alt.LayerChart | alt.FacetChart:
    import altair as alt

    selection = measured.selection
    numbers = sorted([*selection.warm_up, *selection.measured, *selection.profiled])
    every = series(measured.run, numbers)
    high_ms = max(float(measured.steps[name].max()) for name in LINES) * 1.12
    points = list(_thinned(numbers, every))
    values = [
        {"step": at.step, "name": name, "ms": at.values[quantity], "colour": colour(shade), "part": at.part}
        for at in points
        for quantity, (name, shade) in LINES.items()
        if quantity not in AREAS
    ]
    areas = [
        {
            "step": at.step,
            "part": at.part,
            "name": LINES[quantity][0],
            "colour": colour(LINES[quantity][1]),
            "opacity": opacity,
            "low": low,
            "high": high,
        }
        for at in points
        for quantity, opacity, low, high in (
            ("exposed_comm_ms", 0.75, 0.0, at.values["exposed_comm_ms"]),
            ("hidden_comm_ms", 0.35, at.values["exposed_comm_ms"], at.values["comm_ms"]),
        )
    ]
    x = _x(numbers)
    scale = alt.Scale(domain=[0, high_ms], nice=False)
    own = alt.Color("colour:N", scale=None)
    data = alt.Chart(alt.InlineData(values=values))
    layers: list[Any] = [
        _left_out(measured, numbers, scale, high_ms),
        alt.Chart(alt.InlineData(values=areas))
        .mark_area(clip=True)
        .encode(
            x=x,
            y=alt.Y("low:Q", scale=scale, title="ms"),
            y2="high:Q",
            color=own,
            detail=["name:N", "part:N"],
            opacity=alt.Opacity("opacity:Q", scale=None),
        ),
        data.mark_line(strokeWidth=1.7, clip=True).encode(
            x=x, y=alt.Y("ms:Q", scale=scale), color=own, detail=["name:N", "part:N"]
        ),
        *_dips(measured, x, scale, high_ms),
        _end_labels(measured, scale, high_ms),
    ]
    if len(points) <= 60:
        layers.append(data.mark_point(filled=True, size=22, opacity=1, clip=True).encode(x=x, y="ms:Q", color=own))
    title = alt.TitleParams(
        f"{name}: {counted(len(measured.run.ranks), 'rank')}, "
        f"{counted(len(selection.measured), 'step')}, {counted(len(measured.dips), 'dip')}",
        fontSize=11.5,
        offset=6,
    )
    return alt.layer(*layers).properties(width=WIDTH_PX, height=PANEL_HEIGHT_PX, title=title)


def _x(numbers: Sequence[int], field: str = "step:Q") -> alt.X:
    import altair as alt

    ticks = numbers if len(numbers) <= 20 else alt.Undefined
    return alt.X(
        field,
        title="global step",
        axis=alt.Axis(values=ticks, format="d", grid=False, tickMinStep=1),
        scale=alt.Scale(domain=[numbers[0] - 0.5, numbers[-1] + 0.5], nice=False),
    )


def _left_out(measured: MeasuredRun, numbers: Sequence[int], scale: alt.Scale, high_ms: float) -> alt.Chart:
    """Grey behind the warm-up and the profiler's steps."""
    import altair as alt

    left_out = {*measured.selection.warm_up, *measured.selection.profiled}
    rows = []
    for grey, group in groupby(numbers, key=lambda number: number in left_out):
        of_kind = list(group)
        if grey:
            rows.append({"from": of_kind[0] - 0.5, "to": of_kind[-1] + 0.5, "low": 0, "high": high_ms})
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_rect(color=colour("faint"), clip=True)
        .encode(x=_x(numbers, "from:Q"), x2="to:Q", y=alt.Y("low:Q", scale=scale, title="ms"), y2="high:Q")
    )


def _dips(measured: MeasuredRun, x: alt.X, scale: alt.Scale, high_ms: float) -> list[Any]:
    """A triangle at the top, and a line down; with the steps' numbers, where there are few of them."""
    import altair as alt

    rows = [{"step": step, "high": high_ms * 0.965} for step in measured.dips]
    if not rows:
        return []
    high = alt.Y("high:Q", scale=scale)
    data = alt.Chart(alt.InlineData(values=rows))
    layers: list[Any] = [
        data.mark_rule(color=colour("bad"), strokeDash=[2, 3], strokeWidth=1, opacity=0.8).encode(x=x, y=high),
        data.mark_point(shape="triangle-down", size=64, color=colour("bad"), opacity=1, filled=True).encode(
            x=x, y=high
        ),
    ]
    if len(rows) <= MOST_NUMBERED_DIPS:
        label = data.mark_text(align="left", dx=7, color=colour("bad"), fontSize=10)
        layers.append(label.encode(x=x, y=high, text="step:N"))
    return layers


def _end_labels(measured: MeasuredRun, scale: alt.Scale, high_ms: float) -> alt.Chart:
    """Right of the plot, each where its line runs in the median, areas in their middle."""
    import altair as alt

    usual = {name: statistics.median(measured.steps[name].tolist()) for name in LINES}
    wanted = {name: usual[name] for name in LINES if name not in AREAS}
    wanted["exposed_comm_ms"] = usual["exposed_comm_ms"] / 2
    wanted["hidden_comm_ms"] = (usual["exposed_comm_ms"] + usual["comm_ms"]) / 2
    places = spread(list(wanted.values()), LABEL_GAP_PX * high_ms / PANEL_HEIGHT_PX, 0.0, high_ms)
    labels = [
        {"text": f"{LINES[name][0]} {_ms(usual[name])}", "colour": colour(LINES[name][1]), "place": place}
        for name, place in zip(wanted, places, strict=True)
    ]
    return (
        alt.Chart(alt.InlineData(values=labels))
        .mark_text(align="left", dx=8)
        .encode(
            x=alt.value(WIDTH_PX),
            y=alt.Y("place:Q", scale=scale),
            text="text:N",
            color=alt.Color("colour:N", scale=None),
        )
    )


def _overlay(comparison: TelemetryComparison) -> dict[str, Any]:
    """For each run of the reference that others have: step times and hidden communication of all of them."""
    import altair as alt

    labels = [dataset.label for dataset in comparison.datasets]
    shades = {label: colour(SERIES[i % len(SERIES)]) for i, label in enumerate(labels)}
    groups: dict[str, list[RunMatch]] = {}
    for match in comparison.matches:
        groups.setdefault(match.theirs.name, []).append(match)
    shown = list(groups.values())[:MOST_PANELS]
    more = f"The first {len(shown)} of {len(groups)} runs. " if len(shown) < len(groups) else ""
    panels = []
    for matches, name in zip(shown, _titles(shown), strict=True):
        runs = [(matches[0].reference, matches[0].theirs), *((match.dataset, match.ours) for match in matches)]
        panel_title = alt.TitleParams(name, fontSize=11.5, offset=6)
        step = _beside(runs, "step_ms", 1.0, "step, ms", shades).properties(title=panel_title)
        hidden = _beside(runs, "hidden_share", 100.0, "hidden communication, %", shades)
        panels.append(alt.vconcat(step, hidden, spacing=8))
    title = alt.TitleParams(
        f"{', '.join(_shortened(label) for label in comparison.candidates)} against {_shortened(comparison.reference)}",
        subtitle=f"{more}Steps of the slowest rank, and the hidden share of all ranks' communication; without warm-up.",
    )
    return alt.vconcat(*panels, spacing=22).properties(title=title).to_dict(validate=False)


def _titles(groups: Sequence[Sequence[RunMatch]]) -> list[list[str]]:
    """Of each group of matches the run, or where labels have runs of different names each of them in a line."""
    titles = []
    for matches, common in zip(groups, distinct_names([of[0].theirs.name for of in groups]), strict=True):
        runs = {matches[0].reference: matches[0].theirs.name, **{one.dataset: one.ours.name for one in matches}}
        if len(set(runs.values())) == 1:
            titles.append([common])
        else:
            names = distinct_names(list(runs.values()))
            titles.append([f"{_shortened(label)}: {name}" for label, name in zip(runs, names, strict=True)])
    return titles


def _beside(
    runs: Sequence[tuple[str, MeasuredRun]], quantity: str, factor: float, name: str, shades: dict[str, str]
) -> alt.LayerChart | alt.FacetChart:
    import altair as alt

    values: list[dict[str, Any]] = []
    for label, measured in runs:
        if quantity in measured.steps:
            for at in _thinned(measured.selection.measured, {quantity: measured.steps[quantity]}):
                value = at.values[quantity] * factor
                # JSON has no NaN.
                if not math.isnan(value):
                    row = {"step": at.step, "part": at.part, "label": label, "value": value, "colour": shades[label]}
                    values.append(row)
    high = 100.0 if quantity == "hidden_share" else max((row["value"] for row in values), default=1.0) * 1.08
    numbers = sorted({number for _, measured in runs for number in measured.selection.measured})
    scale = alt.Scale(domain=[0, high], nice=False)
    own = alt.Color("colour:N", scale=None)
    data = alt.Chart(alt.InlineData(values=values))
    ends = [
        {"text": _shortened(label), "colour": shades[label], "wanted": statistics.median(of_label)}
        for label, _ in runs
        if (of_label := [row["value"] for row in values if row["label"] == label])
    ]
    places = spread([end["wanted"] for end in ends], LABEL_GAP_PX * high / OVERLAY_HEIGHT_PX, 0.0, high)
    labels = [{**end, "place": place} for end, place in zip(ends, places, strict=True)]
    layers = [
        data.mark_line(strokeWidth=1.7).encode(
            x=_x(numbers), y=alt.Y("value:Q", scale=scale, title=name), color=own, detail=["label:N", "part:N"]
        ),
        alt.Chart(alt.InlineData(values=labels))
        .mark_text(align="left", dx=8)
        .encode(x=alt.value(WIDTH_PX), y=alt.Y("place:Q", scale=scale), text="text:N", color=own),
    ]
    return alt.layer(*layers).properties(width=WIDTH_PX, height=OVERLAY_HEIGHT_PX)


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


def _shortened(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..."
