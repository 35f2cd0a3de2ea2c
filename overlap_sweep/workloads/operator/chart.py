"""Charts of operators: how much communication each pass hides, times over num_sm and over TP sizes, and timelines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, named
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
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads.layer.section import RANK, listed_trace
from overlap_sweep.workloads.operator.answer import CaseAnalysis, OperatorScaling
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, frozen, of_pass

BEST = 1.05
"""Where the axis of hidden fractions ends. More than all cannot be hidden: it is noise of the time, or of the GEMMs
alone."""
BEYOND_ALL = ">100%"
WORST = -1.0
"""What harms more is drawn like this; its tooltip has its time."""


def hidden_bars(case: CaseAnalysis) -> dict[int, Rows]:
    """Returns by TP size how much of its communication each pass hides under what was chosen for it, without the passes
    of which no overlap was tried."""
    rows = {
        tp_size: [_hidden_bar(choice, case) for choice in plan.choices if choice.tried_slots]
        for tp_size, plan in case.plans.items()
    }
    bars = [bar for of_size in rows.values() for bar in of_size]
    ends = [end for bar in bars for end in (*bar.ends, bar.low, *(dot.at for dot in bar.dots)) if end is not None]
    lowest = max(WORST, min([-0.05, *(math.floor(10 * end - 0.5) / 10 for end in ends)]))
    default_name = named(DEFAULT, case.case.backend)
    return {
        tp_size: Rows(
            title=f"TP={tp_size}",
            subtitle="",
            axis=Axis(format=".0%", domain=(lowest, BEST)),
            parts=[Key("hidden", "accent")],
            columns=["hidden", "speedup", "setting"],
            rows=of_size,
            references=[Reference("no overlap", 0.0), Reference("GEMMs alone", 1.0, "muted")],
            legend=[Key(default_name, "comm", shape=TICK)],
        )
        for tp_size, of_size in rows.items()
        if of_size
    }


def slots_of(choice: PassChoice) -> str:
    """Returns `fc1_dgrad + wgrad`: the configurable slots of a pass."""
    phases = [phase for phase, pass_name in space.PASS_OF_PHASE.items() if pass_name == choice.pass_name]
    return f"{choice.operator}_{' + '.join(phase for phase in phases if space.methods_of(choice.operator, phase))}"


def hidden_in_words(fraction: float) -> str:
    """How much more than all of it is chance, and no number to quote."""
    return BEYOND_ALL if not math.isnan(fraction) and round(100 * fraction) > 100 else as_percent(fraction)


def chosen_name(choice: PassChoice) -> str:
    """For people: what is not measured says so."""
    if not choice.chosen.settings:
        return "no overlap"
    return f"{short_name(choice.chosen.settings)}{'' if choice.chosen.measured else ' (predicted)'}"


def short_name(settings: Mapping[str, space.Setting]) -> str:
    """Returns the setting of a pass in short: `bulk_sm4` where dgrad and wgrad are given the same."""
    given = list(settings.values())
    if len(given) > 1 and all(setting == given[0] for setting in given):
        return space.brief_name(given[0])
    return space.settings_name(settings)


def _hidden_bar(choice: PassChoice, case: CaseAnalysis) -> Row:
    chosen, none, floor_us = choice.chosen, choice.none, choice.floor_us
    slots, default_name = slots_of(choice), named(DEFAULT, case.case.backend)
    noise_us = math.hypot(chosen.estimate.noise_us, none.estimate.noise_us)

    def share(time_us: float) -> float | None:
        fraction = hidden_fraction(time_us, none.time_us, floor_us)
        return None if math.isnan(fraction) else fraction

    hidden, default = share(chosen.time_us), share(choice.default.time_us) if choice.default else None
    hidden_text, speedup = hidden_in_words(choice.hidden_fraction), f"{choice.speedup:.2f}x"
    return Row(
        name=slots,
        ends=[] if hidden is None else [hidden],
        cells=[hidden_text, speedup, chosen_name(choice)],
        low=share(chosen.time_us + noise_us) if chosen.settings else None,
        high=share(chosen.time_us - noise_us) if chosen.settings else None,
        colour="bad" if hidden is not None and hidden < 0 else "",
        dots=[] if default is None else [Dot(default, colour="comm", shape=TICK)],
        details={
            "slots": slots,
            "chosen": chosen_name(choice),
            "time": f"{as_us(chosen.time_us)} us, noise {as_us(chosen.estimate.noise_us)}",
            "no overlap": f"{as_us(none.time_us)} us",
            "GEMMs alone": f"{as_us(floor_us)} us",
            default_name: f"{as_us(choice.default.time_us)} us" if choice.default else "not measured",
            "hidden": hidden_text,
            "speedup": speedup,
            "overlap ratio in the trace": "no trace" if chosen.overlap_ratio is None else f"{chosen.overlap_ratio:.2f}",
            "why": choice.reason,
        },
    )


def scaling_lines(case: CaseAnalysis) -> dict[str, Lines]:
    """Returns the time over the TP sizes, beside that of TP=1 divided by them, of every operator that was measured at
    two TP sizes, the unsharded one included."""
    tolerance = case.scaling.tolerance
    results = case.scaling.results.items()
    return {name: _scaling(name, scaling, tolerance) for name, scaling in results if len(scaling.e2e_times) > 1}


def _scaling(operator: str, scaling: OperatorScaling, tolerance: float) -> Lines:
    points = []
    for tp_size, time_us in scaling.e2e_times.items():
        ratio, efficient = scaling.scaling_ratios.get(tp_size), scaling.scaling_efficient.get(tp_size, True)
        compared = ratio is not None and tp_size > 1
        times_ideal = f"{ratio:.2f}" if compared else ""
        details = {
            "TP size": str(tp_size),
            "time": f"{as_us(time_us)} us",
            "times ideal": times_ideal,
            "scaling": ("efficient" if efficient else "not efficient") if compared else "",
        }
        label = times_ideal if efficient else f"{times_ideal}, too slow"
        points.append(LinePoint(tp_size, time_us, label=label, details=details))
    lines = [Line(operator, points, "accent", width_px=2)]
    if one_us := scaling.e2e_times.get(1):
        ideal = {"TP=1 / TP": one_us, f"+{tolerance:.0%} tolerated": one_us * (1 + tolerance)}
        for (name, whole_us), dash in zip(ideal.items(), (DASHED, DOTTED), strict=True):
            tolerated = [LinePoint(n, whole_us / n) for n in scaling.e2e_times]
            lines.insert(0, Line(name, tolerated, "good", shape="", dash=dash, width_px=1.5))
    best = scaling.optimal_tp_size
    return Lines(
        title=operator,
        subtitle=f"scales up to TP={best}" if best else "TP=1 was not measured",
        x=Axis("TP size", logarithmic=True),
        y=Axis("us", logarithmic=True),
        lines=lines,
    )


def pass_timelines(case: CaseAnalysis, tp_size: int) -> list[tuple[PassChoice, Timeline]]:
    """Returns the timelines of those passes whose overlap some trace shows."""
    found = []
    points = [point for point in case.points if point.config["tp_size"] == tp_size and point.result]
    for choice in case.plans[tp_size].choices if tp_size in case.plans else ():
        own = [point for point in points if point.config["operator"] == choice.operator]
        shown = _shown(choice)
        trace = _trace_of(shown, own, choice.pass_name) if shown else None
        if shown and trace:
            verb = "chosen" if shown is choice.chosen else "not chosen"
            sides = {"no overlap": _none_trace(own, trace), f"{short_name(shown.settings)} ({verb})": trace}
            title = f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={tp_size}"
            drawn = timeline(title, sides, choice.pass_name)
            found += [(choice, drawn)] if drawn else []
    return found


def _shown(choice: PassChoice) -> Candidate | None:
    """The chosen one, or where that is no overlap the fastest that was measured."""
    if choice.chosen.settings and choice.chosen.measured:
        return choice.chosen
    return min(_drawn(choice), key=lambda candidate: candidate.time_us, default=None)


def _trace_of(candidate: Candidate, points: Sequence[Point], pass_name: str) -> Path | None:
    """Of the first point that measured the candidate and has one."""
    wanted = frozen(candidate.settings)
    for point in points:
        own = frozen(of_pass(point.result.settings, pass_name)) if point.result else None
        if own == wanted and (path := listed_trace(point, trace_file(RANK))):
            return path
    return None


def _none_trace(points: Sequence[Point], best: Path) -> Path | None:
    """The one recorded beside the best if there is one, else that of any point, or of a point without overlap."""
    beside_first = sorted(points, key=lambda point: point.directory != best.parent)
    for point in beside_first:
        if path := listed_trace(point, trace_file(RANK, "none")):
            return path
    plain = (point for point in points if point.result and not point.result.settings)
    return next((path for point in plain if (path := listed_trace(point, trace_file(RANK)))), None)


# Time over num_sm: for each pass a line for each way of overlapping, and what it is compared with.


def num_sm_lines(case: CaseAnalysis, tp_size: int) -> list[tuple[PassChoice, Lines]]:
    """Returns a chart for every pass of which an overlap was measured."""
    arms = list(dict.fromkeys(arm_name(c) for plan in case.plans.values() for p in plan.choices for c in _drawn(p)))
    looks = looks_of(arms)
    return [
        (choice, _lines(choice, looks, case.case.backend))
        for choice in (case.plans[tp_size].choices if tp_size in case.plans else ())
        if _drawn(choice)
    ]


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


def _by_copy_engines(candidate: Candidate) -> bool:
    return any(s["method"] == "ring_exchange" and s.get("use_ce") for s in candidate.settings.values())


def _drawn(choice: PassChoice) -> list[Candidate]:
    return [candidate for candidate in choice.candidates if candidate.settings and candidate.measured]


def _lines(choice: PassChoice, looks: Mapping[str, tuple[str, str]], backend: str) -> Lines:
    points: dict[str, list[LinePoint]] = defaultdict(list)
    levels: dict[str, Candidate] = {}
    apart = set()
    # Those of one name differ in a num_sm that changes nothing: the chosen one is drawn, or the fastest.
    for candidate in sorted(_drawn(choice), key=lambda one: (one is not choice.chosen, one.time_us)):
        name, num_sm = arm_name(candidate), num_sm_of(candidate) or _first_num_sm(candidate)
        if _by_copy_engines(candidate) or num_sm is None:
            levels.setdefault(name, candidate)
        else:
            points[name].append(_point(candidate, choice, num_sm))
            apart |= set() if num_sm_of(candidate) else {name}
    lines = [
        Line(
            name,
            sorted(of_name, key=lambda point: point.x),
            *looks[name],
            # Marks of dgrad and wgrad with a num_sm each are in no order.
            connected=name not in apart,
        )
        for name, of_name in sorted(points.items())
    ]
    return Lines(
        title=f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={choice.tp_size}",
        subtitle=_subtitle(choice),
        x=Axis("num_sm" if lines else "num_sm changes nothing", logarithmic=True),
        y=Axis("us"),
        lines=lines,
        references=[
            *_baselines(choice, backend),
            *(_level(name, candidate, choice, looks[name][0]) for name, candidate in levels.items()),
        ],
    )


def _first_num_sm(candidate: Candidate) -> int | None:
    return next((s["num_sm"] for s in candidate.settings.values() if s.get("num_sm")), None)


def _noise(candidate: Candidate) -> tuple[float, float]:
    time_us, noise_us = candidate.time_us, candidate.estimate.noise_us
    return time_us - noise_us, time_us + noise_us


def _details(name: str, candidate: Candidate, choice: PassChoice) -> dict[str, str]:
    count = len(candidate.points)
    return {
        "setting": name,
        "time": f"{as_us(candidate.time_us)} us, noise {as_us(candidate.estimate.noise_us)}",
        "speedup": f"{choice.none.time_us / candidate.time_us:.3f}x no overlap",
        "measured": f"{candidate.estimate.repeats} repeats in {count} point{'s' if count > 1 else ''}",
    }


def _point(candidate: Candidate, choice: PassChoice, num_sm: int) -> LinePoint:
    is_chosen = candidate is choice.chosen
    return LinePoint(
        *(num_sm, candidate.time_us, *_noise(candidate)),
        ringed=is_chosen,
        label="chosen" if is_chosen else "",
        details=_details(candidate.name, candidate, choice),
    )


def _level(name: str, candidate: Candidate, choice: PassChoice, colour: str) -> Reference:
    shown = f"{name} (chosen)" if candidate is choice.chosen else name
    return Reference(shown, candidate.time_us, colour, details=_details(name, candidate, choice))


def _baselines(choice: PassChoice, backend: str) -> list[Reference]:
    lines = [("no overlap", choice.none.time_us, "ink", DASHED), ("GEMMs alone", choice.floor_us, "muted", DOTTED)]
    if choice.default:
        lines.append((named(DEFAULT, backend), choice.default.time_us, "comm", DASHED))
    return [
        Reference(name, time_us, colour, dash, {"compared with": name, "time": f"{as_us(time_us)} us"})
        for name, time_us, colour, dash in lines
    ]


def _subtitle(choice: PassChoice) -> str:
    if not choice.chosen.settings:
        return f"chosen: no overlap; {choice.reason}"
    time, hidden = f"{as_us(choice.chosen.time_us)} us", hidden_in_words(choice.hidden_fraction)
    return f"chosen: {chosen_name(choice)}, {time}, {choice.speedup:.2f}x, hides {hidden}"
