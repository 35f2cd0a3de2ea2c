"""TP scaling: the time of each operator over the TP sizes, beside that of TP=1 divided by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.page.chart_parts import drawn_from, tooltip
from overlap_sweep.report.page.log_ticks import log_ticks
from overlap_sweep.report.page.palette import colour
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.scaling import OperatorScaling

if TYPE_CHECKING:
    import altair as alt

HEIGHT_PX = 210


@dataclass(frozen=True)
class AtTpSize:
    tp_size: int
    time_us: float
    efficient: bool
    time_text: str
    ratio_text: str
    """Empty where nothing is known of TP=1, and there."""
    verdict: str


@dataclass(frozen=True)
class Ideal:
    """TP=1's time over the TP size, and how much more still counts as efficient."""

    tp_size: int
    ideal_us: float
    tolerated_us: float


@dataclass(frozen=True)
class ScalingPanel:
    operator: str
    subtitle: str
    sizes: list[AtTpSize]
    ideals: list[Ideal]
    """Empty without TP=1."""
    tolerance_text: str


def scaling_panels(case: CaseAnalysis) -> list[ScalingPanel]:
    """For every operator that was measured at two TP sizes, the unsharded one included."""
    tolerance = case.scaling.tolerance
    return [_panel(name, s, tolerance) for name, s in case.scaling.results.items() if len(s.e2e_times) > 1]


def describe(panel: ScalingPanel) -> str:
    said = (f"TP={s.tp_size} {s.time_text}{f', {s.ratio_text} of ideal' if s.ratio_text else ''}" for s in panel.sizes)
    return f"Time of {panel.operator} over the TP size: {'; '.join(said)}. {panel.subtitle}."


def _panel(operator: str, scaling: OperatorScaling, tolerance: float) -> ScalingPanel:
    sizes = []
    for tp_size, time_us in scaling.e2e_times.items():
        ratio, efficient = scaling.scaling_ratios.get(tp_size), scaling.scaling_efficient.get(tp_size, True)
        compared = ratio is not None and tp_size > 1
        sizes.append(
            AtTpSize(
                tp_size,
                time_us,
                efficient,
                time_text=f"{as_us(time_us)} us",
                ratio_text=f"{ratio:.2f}" if compared else "",
                verdict=("efficient" if efficient else "not efficient") if compared else "",
            )
        )
    one_us = scaling.e2e_times.get(1)
    ideals = [Ideal(n, one_us / n, one_us / n * (1 + tolerance)) for n in scaling.e2e_times] if one_us else []
    best = scaling.optimal_tp_size
    return ScalingPanel(
        operator,
        f"scales up to TP={best}" if best else "TP=1 was not measured",
        sizes,
        ideals,
        tolerance_text=f"+{tolerance:.0%} tolerated",
    )


def chart(panel: ScalingPanel) -> alt.TopLevelMixin:
    import altair as alt

    sizes = [size.tp_size for size in panel.sizes]
    x_scale = alt.Scale(type="log", base=2, domain=[sizes[0] / 1.15, sizes[-1] * 1.15], nice=False)
    x_axis = alt.Axis(values=sizes, format="d", grid=False)
    times = [s.time_us for s in panel.sizes] + [end for i in panel.ideals for end in (i.ideal_us, i.tolerated_us)]
    low, high = min(times) / 1.2, max(times) * 1.25
    y_scale = alt.Scale(type="log", domain=[low, high], nice=False)
    y_axis = alt.Axis(format=",.0f", values=log_ticks(low, high), domain=False, ticks=False, minExtent=42)

    x = alt.X("tp_size:Q", title="TP size", scale=x_scale, axis=x_axis)

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", title="us, logarithmic", scale=y_scale, axis=y_axis)

    told = tooltip({"tp_size": "TP size", "time_text": "time", "ratio_text": "times ideal", "verdict": "scaling"})
    layers: list[alt.Chart] = []
    if panel.ideals:
        ideal, last = drawn_from(panel.ideals), drawn_from(panel.ideals[-1:])
        layers += [
            ideal.mark_area(color=colour("good"), opacity=0.14).encode(x=x, y=y("ideal_us"), y2="tolerated_us:Q"),
            ideal.mark_line(color=colour("good"), strokeDash=[5, 3], strokeWidth=1.5).encode(x=x, y=y("ideal_us")),
            last.mark_text(align="left", dx=4, dy=5, color=colour("good")).encode(
                x=alt.value("width"), y=y("ideal_us"), text=alt.value("TP=1 / TP")
            ),
            last.mark_text(align="left", dx=4, dy=-5, color=colour("good")).encode(
                x=alt.value("width"), y=y("tolerated_us"), text=alt.value(panel.tolerance_text)
            ),
        ]
    measured = drawn_from(panel.sizes)
    of_verdict = alt.condition("datum.efficient", alt.value(colour("accent")), alt.value(colour("bad")))
    shape = alt.condition("datum.efficient", alt.value("circle"), alt.value("cross"))
    layers += [
        measured.mark_line(color=colour("accent"), strokeWidth=2).encode(x=x, y=y("time_us")),
        measured.mark_point(filled=True, size=70, opacity=1).encode(
            x=x, y=y("time_us"), color=of_verdict, shape=shape, tooltip=told
        ),
        measured.mark_text(dy=-14, fontSize=11, fontWeight=600).encode(
            x=x, y=y("time_us"), text="ratio_text:N", color=of_verdict, tooltip=told
        ),
    ]
    title = alt.TitleParams(panel.operator, subtitle=panel.subtitle)
    return alt.layer(*layers).properties(width="container", height=HEIGHT_PX, title=title)
