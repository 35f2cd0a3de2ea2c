"""How much of its communication each pass hides under what was chosen for it: a row for each, from harm to perfect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from overlap_sweep.overlap import space
from overlap_sweep.overlap.variants import DEFAULT, named
from overlap_sweep.report.numbers import as_percent, as_us
from overlap_sweep.report.page.chart_parts import Align, drawn_from, header, row_axis, tooltip
from overlap_sweep.report.page.palette import colour
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import PassChoice

if TYPE_CHECKING:
    import altair as alt

ROW_PX = 30
BEST_PERCENT = 105.0
"""Where the axis ends. More than 100 % cannot be hidden: it is noise of the time, or of the GEMMs alone."""
BEYOND_ALL = ">100%"
WORST_PERCENT = -100.0
"""What harms more is drawn like this; its number is beside it."""


@dataclass(frozen=True)
class HiddenRow:
    """One pass; fractions in percent, None where they are not defined or not known."""

    slots: str
    setting: str
    hidden: float | None
    low: float | None
    """With the noise of the time and of the one without overlap; None where that is what was chosen."""
    high: float | None
    default: float | None
    """Under the library's default."""
    default_label: str
    """What stands at its mark; with a number and an arrow where it is worse than the axis goes."""
    hidden_text: str
    speedup_text: str
    time_text: str
    none_text: str
    floor_text: str
    default_text: str
    overlap_text: str
    reason: str


@dataclass(frozen=True)
class HiddenPanel:
    tp_size: int
    rows: list[HiddenRow]
    lowest: float
    """Where the axis begins, in percent; the same for all TP sizes of a case."""

    default_name: str

    @property
    def beyond_floor(self) -> bool:
        """Whether something takes less than the GEMMs alone."""
        return any(row.hidden_text == BEYOND_ALL for row in self.rows)


def hidden_panels(case: CaseAnalysis) -> list[HiddenPanel]:
    """One for each TP size, without the passes of which no overlap was tried."""
    default = named(DEFAULT, case.case.backend)
    rows = {
        tp_size: [_row(choice, slots_of(case, choice), default) for choice in plan.choices if choice.tried_slots]
        for tp_size, plan in case.plans.items()
    }
    ends = [end for of_size in rows.values() for row in of_size for end in (row.low, row.hidden, row.default)]
    lowest = max(WORST_PERCENT, min([-5.0, *(math.floor((end - 5) / 10) * 10 for end in ends if end is not None)]))
    return [HiddenPanel(tp_size, of_size, lowest, default) for tp_size, of_size in rows.items() if of_size]


def slots_of(case: CaseAnalysis, choice: PassChoice) -> str:
    """`fc1_dgrad + wgrad`: the configurable slots of a pass."""
    answers = [answer for answer in case.slots(choice.tp_size) if answer.choice is choice]
    return f"{choice.operator}_{' + '.join(answer.phase for answer in answers)}"


def describe(panel: HiddenPanel) -> str:
    said = (f"{row.slots} {row.hidden_text} by {row.setting}, {row.speedup_text}" for row in panel.rows)
    return f"Hidden fraction of the communication at TP={panel.tp_size}: {'; '.join(said)}."


def _row(choice: PassChoice, slots: str, name_of_default: str) -> HiddenRow:
    chosen, none, floor_us = choice.chosen, choice.none, choice.floor_us
    noise_us = math.hypot(chosen.estimate.noise_us, none.estimate.noise_us)

    def percent(time_us: float) -> float | None:
        fraction = hidden_fraction(time_us, none.time_us, floor_us)
        return None if math.isnan(fraction) else 100 * fraction

    default = percent(choice.default.time_us) if choice.default else None
    return HiddenRow(
        slots=slots,
        setting=chosen_name(choice),
        hidden=percent(chosen.time_us),
        low=percent(chosen.time_us + noise_us) if chosen.settings else None,
        high=percent(chosen.time_us - noise_us) if chosen.settings else None,
        default=default,
        default_label=_default_label(default, name_of_default),
        hidden_text=hidden_in_words(hidden_fraction(chosen.time_us, none.time_us, floor_us)),
        speedup_text=f"{none.time_us / chosen.time_us:.2f}x",
        time_text=f"{as_us(chosen.time_us)} us, noise {as_us(chosen.estimate.noise_us)}",
        none_text=f"{as_us(none.time_us)} us",
        floor_text=f"{as_us(floor_us)} us",
        default_text=f"{as_us(choice.default.time_us)} us" if choice.default else "not measured",
        overlap_text=f"{chosen.overlap_ratio:.2f}" if chosen.overlap_ratio is not None else "no trace",
        reason=choice.reason,
    )


def hidden_in_words(fraction: float) -> str:
    """How much more than all of it is chance, and no number to quote."""
    return BEYOND_ALL if not math.isnan(fraction) and round(100 * fraction) > 100 else as_percent(fraction)


