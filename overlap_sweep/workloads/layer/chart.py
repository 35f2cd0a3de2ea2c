"""The variants of a whole layer: by how much each is faster or slower than the reference, with its interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_sweep.overlap.variants import FLOOR
from overlap_sweep.report.numbers import as_ms, as_percent
from overlap_sweep.report.page.chart_parts import Align, drawn_from, header, row_axis, tooltip
from overlap_sweep.report.page.figures import Figure, figure
from overlap_sweep.report.page.palette import colour
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.workloads.layer.answer import LayerAnalysis, VariantRow

if TYPE_CHECKING:
    import altair as alt

ROW_PX = 30


@dataclass(frozen=True)
class VariantBar:
    """Changes are in percent of the reference's time, negative is faster."""

    name: str
    change: float
    low: float
    high: float
    best: bool
    floor: bool
    time_text: str
    change_text: str
    passes_text: str
    hidden_text: str


@dataclass(frozen=True)
class LayerPanel:
    title: str
    subtitle: str
    reference: str
    bars: list[VariantBar]
    """From fast to slow."""


def layer_figure(layer: LayerAnalysis, name: str) -> Figure:
    """Returns the variants as bars, under that name."""
    panel = layer_panel(_heading(layer), layer, layer.winner.name if layer.winner else None)
    return figure(name, describe(panel), panel, chart)


def timeline_figure(layer: LayerAnalysis, name: str) -> Figure | None:
    """Returns the timeline of the fastest variant above that of the reference; None where it was not traced."""
    from overlap_sweep.report.page import timeline

    best = layer.winner or next(iter(layer.contenders), None)
    if best is None:
        return None
    variants = ((layer.reference, layer.reference), (best.label, best.name))
    panel = timeline.layer_timeline(name, _heading(layer), layer.point, variants)
    return figure(name, timeline.describe(panel), panel, timeline.chart) if panel else None


def _heading(layer: LayerAnalysis) -> str:
    config = layer.point.config
    return f"{config['layer']['kind']}, TP={config['tp_size']}"


def layer_panel(title: str, layer: LayerAnalysis, best: str | None) -> LayerPanel:
    """`best` is the variant to mark."""
    reference = layer.reference
    bars = [_bar(row, best) for row in layer.rows]
    interval = f", {CONFIDENCE:.0%} intervals" if len(bars) > 1 else ""
    return LayerPanel(
        title,
        f"change of the whole time against {reference} in the same round; median of {layer.rounds} rounds{interval}",
        reference,
        sorted(bars, key=lambda bar: bar.change),
    )


def describe(panel: LayerPanel) -> str:
    return f"{panel.title}: {'; '.join(f'{bar.name} {bar.time_text}, {bar.change_text}' for bar in panel.bars)}."


def _bar(row: VariantRow, best: str | None) -> VariantBar:
    change, low, high = (100 * (ratio - 1) for ratio in (row.ratio, row.interval.low, row.interval.high))
    is_reference, is_floor = row.name == row.reference, row.name == FLOOR
    notes = [*(["GEMMs alone"] if is_floor else []), *(["launch-bound"] if row.launch_bound else [])]
    return VariantBar(
        name=f"{row.label} ({', '.join(notes)})" if notes else row.label,
        change=change,
        low=low,
        high=high,
        best=row.name == best,
        floor=is_floor,
        time_text=f"{as_ms(row.all_us)} ms",
        change_text="reference" if is_reference else f"{change:+.1f} % [{low:+.1f}, {high:+.1f}]",
        passes_text=f"forward {as_ms(row.fwd_us)} ms, backward {as_ms(row.bwd_us)} ms",
        hidden_text=as_percent(row.hidden_fraction),
    )


def chart(panel: LayerPanel) -> alt.TopLevelMixin:
    import altair as alt

    base = drawn_from(panel.bars)
    low = min([0.0, *(bar.low for bar in panel.bars)])
    high = max([0.0, *(bar.high for bar in panel.bars)])
    margin = 0.08 * (high - low) or 1.0
    scale = alt.Scale(domain=[low - (margin if low < 0 else 0.2 * margin), high + margin], nice=False)
    label = "(datum.value ? format(datum.value, '+') : '0') + ' %'"
    x_axis = alt.Axis(labelExpr=label, tickCount=6, domain=False, ticks=False)
    names = [bar.name for bar in panel.bars]
    y = alt.Y("name:N", sort=names, title=None, axis=row_axis(260), scale=alt.Scale(padding=0.15))
    told = tooltip(
        {
            "name": "variant",
            "time_text": "time",
            "passes_text": "of it",
            "change_text": f"against {panel.reference}",
            "hidden_text": "hidden",
        }
    )

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=None, axis=x_axis, scale=scale)

    def column(field: str, dx: int, align: Align) -> alt.Chart:
        bold = alt.ExprRef("datum.best ? 700 : 400")
        mark = base.mark_text(align=align, dx=dx, fontSize=12, fontWeight=bold)
        return mark.encode(x=alt.value("width"), y=y, text=f"{field}:N", tooltip=told)

    by_role = (
        alt.when("datum.floor")
        .then(alt.value(colour("wait")))
        .when("datum.best")
        .then(alt.value(colour("good")))
        .when("datum.change > 0")
        .then(alt.value(colour("bad")))
        .otherwise(alt.value(colour("accent")))
    )
    layers = [
        base.mark_bar(height=13).encode(x=x("change"), x2=alt.datum(0), y=y, color=by_role, tooltip=told),
        drawn_from([{"at": 0}]).mark_rule(color=colour("ink")).encode(x=x("at")),
        base.mark_rule(color=colour("ink"), strokeWidth=1.5).encode(x=x("low"), x2="high:Q", y=y, tooltip=told),
        *(
            base.mark_tick(color=colour("ink"), thickness=1.5, size=8, orient="vertical").encode(x=x(end), y=y)
            for end in ("low", "high")
        ),
        header(f"faster than {panel.reference}", alt.XDatum(0), -8, "right"),
        *([header("slower", alt.XDatum(0), 8, "left")] if high > 0.25 * (high - low) else []),
        header("time", alt.value("width"), 84, "right"),
        header("change [interval]", alt.value("width"), 98, "left"),
        column("time_text", 84, "right"),
        column("change_text", 98, "left"),
    ]
    title = alt.TitleParams(panel.title, subtitle=panel.subtitle, offset=26)
    return alt.layer(*layers).properties(width="container", height=ROW_PX * len(panel.bars), title=title)
