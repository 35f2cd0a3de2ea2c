"""Time over num_sm: for each pass one panel, with a line for each way of overlapping, and what it is compared with."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from overlap_sweep.overlap import space
from overlap_sweep.overlap.variants import DEFAULT, named
from overlap_sweep.report.numbers import PASS_WORDS, as_us
from overlap_sweep.report.page.chart_parts import drawn_from, tooltip
from overlap_sweep.report.page.label_places import LABEL_GAP_PX, spread
from overlap_sweep.report.page.log_ticks import LOGARITHMIC_FROM, log_ticks
from overlap_sweep.report.page.palette import colour, looks_of
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice
from overlap_sweep.workloads.operator.failures import Frozen, frozen, of_pass
from overlap_sweep.workloads.operator.hidden_chart import chosen_name, hidden_in_words
from overlap_sweep.workloads.operator.result import OperatorTimes, PassTimes

if TYPE_CHECKING:
    import altair as alt

HEIGHT_PX = 230
LOW_PX = 115
"""Of a panel without a line: there is little to see in it."""
SUBTITLE_WIDTH = 84
"""In characters: as long as a panel is wide."""


@dataclass(frozen=True)
class Mark:
    """One setting at one num_sm, all its measurements together; comparable within the panel."""

    line: str
    num_sm: int
    time_us: float
    q1_us: float
    q3_us: float
    chosen: bool
    setting: str
    time_text: str
    quartiles_text: str
    speedup_text: str
    measured_text: str


@dataclass(frozen=True)
class Level:
    """A time that num_sm does not change: a baseline, or a ring exchange by copy engines."""

    name: str
    time_us: float
    q1_us: float
    q3_us: float
    baseline: bool
    chosen: bool
    time_text: str
    quartiles_text: str


@dataclass(frozen=True)
class EndLabel:
    text: str
    label_us: float
    """Where it stands."""
    end_num_sm: float
    end_us: float
    """Where what it names ends."""
    colour: str


@dataclass(frozen=True)
class NumSmPanel:
    name: str
    title: str
    subtitle: str
    marks: list[Mark]
    levels: list[Level]
    labels: list[EndLabel]
    connected: list[str]
    """The lines whose marks are connected: all but those of dgrad and wgrad with a num_sm each."""
    colours: dict[str, str]
    """Of lines and levels, by name."""
    shapes: dict[str, str]
    num_sms: list[int]
    time_range_us: tuple[float, float]
    logarithmic: bool

    @property
    def height_px(self) -> int:
        return _height_px(self.marks, self.levels)

    @property
    def num_sm_range(self) -> tuple[float, float]:
        return self.num_sms[0] / 1.12, self.num_sms[-1] * 1.12


def num_sm_panels(case: CaseAnalysis, tp_size: int) -> list[NumSmPanel]:
    """For every pass of which an overlap was measured."""
    arms = list(dict.fromkeys(arm_name(c) for plan in case.plans.values() for p in plan.choices for c in _drawn(p)))
    wanted = {arm: i for i, arm in enumerate(arms)}
    measured = _measured(case.points)
    panels = []
    for choice in case.plans[tp_size].choices if tp_size in case.plans else ():
        if _drawn(choice):
            of_pass_measured = measured[tp_size, choice.operator, choice.pass_name]
            panels.append(_panel(choice, of_pass_measured, wanted, case.case.backend))
    return panels


def arm_name(candidate: Candidate) -> str:
    """What the candidate is besides its num_sm."""
    without = {slot: {k: v for k, v in s.items() if k != "num_sm"} for slot, s in candidate.settings.items()}
    names = {slot: space.brief_name(setting) for slot, setting in without.items()}
    if len(set(names.values())) == 1 and len(names) > 1:
        (name, *_) = names.values()
        return name if num_sm_of(candidate) else f"{name}, dgrad and wgrad apart"
    return space.settings_name(without)


def num_sm_of(candidate: Candidate) -> int | None:
    """The one of all its slots; None where they differ, or where it has none or makes nothing of it."""
    given = {space.without_idle_knobs(setting).get("num_sm") for setting in candidate.settings.values()}
    return next(iter(given)) if len(given) == 1 and not _by_copy_engines(candidate) else None


def describe(panel: NumSmPanel) -> str:
    return f"Time over num_sm, {panel.title}: {panel.subtitle}. Lines: {', '.join(panel.colours)}."


def _by_copy_engines(candidate: Candidate) -> bool:
    return any(s["method"] == "ring_exchange" and s.get("use_ce") for s in candidate.settings.values())


def _drawn(choice: PassChoice) -> list[Candidate]:
    return [candidate for candidate in choice.candidates if candidate.settings and candidate.measured]


def _measured(points: Sequence[Point]) -> dict[tuple[int, str, str], dict[Frozen, list[PassTimes]]]:
    """Times by TP size, operator and pass, and by what the slots of the pass were given."""
    found: dict[tuple[int, str, str], dict[Frozen, list[PassTimes]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.result and not point.result.launch_bound:
            for name in space.PASSES:
                settings = of_pass(point.result.settings, name)
                key = point.config["tp_size"], point.config["operator"], name
                found[key][frozen(settings)].append(point.measured_as(OperatorTimes).times[name])
    return found


def _panel(
    choice: PassChoice, measured: Mapping[Frozen, list[PassTimes]], wanted: Mapping[str, int], backend: str
) -> NumSmPanel:
    marks, levels, apart = [], _baselines(choice, backend), set()
    for candidate in _drawn(choice):
        name, num_sm = arm_name(candidate), num_sm_of(candidate) or _first_num_sm(candidate)
        q1_us, q3_us = _quartiles(measured[frozen(candidate.settings)], choice)
        texts = _texts(candidate, choice, q1_us, q3_us)
        if _by_copy_engines(candidate) or num_sm is None:
            levels.append(
                Level(
                    name,
                    candidate.time_us,
                    q1_us,
                    q3_us,
                    baseline=False,
                    chosen=candidate is choice.chosen,
                    time_text=texts["time_text"],
                    quartiles_text=texts["quartiles_text"],
                )
            )
        else:
            is_chosen = candidate is choice.chosen
            marks.append(Mark(name, num_sm, candidate.time_us, q1_us, q3_us, is_chosen, candidate.name, **texts))
            apart |= set() if num_sm_of(candidate) else {name}
    levels = _merged(levels)
    named = [*(mark.line for mark in marks), *(level.name for level in levels if not level.baseline)]
    looks = looks_of(list(dict.fromkeys(named)), wanted)
    time_range_us, logarithmic = _time_range(marks, levels)
    num_sms = sorted({mark.num_sm for mark in marks}) or [1]
    return NumSmPanel(
        name=f"{choice.operator}_{choice.pass_name}",
        title=f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={choice.tp_size}",
        subtitle=_subtitle(choice),
        marks=sorted(marks, key=lambda mark: (mark.line, mark.num_sm)),
        levels=levels,
        labels=_labels(marks, levels, looks, time_range_us, logarithmic, num_sms[-1] * 1.12),
        connected=list(dict.fromkeys(mark.line for mark in marks if mark.line not in apart)),
        colours={name: series for name, (series, _) in looks.items()},
        shapes={name: shape for name, (_, shape) in looks.items()},
        num_sms=num_sms,
        time_range_us=time_range_us,
        logarithmic=logarithmic,
    )


def _merged(levels: Sequence[Level]) -> list[Level]:
    """Of those of one name the chosen one, or the fastest: they differ in a num_sm that changes nothing."""
    best: dict[str, Level] = {}
    for level in sorted(levels, key=lambda level: (not level.chosen, level.time_us)):
        best.setdefault(level.name, level)
    return [best[name] for name in dict.fromkeys(level.name for level in levels)]


def _first_num_sm(candidate: Candidate) -> int | None:
    return next((s["num_sm"] for s in candidate.settings.values() if s.get("num_sm")), None)


def _quartiles(measured: Sequence[PassTimes], choice: PassChoice) -> tuple[float, float]:
    """Of all samples, each scaled to the none time of the panel as the candidate's time is."""
    scaled = [
        sample * choice.none.time_us / times.none.median_us for times in measured for sample in times.point.samples_us
    ]
    q1_us, _, q3_us = statistics.quantiles(scaled, n=4, method="inclusive")
    return q1_us, q3_us


