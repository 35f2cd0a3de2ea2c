"""The losses of all that trained one model, over the steps: curves of the same data lie on each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from overlap_sweep.report.page.chart_parts import drawn_from, tooltip
from overlap_sweep.report.page.palette import SERIES, colour
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis, losses_in_words
from overlap_sweep.workloads.tp_training.config import IMPLEMENTATIONS
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow

if TYPE_CHECKING:
    import altair as alt

HEIGHT_PX = 220
LEGEND_ROW_PX = 16
MOST_CURVES = 10
"""As many as can be told apart; who deviates is among them."""
MOST_POINTS = 400
"""Of a curve: more than a chart has pixels for."""
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_WIDEST_PX = 8.0
_NARROWEST_PX = 1.6
_COLOURS: Mapping[str, str] = dict(zip(IMPLEMENTATIONS, SERIES, strict=False))
_MORE_COLOURS = SERIES[len(IMPLEMENTATIONS) :]


@dataclass(frozen=True)
class CurvePoint:
    name: str
    step: int
    loss: float
    loss_text: str
    step_text: str


@dataclass(frozen=True)
class Look:
    """Of a curve. Those below are wider, so that of several that lie on each other all are seen."""

    name: str
    colour: str
    dash: Sequence[int]
    width_px: float


@dataclass(frozen=True)
class CurvesPanel:
    title: str
    subtitle: str
    points: list[CurvePoint]
    looks: list[Look]
    """From the lowest to the topmost."""


def curves_panel(analysis: TpTrainingAnalysis) -> CurvesPanel:
    rows = [row for row in analysis.rows if row.deviates]
    rows = (rows + [row for row in analysis.rows if not row.deviates])[:MOST_CURVES]
    rows = [row for row in analysis.rows if any(row is one for one in rows)]
    left_out = f"; {len(rows)} of {len(analysis.rows)} are drawn" if len(rows) < len(analysis.rows) else ""
    said = losses_in_words(analysis)
    return CurvesPanel(
        title=f"Losses, {analysis.case.brief}",
        subtitle=f"{'; '.join(said) or 'mean over all tokens'}{left_out}",
        points=[point for row in rows for point in _points(row)],
        looks=_looks(rows),
    )


def describe(panel: CurvesPanel) -> str:
    last = {point.name: point for point in panel.points}
    said = (f"{name} {point.loss_text} at {point.step_text}" for name, point in last.items())
    return f"{panel.title}: {panel.subtitle}. {'; '.join(said)}."


def _points(row: TpTrainingRow) -> list[CurvePoint]:
    steps = [step for step in row.run.steps if step.loss is not None]
    every = -(-len(steps) // MOST_POINTS)
    return [
        CurvePoint(row.name, step.step, step.loss, f"{step.loss:.6g}", f"step {step.step}")
        for i, step in enumerate(steps)
        if step.loss is not None and (i % every == 0 or i == len(steps) - 1)
    ]


def _looks(rows: Sequence[TpTrainingRow]) -> list[Look]:
    """The implementation's colour, another for more settings of it; a dash for each of several data. Of the same data
    from wide to narrow."""
    looks: list[Look] = []
    dp_sizes = sorted({row.grid.dp_size for row in rows})
    for dp_size, dash in zip(dp_sizes, cycle(_DASHES), strict=False):
        of_size = [row for row in rows if row.grid.dp_size == dp_size]
        more = cycle(_MORE_COLOURS)
        used: set[str] = set()
        for i, row in enumerate(of_size):
            own = _COLOURS[row.impl]
            width_px = _NARROWEST_PX + (_WIDEST_PX - _NARROWEST_PX) * (1 - (i + 1) / len(of_size))
            looks.append(Look(row.name, next(more) if own in used else own, dash, round(width_px, 2)))
            used.add(own)
    return looks


def chart(panel: CurvesPanel) -> alt.TopLevelMixin:
    import altair as alt

    losses = [point.loss for point in panel.points] or [0.0, 1.0]
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.01 * abs(high) or 1.0
    y_scale = alt.Scale(domain=[low - margin, high + margin], nice=False)
    y_axis = alt.Axis(tickCount=5, format=".4~g", domain=False, ticks=False, minExtent=38)
    x_scale = alt.Scale(nice=False, zero=False)
    x_axis = alt.Axis(tickMinStep=1, format="d", grid=False, tickSize=4)
    told = tooltip({"name": "setting", "step_text": "at", "loss_text": "loss"})
    layers: list[alt.Chart] = []
    for look in panel.looks:
        drawn = drawn_from(point for point in panel.points if point.name == look.name)
        x = alt.X("step:Q", title="step", scale=x_scale, axis=x_axis)
        y = alt.Y("loss:Q", title="loss", scale=y_scale, axis=y_axis)
        line = drawn.mark_line(color=colour(look.colour), strokeWidth=look.width_px, strokeDash=look.dash)
        layers.append(line.encode(x=x, y=y))
        layers.append(drawn.mark_point(size=60, opacity=0, filled=True).encode(x=x, y=y, tooltip=told))
    layers += _legend(panel.looks)
    title = alt.TitleParams(panel.title, subtitle=panel.subtitle, offset=10)
    return alt.layer(*layers).properties(width="container", height=HEIGHT_PX, title=title)


def _legend(looks: Sequence[Look]) -> list[alt.Chart]:
    """Above the plot, a line for each, as narrow as the page may be."""
    import altair as alt

    drawn = []
    for i, look in enumerate(looks):
        at = alt.value(-LEGEND_ROW_PX * (len(looks) - i))
        rule = drawn_from([{}]).mark_rule(color=colour(look.colour), strokeWidth=look.width_px, strokeDash=look.dash)
        text = drawn_from([{}]).mark_text(align="left", color=colour("muted"))
        drawn.append(rule.encode(x=alt.value(0), x2=alt.value(26), y=at))
        drawn.append(text.encode(x=alt.value(33), y=at, text=alt.value(look.name)))
    return drawn
