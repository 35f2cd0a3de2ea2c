"""The times that operators give to comparisons (every setting, and the best of each slot) and to histories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import Comparable, Decision, Key, KeyedTime, Sample, key_of_pass
from overlap_sweep.results.points import Point, group_cases
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, choose_all, failures_by_pass
from overlap_sweep.workloads.operator.proof import outcomes
from overlap_sweep.workloads.operator.result import OperatorTimes


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the times of all measured passes, and the tuners' proofs. Only passes under test have choices; points
    time other passes too."""
    points = [_with_plain_settings(point) for point in points]
    cases, failed = group_cases(points, "operator"), failures_by_pass(points)
    choices: dict[Key, PassChoice] = {}
    for case, own in cases.items():
        tested = {(p.config.tp_size, p.recorded["operator"], name) for p in own for name in space.passes(p.recorded)}
        for choice in choose_all(own, {}, "time", failed):
            key = choice.tp_size, choice.operator, choice.pass_name
            if key in tested:
                choices[key_of_pass(case, *key)] = choice
    return Comparable(
        times=[time for key, choice in choices.items() for time in _times(key, choice)],
        decisions={key: _decision(key, choice) for key, choice in choices.items()},
        proofs=[f"TP={outcome.tp_size}: {outcome.verdict}" for outcome in outcomes(records.tuners, points, cases)],
    )


def samples(result: Result) -> dict[str, Sample]:
    """Returns the total time of the passes under test; empty if the point is launch-bound."""
    if result.launch_bound:
        return {}
    names = space.passes(result.recorded)
    passes = [result.measured_as(OperatorTimes).times[name] for name in names]
    none_us = sum(times.none.median_us for times in passes)
    timings = tuple(times.point for times in passes)
    return {
        space.settings_name(result.settings): Sample(
            timings, none_us, "+".join(names), result.recorded["workload"]["tokens"]
        )
    }


COMPARED = Comparing(measured, samples, matched=("operator", "phase", "phases", "method", *space.KNOBS))


def plain_setting(slot: str, setting: space.Setting) -> space.Setting:
    """Returns the setting in a form that is equal for all backends: without num_sm of a ring exchange by copy engines,
    and with the knobs that are always named."""
    operator, _, phase = slot.partition("_")
    method = setting["method"]
    usual = space.USERBUFFERS_DEFAULTS[method]
    named = set(space.knobs_of(operator, phase, method)) & {"aggregate", "num_splits"} & usual.keys()
    plain = {**{knob: usual[knob] for knob in sorted(named)}, **setting}
    if method == "ring_exchange" and plain.get("use_ce"):
        plain.pop("num_sm", None)
    return plain


def _with_plain_settings(point: Point) -> Point:
    if not point.result:
        return point
    settings = {slot: plain_setting(slot, setting) for slot, setting in point.result.settings.items()}
    return replace(point, result=structs.replace(point.result, settings=settings))


def _times(key: Key, choice: PassChoice) -> Iterator[KeyedTime]:
    for candidate in choice.candidates:
        yield _time(key, choice, candidate)
    if choice.default:
        none_us, floor_us = choice.none.time_us, choice.floor_us
        yield KeyedTime(key._replace(setting=DEFAULT), choice.default, none_us, floor_us, ())


def _time(key: Key, choice: PassChoice, candidate: Candidate) -> KeyedTime:
    own = key._replace(setting=candidate.name)
    return KeyedTime(own, candidate.estimate, choice.none.time_us, choice.floor_us, candidate.points)


def _decision(key: Key, choice: PassChoice) -> Decision:
    slots = space.slots_of_pass(choice.operator, choice.pass_name)
    settings = choice.chosen.settings
    return Decision(
        best=_time(key, choice, choice.chosen),
        slots={slot: space.brief_name(settings.get(slot)) for slot in slots},
        tried=choice.tried_slots,
    )