def _texts(candidate: Candidate, choice: PassChoice, q1_us: float, q3_us: float) -> dict[str, str]:
    count = len(candidate.points)
    return {
        "time_text": f"{as_us(candidate.time_us)} us",
        "quartiles_text": f"{as_us(q1_us)} to {as_us(q3_us)} us",
        "speedup_text": f"{choice.none.time_us / candidate.time_us:.3f}x no overlap",
        "measured_text": f"{candidate.estimate.repeats} repeats in {count} point{'s' if count > 1 else ''}",
    }


def _baselines(choice: PassChoice, backend: str) -> list[Level]:
    none = choice.none
    found = [("no overlap", none.time_us, none is choice.chosen), ("GEMMs alone", choice.floor_us, False)]
    found += [(named(DEFAULT, backend), choice.default.time_us, False)] if choice.default else []
    return [
        Level(name, time_us, time_us, time_us, True, chosen, f"{as_us(time_us)} us", "-")
        for name, time_us, chosen in found
    ]


def _height_px(marks: Sequence[Mark], levels: Sequence[Level]) -> int:
    """Low without a line, but with room for the labels."""
    return HEIGHT_PX if marks else max(LOW_PX, round(LABEL_GAP_PX * (len(levels) - 1)))


def _subtitle(choice: PassChoice) -> str:
    chosen, none_us = choice.chosen, choice.none.time_us
    if not chosen.settings:
        return f"chosen: no overlap; {choice.reason}"
    hidden = hidden_in_words(hidden_fraction(chosen.time_us, none_us, choice.floor_us))
    return f"chosen: {chosen_name(choice)}, {as_us(chosen.time_us)} us, {none_us / chosen.time_us:.2f}x, hides {hidden}"


