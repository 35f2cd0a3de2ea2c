"""A kernel at a single m: every implementation, from fast to slow, by its distance to what no overlap can beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_sweep.overlap.kernel_shape import SEQUENTIAL
from overlap_sweep.report.page.chart_parts import Align, drawn_from, header, row_axis, tooltip
from overlap_sweep.report.page.log_ticks import LOGARITHMIC_FROM
from overlap_sweep.report.page.palette import colour
from overlap_sweep.workloads.kernel.answer import ImplementationRow, KernelAnalysis, ShapeAnalysis, answers_in_words
from overlap_sweep.workloads.kernel.chart import TOLD, Drawn, binding_in_words, drawn, heading

if TYPE_CHECKING:
    import altair as alt

ROW_PX = 22


@dataclass(frozen=True)
class KernelDot(Drawn):
    name: str
    colour: str
    filled: bool
    """Whether it can be an answer."""
    note: str


@dataclass(frozen=True)
class DotsPanel:
    title: str
    subtitle: str
    binding: str
    dots: list[KernelDot]
    """From fast to slow."""
    logarithmic: bool


def dots_panel(analysis: KernelAnalysis) -> DotsPanel:
    """Of the only m."""
    (shape,) = analysis.shapes
    rows = sorted([shape.sequential, *shape.implementations], key=lambda row: row.time_us)
    dots = [_dot(row, shape) for row in rows]
    return DotsPanel(
        heading(analysis),
        answers_in_words(analysis),
        binding_in_words(shape),
        dots,
        logarithmic=max(dot.high for dot in dots) > LOGARITHMIC_FROM * min(1.0, *(dot.low for dot in dots)),
    )


def describe(panel: DotsPanel) -> str:
    said = (f"{dot.name} {dot.time_text}, {dot.over_text} the bound" for dot in panel.dots)
    return f"Time over the bound, {panel.title}: {panel.subtitle}. {'; '.join(said)}."


def _dot(row: ImplementationRow, shape: ShapeAnalysis) -> KernelDot:
    usable = row.name == SEQUENTIAL or row in shape.contenders
    of_role = "good" if row.chosen else "muted" if row.name == SEQUENTIAL or not usable else "accent"
    return KernelDot(
        name=row.label,
        note=row.note,
        colour=colour(of_role),
        filled=usable,
        **drawn(row, shape),
    )


def chart(panel: DotsPanel) -> alt.TopLevelMixin:
    import altair as alt

    base = drawn_from(panel.dots)
    low, high = min(1.0, *(dot.low for dot in panel.dots)), max(1.0, *(dot.high for dot in panel.dots))
    margin = 0.05 * (high - low) or 0.05
    domain = [low / 1.1, high * 1.1] if panel.logarithmic else [low - margin, high + margin]
    # Vega warns of a logarithmic scale that is told about zero.
    scale = (
        alt.Scale(domain=domain, type="log", nice=False)
        if panel.logarithmic
        else alt.Scale(domain=domain, nice=False, zero=False)
    )
    x_axis = alt.Axis(format=".3~g", tickCount=6, domain=False, ticks=False)
    x_title = "time / bound, logarithmic" if panel.logarithmic else "time / bound"
    y = alt.Y("name:N", sort=[dot.name for dot in panel.dots], title=None, axis=row_axis(300))
    own = alt.Color("colour:N", scale=None)
    middle = (low * high) ** 0.5 if panel.logarithmic else (low + high) / 2
    # Where there is room.
    sides: tuple[tuple[str, Align, int, str], ...] = (("<=", "left", 7, "high"), (">", "right", -7, "low"))
    told = tooltip(TOLD)

    def x(field: str = "ratio") -> alt.X:
        return alt.X(f"{field}:Q", title=x_title, axis=x_axis, scale=scale)

    def column(field: str, dx: int, align: Align) -> alt.Chart:
        bold = alt.ExprRef("datum.chosen ? 700 : 400")
        mark = base.mark_text(align=align, dx=dx, fontSize=12, fontWeight=bold)
        return mark.encode(x=alt.value("width"), y=y, text=f"{field}:N", tooltip=told)

    layers = [
        drawn_from([{"ratio": 1.0}]).mark_rule(color=colour("ink")).encode(x=x()),
        base.mark_rule(strokeWidth=1.5).encode(x=x("low"), x2="high:Q", y=y, color=own),
        base.transform_filter("datum.filled")
        .mark_point(filled=True, size=70, opacity=1)
        .encode(x=x(), y=y, color=own, tooltip=told),
        base.transform_filter("!datum.filled")
        .mark_point(size=60, strokeWidth=1.8, opacity=1)
        .encode(x=x(), y=y, color=own, tooltip=told),
        *(
            base.transform_filter(f"datum.ratio {where} {middle}")
            .mark_text(align=align, dx=dx, fontSize=10, color=colour("muted"))
            .encode(x=x(end), y=y, text="note:N", tooltip=told)
            for where, align, dx, end in sides
        ),
        header(f"the bound ({panel.binding})", alt.XDatum(1.0), 0, "left"),
        header("time, noise", alt.value("width"), 10, "left"),
        header("TFLOP/s", alt.value("width"), 222, "right"),
        header("speedup", alt.value("width"), 276, "right"),
        column("time_text", 10, "left"),
        column("tflops_text", 222, "right"),
        column("speedup_text", 276, "right"),
    ]
    title = alt.TitleParams(panel.title, subtitle=panel.subtitle, offset=18)
    return alt.layer(*layers).properties(width="container", height=ROW_PX * len(panel.dots), title=title)
