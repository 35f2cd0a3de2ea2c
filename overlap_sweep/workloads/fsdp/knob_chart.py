"""What each knob of a training step contributed: every change of one, with all others alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_sweep.report.page.chart_parts import Align, drawn_from, header, row_axis, tooltip
from overlap_sweep.report.page.figures import Figure, figure
from overlap_sweep.report.page.palette import colour
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis
from overlap_sweep.workloads.fsdp.knob_effects import KnobContribution, contributed

if TYPE_CHECKING:
    import altair as alt

ROW_PX = 26
MOST_BARS = 40


@dataclass(frozen=True)
class KnobBar:
    """Changes are in percent of the time that a sample takes; negative is faster."""

    name: str
    change: float
    low: float
    high: float
    """With the noise, over all pairs."""
    beside: float | None
    """With the other knobs as in the best setting."""
    sure: bool
    """Whether it is more than noise."""
    taken: bool
    change_text: str
    range_text: str
    pairs_text: str
    beside_text: str


@dataclass(frozen=True)
class KnobPanel:
    title: str
    subtitle: str
    bars: list[KnobBar]


def knobs_figure(analysis: TrainingAnalysis, name: str) -> Figure:
    """Draws what each knob contributed: two settings must differ in one knob alone."""
    panel = knob_panel(analysis)
    return figure(name, describe(panel), panel, chart)


def knob_panel(analysis: TrainingAnalysis) -> KnobPanel:
    bars = [_bar(contribution) for contribution in contributed(analysis).contributions[:MOST_BARS]]
    subtitle = "change of the time that a sample takes; whiskers are all pairs and their noise, dots the best's"
    return KnobPanel(f"What each knob contributed: {analysis.case.brief}", subtitle, bars)


def describe(panel: KnobPanel) -> str:
    said = (f"{bar.name} {bar.change_text}" for bar in panel.bars)
    return f"{panel.title}: {'; '.join(said)}."


def _bar(contribution: KnobContribution) -> KnobBar:
    low, high = contribution.range
    beside = contribution.beside_best
    return KnobBar(
        name=f"{contribution.name} {contribution.what}",
        change=100 * contribution.change,
        low=100 * (low - contribution.noise),
        high=100 * (high + contribution.noise),
        beside=100 * beside.change if beside else None,
        sure=contribution.sure,
        taken=contribution.taken and beside is not None,
        change_text=contribution.change_text,
        range_text=contribution.range_text or "one pair",
        pairs_text=str(len(contribution.effects)),
        beside_text=contribution.beside_text or "-",
    )


def chart(panel: KnobPanel) -> alt.TopLevelMixin:
    import altair as alt

    base = drawn_from(panel.bars)
    low, high = min(0.0, *(bar.low for bar in panel.bars)), max(0.0, *(bar.high for bar in panel.bars))
    margin = 0.06 * (high - low) or 1.0
    scale = alt.Scale(domain=[low - margin, high + margin], nice=False)
    label = "(datum.value ? format(datum.value, '+') : '0') + ' %'"
    x_axis = alt.Axis(labelExpr=label, tickCount=6, domain=False, ticks=False)
    y = alt.Y("name:N", sort=[bar.name for bar in panel.bars], title=None, axis=row_axis(400))
    told = tooltip(
        {
            "name": "knob",
            "change_text": "time of a sample",
            "range_text": "over the pairs",
            "pairs_text": "pairs",
            "beside_text": "beside the best",
        }
    )

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=None, axis=x_axis, scale=scale)

    def column(field: str, dx: int, align: Align) -> alt.Chart:
        mark = base.mark_text(align=align, dx=dx, fontSize=12, fontWeight=alt.ExprRef("datum.taken ? 700 : 400"))
        return mark.encode(x=alt.value("width"), y=y, text=f"{field}:N", tooltip=told)

    by_sign = (
        alt.when("!datum.sure")
        .then(alt.value(colour("wait")))
        .when("datum.change > 0")
        .then(alt.value(colour("bad")))
        .otherwise(alt.value(colour("good")))
    )
    layers = [
        base.mark_bar(height=11).encode(x=x("change"), x2=alt.datum(0), y=y, color=by_sign, tooltip=told),
        drawn_from([{"at": 0}]).mark_rule(color=colour("ink")).encode(x=x("at")),
        base.mark_rule(color=colour("ink"), strokeWidth=1.2).encode(x=x("low"), x2="high:Q", y=y, tooltip=told),
        base.transform_filter("datum.beside !== null")
        .mark_point(filled=True, size=46, opacity=1, color=colour("ink"))
        .encode(x=x("beside"), y=y, tooltip=told),
        header("time", alt.value("width"), 60, "right"),
        header("beside the best", alt.value("width"), 174, "right"),
        column("change_text", 60, "right"),
        column("beside_text", 174, "right"),
    ]
    title = alt.TitleParams(panel.title, subtitle=panel.subtitle, offset=22)
    return alt.layer(*layers).properties(width="container", height=ROW_PX * len(panel.bars), title=title)