def _time_range(marks: Sequence[Mark], levels: Sequence[Level]) -> tuple[tuple[float, float], bool]:
    low = min([mark.q1_us for mark in marks] + [level.q1_us for level in levels])
    high = max([mark.q3_us for mark in marks] + [level.q3_us for level in levels])
    if high > LOGARITHMIC_FROM * low:
        return (low / 1.12, high * 1.12), True
    margin = 0.07 * (high - low) or 0.01 * high
    return (max(0.0, low - margin), high + margin), False


def _labels(
    marks: Sequence[Mark],
    levels: Sequence[Level],
    looks: Mapping[str, tuple[str, str]],
    time_range_us: tuple[float, float],
    logarithmic: bool,
    edge: float,
) -> list[EndLabel]:
    """At the right edge, where nothing else is."""
    last = {mark.line: mark for mark in sorted(marks, key=lambda mark: mark.num_sm)}
    ends: list[tuple[str, float, float, str]] = []
    ends += [(name, mark.num_sm, mark.time_us, looks[name][0]) for name, mark in last.items()]
    for level in levels:
        chosen = " (chosen)" if level.chosen else ""
        of_level = "muted" if level.baseline else looks[level.name][0]
        ends.append((f"{level.name}{chosen}", edge, level.time_us, of_level))
    height_px = _height_px(marks, levels)
    low, high = (math.log(end) if logarithmic else end for end in time_range_us)

    def place_px(time_us: float) -> float:
        return ((math.log(time_us) if logarithmic else time_us) - low) / (high - low) * height_px

    places = spread([place_px(end[2]) for end in ends], LABEL_GAP_PX, 0.0, height_px)
    labels = []
    for (text, end_num_sm, end_us, of_end), at_px in zip(ends, places, strict=True):
        at = low + at_px / height_px * (high - low)
        labels.append(EndLabel(text, math.exp(at) if logarithmic else at, end_num_sm, end_us, of_end))
    return labels