def _default_label(percent: float | None, name: str) -> str:
    if percent is None or percent >= WORST_PERCENT:
        return name
    return f"\N{BLACK LEFT-POINTING TRIANGLE} {name} {percent:,.0f} %".replace("-", "\N{MINUS SIGN}")


def chosen_name(choice: PassChoice) -> str:
    """For people: what is not measured says so."""
    if not choice.chosen.settings:
        return "no overlap"
    return f"{short_name(choice.chosen.settings)}{'' if choice.chosen.measured else ' (predicted)'}"


def short_name(settings: Mapping[str, space.Setting]) -> str:
    """Of the slots of a pass: `bulk_sm4` where dgrad and wgrad are given the same."""
    given = list(settings.values())
    if len(given) > 1 and all(setting == given[0] for setting in given):
        return space.brief_name(given[0])
    return space.settings_name(settings)


def chart(panel: HiddenPanel) -> alt.TopLevelMixin:
    import altair as alt

    base = drawn_from(panel.rows)
    slots = [row.slots for row in panel.rows]
    scale = alt.Scale(domain=[panel.lowest, BEST_PERCENT], nice=False, clamp=True)
    percents = [percent for percent in range(-100, 101, 20) if percent >= panel.lowest]
    x_axis = alt.Axis(labelExpr="datum.value + ' %'", values=percents, domain=False, ticks=False)
    y_scale = alt.Scale(paddingInner=0.1, paddingOuter=0.2)
    y = alt.Y("slots:N", sort=slots, title=None, axis=row_axis(220), scale=y_scale)
    told = tooltip(
        {
            "slots": "slots",
            "setting": "chosen",
            "time_text": "time",
            "none_text": "no overlap",
            "floor_text": "GEMMs alone",
            "default_text": panel.default_name,
            "hidden_text": "hidden",
            "speedup_text": "speedup",
            "overlap_text": "overlap ratio in the trace",
            "reason": "why",
        }
    )

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", title=None, axis=x_axis, scale=scale)

    def column(field: str, dx: int, align: Align, weight: Literal[400, 600] = 400) -> alt.Chart:
        mark = base.mark_text(align=align, dx=dx, fontSize=12, fontWeight=weight)
        return mark.encode(x=alt.value("width"), y=y, text=f"{field}:N", tooltip=told)

    def border(at: float, name: str) -> alt.Chart:
        return drawn_from([{"at": at}]).mark_rule(color=colour(name)).encode(x=x("at"))

    noisy = base.transform_filter("isValid(datum.low)")
    with_default = base.transform_filter("isValid(datum.default)")
    by_sign = alt.condition("datum.hidden < 0", alt.value(colour("bad")), alt.value(colour("accent")))
    near = panel.lowest + 0.05 * (BEST_PERCENT - panel.lowest)
    at_marks: tuple[tuple[str, Align, int], ...] = (("", "left", -1), ("!", "center", 0))
    layers = [
        border(100, "muted"),
        base.mark_bar(height=13, cornerRadiusEnd=2).encode(
            x=x("hidden"), x2=alt.datum(0), y=y, color=by_sign, tooltip=told
        ),
        border(0, "ink"),
        noisy.mark_rule(color=colour("ink"), strokeWidth=1.5).encode(x=x("low"), x2="high:Q", y=y, tooltip=told),
        *(
            noisy.mark_tick(color=colour("ink"), thickness=1.5, size=8, orient="vertical").encode(
                x=x(end), y=y, tooltip=told
            )
            for end in ("low", "high")
        ),
        with_default.mark_tick(color=colour("comm"), thickness=3, size=15, opacity=1, orient="vertical").encode(
            x=x("default"), y=y, tooltip=told
        ),
        *(
            with_default.transform_filter(f"{where} (datum.default < {near})")
            .mark_text(color=colour("comm"), align=align, dx=dx, dy=-12, fontSize=9.5)
            .encode(x=x("default"), y=y, text="default_label:N", tooltip=told)
            # Centred, it would reach into the names of the rows.
            for where, align, dx in at_marks
        ),
        header("no overlap", alt.XDatum(0), 0, "center"),
        header("GEMMs alone", alt.XDatum(100), 4, "right"),
        header("hidden", alt.value("width"), 52, "right"),
        header("speedup", alt.value("width"), 108, "right"),
        header("setting", alt.value("width"), 120, "left"),
        column("hidden_text", 52, "right", 600),
        column("speedup_text", 108, "right"),
        column("setting", 120, "left"),
    ]
    if panel.lowest < -15:
        layers.append(header("slower", alt.XDatum(0), -44, "right"))
    title = alt.TitleParams(f"TP={panel.tp_size}", offset=18)
    return alt.layer(*layers).properties(width="container", height=ROW_PX * len(panel.rows), title=title)
