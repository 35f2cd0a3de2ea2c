"""Charts of operators: how much communication each pass hides, times over num_sm, and timelines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, NONE, named
from overlap_sweep.report.causes import Side
from overlap_sweep.report.charts import (
    DASHED,
    DOTTED,
    TICK,
    Axis,
    Dot,
    Key,
    Line,
    LinePoint,
    Lines,
    Reference,
    Row,
    Rows,
)
from overlap_sweep.report.charts.palette import looks_of
from overlap_sweep.report.iterations import Timeline, timeline
from overlap_sweep.report.numbers import PASS_WORDS, as_percent, as_us
from overlap_sweep.results.points import Point
from overlap_sweep.results.traces import drawn_trace
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, frozen, of_pass

NO_OVERLAP = "no overlap"
NOT_CHOSEN = "diamond"
MARGIN = 0.05
"""Of the axis of hidden fractions, beyond the values."""
WORST, BEST = -1.0, 1.5
"""Hidden fractions that are drawn at their place. Those beyond are drawn at the end of the axis, dots as arrows; the
cells and tooltips have the numbers."""


def hidden_bars(case: CaseAnalysis) -> dict[int, Rows]:
    """Returns by TP size the hidden fraction of each pass under its chosen setting, without the passes for which no
    overlap was tried."""
    default_name = named(DEFAULT, case.case.backend)
    return {
        tp_size: _hidden_rows(f"TP={tp_size}", case.tried(tp_size), default_name)
        for tp_size in case.plans
        if case.tried(tp_size)
    }


def _hidden_rows(title: str, choices: Sequence[PassChoice], default_name: str) -> Rows:
    rows = [_hidden_bar(choice, default_name) for choice in choices]
    shown = [at for row in rows for at in (*row.ends, *(dot.at for dot in row.dots), 0.0, 1.0)]
    keys = (Key(default_name, "comm", shape=TICK), Key("fastest overlap, not chosen", "wait", shape=NOT_CHOSEN))
    colours = {dot.colour for row in rows for dot in row.dots}
    return Rows(
        title=title,
        subtitle="",
        axis=Axis(
            "hidden communication, %",
            format=".0%",
            domain=(max(WORST, min(shown)) - MARGIN, min(BEST, max(shown)) + MARGIN),
        ),
        parts=[Key("hidden", "accent")],
        columns=["hidden", "speedup", "setting"],
        rows=rows,
        references=[Reference("no overlap", 0.0), Reference("floor", 1.0, "muted")],
        legend=[key for key in keys if key.colour in colours],
    )


def _hidden_bar(choice: PassChoice, default_name: str) -> Row:
    chosen, noise_us, hidden = choice.chosen, choice.chosen.estimate.noise_us, choice.hidden_fraction
    phases = [phase for phase, pass_name in space.PASS_OF_PHASE.items() if pass_name == choice.pass_name]
    slots = " + ".join(phase for phase in phases if space.methods_of(choice.operator, phase))
    whiskers = [choice.hidden_at(chosen.time_us + sign * noise_us) if chosen.settings else None for sign in (1, -1)]
    is_known = not math.isnan(hidden)
    overlaps = [candidate for candidate in choice.candidates if candidate.settings]
    fastest = None if chosen.settings else min(overlaps, key=lambda one: one.time_us, default=None)
    marked = [(choice.default, "comm", TICK), (fastest, "wait", NOT_CHOSEN)]
    dots = [_hidden_dot(choice.hidden_at(one.time_us), colour, shape) for one, colour, shape in marked if one]
    return Row(
        name=f"{choice.operator}_{slots}",
        ends=[hidden] if is_known else [],
        cells=[as_percent(hidden), f"{choice.speedup:.2f}x", chosen.name],
        low=whiskers[0] if is_known else None,
        high=whiskers[1] if is_known else None,
        colour="bad" if hidden < 0 else "",
        dots=dots if is_known else [],
        details={
            "chosen": chosen.name,
            "time": f"{as_us(chosen.time_us)} us, noise {as_us(noise_us)}",
            "no overlap": f"{as_us(choice.none.time_us)} us",
            "floor": f"{as_us(choice.floor_us)} us",
            default_name: f"{as_us(choice.default.time_us)} us" if choice.default else "not measured",
            **({"fastest overlap": f"{fastest.name}, {as_us(fastest.time_us)} us"} if fastest else {}),
            "why": choice.reason,
        },
    )


def _hidden_dot(hidden: float, colour: str, shape: str) -> Dot:
    return Dot(hidden, colour=colour, shape=shape if hidden >= WORST else "triangle-left")


def pass_timelines(case: CaseAnalysis, tp_size: int) -> list[tuple[PassChoice, Timeline]]:
    """Returns the timelines of the passes whose overlap was traced."""
    found = []
    for choice in case.tried(tp_size):
        sides = {
            name: drawn_trace(side.point, side.variant) if side else None for name, side in traced(case, choice).items()
        }
        title = f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={tp_size}"
        drawn = timeline(title, sides, choice.pass_name) if sides else None
        found += [(choice, drawn)] if drawn else []
    return found


def traced(case: CaseAnalysis, choice: PassChoice) -> dict[str, Side | None]:
    """Returns the traces of a pass with no overlap, if there are some, and with the chosen setting, or if that is
    `none` with the fastest overlap; empty if the latter was not traced."""
    config = {"tp_size": choice.tp_size, "operator": choice.operator}
    own = [point for point in case.points if point.result and config.items() <= point.recorded.items()]
    overlaps = [candidate for candidate in choice.candidates if candidate.settings]
    shown = min(overlaps, key=lambda one: (one is not choice.chosen, one.time_us), default=None)
    side = _of_candidate(shown, own, choice.pass_name) if shown else None
    if not shown or not side:
        return {}
    name = f"{shown.name} ({'chosen' if shown is choice.chosen else 'not chosen'})"
    return {NO_OVERLAP: _of_none(own, choice.pass_name), name: side}


def _of_candidate(candidate: Candidate, points: Sequence[Point], pass_name: str) -> Side | None:
    """Returns the first traces of the candidate."""
    wanted = frozen(candidate.settings)
    for point in points:
        own = frozen(of_pass(point.result.settings, pass_name)) if point.result else None
        if own == wanted and drawn_trace(point):
            return Side(point, pass_name=pass_name)
    return None


def _of_none(points: Sequence[Point], pass_name: str) -> Side | None:
    """Returns the first traces of `none`, recorded with another point or by one of its own."""
    with_points = [Side(point, NONE, pass_name) for point in points]
    plain = [Side(point, "", pass_name) for point in points if point.result and not point.result.settings]
    return next((side for side in (*with_points, *plain) if side.traces), None)


def num_sm_lines(case: CaseAnalysis, tp_size: int) -> list[tuple[PassChoice, Lines]]:
    """Returns times over num_sm for every pass, with one line per arm: settings that differ only in num_sm, which all
    slots share."""
    found = []
    for choice in case.tried(tp_size):
        arms: dict[str, list[LinePoint]] = defaultdict(list)
        for candidate in choice.candidates:
            num_sm = num_sm_of(candidate)
            if num_sm is not None:
                arms[arm_name(candidate)].append(_point(candidate, choice, num_sm))
        if arms:
            found.append((choice, _lines(choice, arms)))
    return found


def arm_name(candidate: Candidate) -> str:
    """Returns the candidate's name without its num_sm."""
    plain = {slot: {k: v for k, v in s.items() if k != "num_sm"} for slot, s in candidate.settings.items()}
    return space.settings_name(plain)