def chart(panel: NumSmPanel) -> alt.TopLevelMixin:
    import altair as alt

    low, high = panel.num_sm_range
    x_scale = alt.Scale(type="log", base=2, domain=[low, high], nice=False)
    x_axis = alt.Axis(
        values=panel.num_sms if panel.marks else [], format="d", grid=False, labelOverlap="greedy", tickSize=4
    )
    y_scale = alt.Scale(type="log" if panel.logarithmic else "linear", domain=list(panel.time_range_us), nice=False)
    y_axis = alt.Axis(
        values=log_ticks(*panel.time_range_us) if panel.logarithmic else alt.Undefined,
        tickCount=5 if panel.marks else 3,
        format=",.0f" if panel.time_range_us[1] >= 20 else ",.2f",
        domain=False,
        ticks=False,
        minExtent=38,
    )
    x_title = "num_sm" if panel.marks else "num_sm changes nothing"
    y_title = "us, logarithmic" if panel.logarithmic else "us"
    names = list(panel.colours)
    in_colour = alt.Scale(domain=names, range=[colour(name) for name in panel.colours.values()])
    shape = alt.Shape("line:N", scale=alt.Scale(domain=names, range=list(panel.shapes.values())))

    def x(field: str = "num_sm") -> alt.X:
        return alt.X(f"{field}:Q", title=x_title, scale=x_scale, axis=x_axis)

    def y(field: str = "time_us") -> alt.Y:
        return alt.Y(f"{field}:Q", title=y_title, scale=y_scale, axis=y_axis)

    across = {"x": alt.value(0), "x2": alt.value("width")}
    layers: list[alt.Chart] = []
    for is_chosen in (False, True):
        baselines = [level for level in panel.levels if level.baseline and level.chosen == is_chosen]
        look = (
            {"color": colour("ink"), "strokeWidth": 2}
            if is_chosen
            else {"color": colour("muted"), "strokeDash": [5, 3]}
        )
        told = tooltip({"name": "compared with", "time_text": "time"})
        layers.append(drawn_from(baselines).mark_rule(**look).encode(y=y(), **across, tooltip=told))
    if engines := [level for level in panel.levels if not level.baseline]:
        of_name = alt.Color("name:N", scale=in_colour)
        width = alt.condition("datum.chosen", alt.value(3), alt.value(1.5))
        told = tooltip({"name": "setting", "time_text": "time", "quartiles_text": "quartiles"})
        layers += [
            drawn_from(engines).mark_rect(opacity=0.15).encode(y=y("q1_us"), y2="q3_us:Q", **across, color=of_name),
            drawn_from(engines).mark_rule().encode(y=y(), **across, color=of_name, strokeWidth=width, tooltip=told),
        ]
    told = tooltip(
        {
            "setting": "setting",
            "time_text": "time",
            "quartiles_text": "quartiles",
            "speedup_text": "speedup",
            "measured_text": "measured",
        }
    )
    of_line = alt.Color("line:N", scale=in_colour)
    marks, chosen = drawn_from(panel.marks), drawn_from(mark for mark in panel.marks if mark.chosen)
    at_the_axis = any(mark.chosen and mark.num_sm == panel.num_sms[0] for mark in panel.marks)
    lines = drawn_from(mark for mark in panel.marks if mark.line in panel.connected)
    layers += [
        lines.mark_line(strokeWidth=1.8).encode(x=x(), y=y(), color=of_line),
        marks.mark_rule(strokeWidth=1.5).encode(x=x(), y=y("q1_us"), y2="q3_us:Q", color=of_line),
        marks.mark_point(filled=True, size=42, opacity=1).encode(
            x=x(), y=y(), color=of_line, shape=shape, tooltip=told
        ),
        chosen.mark_point(size=190, color=colour("ink"), strokeWidth=2, opacity=1).encode(x=x(), y=y(), tooltip=told),
        chosen.mark_text(dy=19, dx=18 if at_the_axis else 0, fontWeight=600).encode(
            x=x(), y=y(), text=alt.value("chosen")
        ),
    ]
    beyond = high * (high / low) ** 0.03
    named = drawn_from({**asdict(label), "colour": colour(label.colour), "edge": beyond} for label in panel.labels)
    own = alt.Color("colour:N", scale=None)
    layers += [
        named.mark_rule(strokeWidth=0.8, strokeDash=[1, 2]).encode(
            x=x("end_num_sm"), x2="edge:Q", y=y("end_us"), y2="label_us:Q", color=own
        ),
        named.mark_text(align="left", dx=3).encode(x=x("edge"), y=y("label_us"), text="text:N", color=own),
    ]
    title = alt.TitleParams(panel.title, subtitle=textwrap.wrap(panel.subtitle, SUBTITLE_WIDTH))
    return alt.layer(*layers).properties(width="container", height=panel.height_px, title=title)
