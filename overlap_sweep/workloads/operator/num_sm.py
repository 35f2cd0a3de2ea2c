"""Time over num_sm: for each pass a line for each way of overlapping, and what it is compared with."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, named
from overlap_sweep.report.charts import Axis, Level, Line, LinePoint, Lines
from overlap_sweep.report.charts.palette import looks_of
from overlap_sweep.report.numbers import PASS_WORDS, as_us
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.chart import chosen_name, hidden_in_words
from overlap_sweep.workloads.operator.choice import Candidate, Frozen, PassChoice, frozen, of_pass
from overlap_sweep.workloads.operator.result import OperatorTimes, PassTimes

SUBTITLE_WIDTH = 84
"""In characters: as long as a panel is wide."""


def num_sm_lines(case: CaseAnalysis, tp_size: int) -> list[tuple[PassChoice, Lines]]:
    """Returns a chart for every pass of which an overlap was measured."""
    arms = list(dict.fromkeys(arm_name(c) for plan in case.plans.values() for p in plan.choices for c in _drawn(p)))
    wanted = {arm: i for i, arm in enumerate(arms)}
    measured = _measured(case.points)
    return [
        (choice, _lines(choice, measured[tp_size, choice.operator, choice.pass_name], wanted, case.case.backend))
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


def _lines(
    choice: PassChoice, measured: Mapping[Frozen, list[PassTimes]], wanted: Mapping[str, int], backend: str
) -> Lines:
    points: dict[str, list[LinePoint]] = defaultdict(list)
    levels: dict[str, Candidate] = {}
    apart = set()
    # Those of one name differ in a num_sm that changes nothing: the chosen one is drawn, or the fastest.
    for candidate in sorted(_drawn(choice), key=lambda one: (one is not choice.chosen, one.time_us)):
        name, num_sm = arm_name(candidate), num_sm_of(candidate) or _first_num_sm(candidate)
        if _by_copy_engines(candidate) or num_sm is None:
            levels.setdefault(name, candidate)
        else:
            points[name].append(_point(candidate, choice, num_sm, measured))
            apart |= set() if num_sm_of(candidate) else {name}
    looks = looks_of(list(dict.fromkeys([*points, *levels])), wanted)
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
        levels=[
            *_baselines(choice, backend),
            *(_level(name, candidate, choice, measured, looks[name][0]) for name, candidate in levels.items()),
        ],
        subtitle_width=SUBTITLE_WIDTH,
    )


def _first_num_sm(candidate: Candidate) -> int | None:
    return next((s["num_sm"] for s in candidate.settings.values() if s.get("num_sm")), None)


def _quartiles(candidate: Candidate, choice: PassChoice, measured: Mapping[Frozen, list[PassTimes]]) -> list[float]:
    """Of all samples, each scaled to the none time of the chart as the candidate's time is."""
    scaled = [
        sample * choice.none.time_us / times.none.median_us
        for times in measured[frozen(candidate.settings)]
        for sample in times.point.samples_us
    ]
    q1_us, _, q3_us = statistics.quantiles(scaled, n=4, method="inclusive")
    return [q1_us, q3_us]


def _point(
    candidate: Candidate, choice: PassChoice, num_sm: int, measured: Mapping[Frozen, list[PassTimes]]
) -> LinePoint:
    q1_us, q3_us = _quartiles(candidate, choice, measured)
    count, is_chosen = len(candidate.points), candidate is choice.chosen
    return LinePoint(
        num_sm,
        candidate.time_us,
        q1_us,
        q3_us,
        ringed=is_chosen,
        label="chosen" if is_chosen else "",
        details={
            "setting": candidate.name,
            "time": f"{as_us(candidate.time_us)} us",
            "quartiles": f"{as_us(q1_us)} to {as_us(q3_us)} us",
            "speedup": f"{choice.none.time_us / candidate.time_us:.3f}x no overlap",
            "measured": f"{candidate.estimate.repeats} repeats in {count} point{'s' if count > 1 else ''}",
        },
    )


def _level(
    name: str, candidate: Candidate, choice: PassChoice, measured: Mapping[Frozen, list[PassTimes]], own: str
) -> Level:
    q1_us, q3_us = _quartiles(candidate, choice, measured)
    is_chosen = candidate is choice.chosen
    return Level(
        name,
        candidate.time_us,
        own,
        q1_us,
        q3_us,
        width_px=3 if is_chosen else 1.5,
        label=f"{name} (chosen)" if is_chosen else name,
        details={
            "setting": name,
            "time": f"{as_us(candidate.time_us)} us",
            "quartiles": f"{as_us(q1_us)} to {as_us(q3_us)} us",
        },
    )


def _baselines(choice: PassChoice, backend: str) -> list[Level]:
    times_us = {"no overlap": choice.none.time_us, "GEMMs alone": choice.floor_us}
    if choice.default:
        times_us[named(DEFAULT, backend)] = choice.default.time_us
    levels = []
    for name, time_us in times_us.items():
        details = {"compared with": name, "time": f"{as_us(time_us)} us"}
        if name == "no overlap" and choice.none is choice.chosen:
            levels.append(Level(name, time_us, "ink", width_px=2, label=f"{name} (chosen)", details=details))
        else:
            levels.append(Level(name, time_us, "muted", dash=(5, 3), width_px=1, details=details))
    return levels


def _subtitle(choice: PassChoice) -> str:
    if not choice.chosen.settings:
        return f"chosen: no overlap; {choice.reason}"
    time, hidden = f"{as_us(choice.chosen.time_us)} us", hidden_in_words(choice.hidden_fraction)
    return f"chosen: {chosen_name(choice)}, {time}, {choice.speedup:.2f}x, hides {hidden}"