def num_sm_of(candidate: Candidate) -> int | None:
    """Returns the num_sm that all its slots share; None if they differ or have none."""
    values = {space.without_idle_knobs(setting).get("num_sm") for setting in candidate.settings.values()}
    return next(iter(values)) if len(values) == 1 else None


def _point(candidate: Candidate, choice: PassChoice, num_sm: int) -> LinePoint:
    time_us, noise_us, is_chosen = candidate.time_us, candidate.estimate.noise_us, candidate is choice.chosen
    details = {
        "setting": candidate.name,
        "time": f"{as_us(time_us)} us, noise {as_us(noise_us)}",
        "speedup": f"{choice.none.time_us / time_us:.3f}x",
    }
    label = "chosen" if is_chosen else ""
    ends = max(0.0, time_us - noise_us), time_us + noise_us
    return LinePoint(num_sm, time_us, *ends, ringed=is_chosen, label=label, details=details)


def _lines(choice: PassChoice, arms: dict[str, list[LinePoint]]) -> Lines:
    looks = looks_of(list(arms))
    default = [Reference("default", choice.default.time_us, "comm", DASHED)] if choice.default else []
    return Lines(
        title=f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={choice.tp_size}",
        subtitle=f"chosen: {choice.chosen.name}",
        x=Axis("num_sm, SMs", logarithmic=True),
        y=Axis("time, us"),
        lines=[
            Line(name, sorted(points, key=lambda point: point.x), *looks[name]) for name, points in sorted(arms.items())
        ],
        references=[
            Reference("no overlap", choice.none.time_us, "ink", DASHED),
            Reference("floor", choice.floor_us, "muted", DOTTED),
            *default,
        ],
    )
