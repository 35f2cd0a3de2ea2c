"""The report's section on operators: every measured point, the best setting of each slot with its reason, the part of
tuning_report.json, and the times for comparisons and histories."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
from msgspec import structs

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, FLAGS
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.report.section import Answer, File, Section, Sources
from overlap_sweep.report.table import Listing, Row
from overlap_sweep.results.comparable import Comparable, Decision, Key, KeyedTime, Sample, key_of_pass
from overlap_sweep.results.points import Point, group_cases
from overlap_sweep.results.provenance import measured_on, multicast, recorded
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.layer import section as layers
from overlap_sweep.workloads.operator.advice import (
    cards,
    cautions,
    file_name,
    is_async_tp,
    is_effective,
    path_of_file,
    recommendation,
    sentences,
)
from overlap_sweep.workloads.operator.answer import (
    CaseAnalysis,
    OperatorAnalysis,
    SlotAnswer,
    analyse_operators,
    config_id,
)
from overlap_sweep.workloads.operator.chart import exhibits, tuning
from overlap_sweep.workloads.operator.choice import (
    Candidate,
    Frozen,
    PassChoice,
    PassKey,
    choose_all,
    failures_by_pass,
    frozen,
    slots_in_pass,
)
from overlap_sweep.workloads.operator.columns import ANSWERS, TABLE, USUAL_NAMES, PhaseRow, PhaseTimes
from overlap_sweep.workloads.operator.config import Asked, Resolved
from overlap_sweep.workloads.operator.exports import training_files
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Trial, outcomes
from overlap_sweep.workloads.operator.result import OperatorTimes


def section(sources: Sources) -> Section | None:
    """Returns the section on operators, with an answer for each case; None without such points."""
    points = sources.points("operator")
    if not points:
        return None
    analysis = analyse_operators(sources)
    rows, read = point_rows(points, sources.reading.root, analysis), analysis.traces.values()
    decided = Listing(ANSWERS, [slot for case in analysis.cases for size in case.plans for slot in case.slots(size)])
    return Section(
        name="operators",
        what="operators",
        title="Operators",
        topic="tensor-parallel overlap",
        explained="Linear operators of a transformer layer, forward and backward, each with several overlap settings.",
        answers=[_answer(case, sources.config.overlap_threshold) for case in analysis.cases],
        points=Listing(
            TABLE,
            rows,
            "Every operator point: one row per phase, with the times of the phase's pass.",
            chosen=lambda row: bool(row.measured and row.measured.is_chosen and not row.measured.launch_bound),
            order=_place,
        ),
        report=_report(analysis, sources, TABLE.records(rows), decided),
        decided=decided,
        files=[file for case in analysis.cases for file in _files(case, sources)],
        more=tuning(sources, analysis.strays),
        problems=[problem for trace in read for problem in trace.problems],
        warnings=[warning for trace in read for warning in trace.warnings],
    )


def point_rows(points: Sequence[Point], root: Path, analysis: OperatorAnalysis) -> list[PhaseRow]:
    """Returns one row per phase that a point overlaps, or that it requests if it overlaps none."""
    chosen: dict[PassKey, Frozen] = {
        (case.case, choice.tp_size, choice.operator, choice.pass_name): frozen(choice.chosen.settings)
        for case in analysis.cases
        for tp_size in case.plans
        for choice in case.tried(tp_size)
    }
    rows = []
    for point in points:
        config, result = point.config_as(Asked), point.result
        requested = config.phases or (config.phase,)
        if not result or point.status != "ok":
            rows += [PhaseRow(point, root, None, phase) for phase in requested]
            continue
        for phase in space.PHASES:
            overlaps = space.slot(config.operator, phase) in result.settings
            if overlaps or (not result.settings and ("all" in requested or phase in requested)):
                name = space.PASS_OF_PHASE[phase]
                chosen_settings = chosen.get((point.case, config.tp_size, config.operator, name))
                is_chosen = chosen_settings == frozen(slots_in_pass(result.settings, name))
                measured = PhaseTimes(point, name, analysis.traces[point.directory], is_chosen)
                rows.append(PhaseRow(point, root, measured, phase, pass_name=name))
    return rows


def _place(row: PhaseRow) -> tuple[object, ...]:
    """Returns a sort key from simple to complex, without the device, which failed points did not record."""
    config, phases = row.point.config_as(Asked), (*space.PHASES, "all")
    knobs = [abs(int(getattr(config, knob) or 0)) for knob in space.KNOBS]
    operator, method = list(space.OPERATORS).index(config.operator), space.METHODS.index(config.method)
    case = str(row.point.case._replace(device=""))
    return case, config.tp_size, operator, method, config.phase, knobs, row.point.name, phases.index(row.part)


def _answer(case: CaseAnalysis, overlap_threshold: float) -> Answer:
    slots = [answer for tp_size in case.plans for answer in case.slots(tp_size)]
    default = "async TP in all slots" if is_async_tp(case) else "Transformer Engine's own settings"
    legend = {
        "dgrad and wgrad can only be timed together": any(one.phase == "wgrad" for one in slots),
        f"default: {default}": any(one.choice.default for one in slots),
        "*: the switches don't allow it": any(one.setting != one.final_setting for one in slots),
    }
    return Answer(
        title=str(case.case),
        brief=f"{case.case.model}, {case.case.tokens} tokens, {case.case.precision}, {case.case.backend}",
        sentences=sentences(case),
        cards=list(cards(case).values()),
        cautions=cautions(case),
        compared=Listing(
            ANSWERS,
            slots,
            "The best setting of every slot, with each operator measured alone.",
            chosen=lambda row: row.setting is not None,
            group=lambda row: row.tp_size,
        ),
        points=case.points,
        legend="; ".join(line for line, holds in legend.items() if holds),
        more=exhibits(case),
        details=[
            *(recommendation(c, case, overlap_threshold) for size in case.plans for c in case.tried(size)),
            measured_on(case.points),
        ],
    )


def _files(case: CaseAnalysis, sources: Sources) -> Iterator[File]:
    """Yields the files to train with; that of the smallest TP size is also written under a plain name."""
    directory = sources.reading.root / case.folder
    for tp_size in case.tp_sizes:
        for name, text in training_files(case, tp_size, sources.command).items():
            if name == file_name(min(case.tp_sizes)):
                yield File(directory, "optimal_tp_comm_overlap_cfg.yaml", text.encode)
            yield File(directory, name, text.encode)


def _report(
    analysis: OperatorAnalysis, sources: Sources, rows: Sequence[Row], decided: Listing[SlotAnswer]
) -> dict[str, object]:
    """Returns the operators' part of tuning_report.json. Times are in microseconds; unknown or undefined values are
    None. `configurations` are the points' `rows` and `best` the answers' rows, both also with the `USUAL_NAMES` of some
    columns.

    List entries name their case. `configurations` has an entry per point and phase that it overlaps; `config_id` names
    one configuration of the case, and `point` the measurement. `tp_scaling` is that of each case in `by_case`; where
    there is one case, its keys are at the top too. `proof` has one entry per case and TP size that a tuner measured,
    `tuner` one per sweep of a tuner.
    """
    cases, root = analysis.cases, sources.reading.root
    sizes = [(case, tp_size) for case in cases for tp_size in case.tp_sizes]
    proofs = [(outcome, case.folder) for case in cases for outcome in case.outcomes.values()]
    names = {_relative(point.directory, root): _case_name(point, cases) for point in sources.points("operator")}
    threshold = sources.config.overlap_threshold
    return {
        "cases": [_case(case) for case in cases],
        "answers": [
            {
                **_case_and_size(case, tp_size),
                "headline": card.headline,
                "sentences": card.sentences,
                "is_best_tp_size": case.scaling.optimal_tp_size == tp_size,
                "file": card.file,
                "use": card.use,
                "to_set": card.to_set,
            }
            for case in cases
            for tp_size, card in cards(case).items()
        ],
        "best": [
            _best(answer, row) for answer, row in zip(decided.rows, decided.table.records(decided.rows), strict=True)
        ],
        "recommendations": [
            {
                **_case_and_size(case, tp_size),
                "operator": choice.operator,
                "pass": choice.pass_name,
                "effective": is_effective(choice, threshold),
                "recommendation": recommendation(choice, case, threshold),
            }
            for case in cases
            for tp_size in case.plans
            for choice in case.tried(tp_size)
        ],
        "switches": [
            {**_case_and_size(case, tp_size), **asdict(advice), "flag": FLAGS.get(advice.name)}
            for case, tp_size in sizes
            for advice in case.switches(tp_size)
        ],
        "unmeasured_slots": [
            {**_case_and_size(case, tp_size), **asdict(slot)}
            for case, tp_size in sizes
            for slot in case.unmeasured(tp_size)
        ],
        "tp_scaling": {
            **(asdict(cases[0].scaling) if len(cases) == 1 else {}),
            "by_case": {case.case.name: asdict(case.scaling) for case in cases},
        },
        "configurations": [{"case": names.get(str(row["directory"])), **row, **_usually_named(row)} for row in rows],
        "proof": [_outcome(one, root, folder) for one, folder in [*proofs, *((one, "") for one in analysis.strays)]],
        "tuner": [
            {"directory": _relative(directory, root), **msgspec.to_builtins(record)}
            for directory, record in sources.records.tuners.items()
        ],
    }


def _case_and_size(case: CaseAnalysis, tp_size: int) -> dict[str, object]:
    return {"case": case.case.name, "tp_size": tp_size}


def _usually_named(row: Row) -> Row:
    return {usual: row[column] for usual, column in USUAL_NAMES.items() if column in row}


def _case_name(point: Point, cases: Sequence[CaseAnalysis]) -> str | None:
    """Returns the name of the point's case. A point that was not measured recorded no device: None if only that
    distinguishes several cases."""
    own = [point.case._replace(device=case.case.device) if point.status != "ok" else point.case for case in cases]
    found = [case.case.name for case, one in zip(cases, own, strict=True) if case.case == one]
    return found[0] if len(found) == 1 else None


def _case(case: CaseAnalysis) -> dict[str, object]:
    return {
        "name": case.case.name,
        **case.case._asdict(),
        "sizes": case.sizes,
        "applies_to": case.applies_to,
        **recorded(case.points),
        "multicast": multicast(case.points),
        "launch_bound": case.launch_bound,
        "overruled": {tp_size: plan.overruled for tp_size, plan in case.plans.items() if plan.overruled},
        "tp_scaling": asdict(case.scaling),
    }


def _best(answer: SlotAnswer, row: Row) -> dict[str, object]:
    return {
        "case": answer.case.case.name,
        **row,
        "config_id": config_id(answer.tp_size, answer.choice.operator, answer.phase, answer.choice.chosen.settings),
        **_usually_named(row),
        "setting": answer.setting,
        "setting_in_yaml": answer.case.config(answer.tp_size).slots.get(answer.slot),
        "points": list(answer.choice.chosen.points),
    }


def _outcome(outcome: Outcome, root: Path, folder: str) -> dict[str, object]:
    """Returns the outcome of a proof with its measurements; `reason` says why nothing was proven."""
    found = {
        **_trial(outcome.trial, root),
        "case": outcome.case.name if outcome.case else None,
        "tp_size": outcome.tp_size,
        "proven": isinstance(outcome, Proof) and outcome.proven,
        "verdict": outcome.verdict,
        "tried_together": [_trial(one, root) for one in outcome.together],
        "sweep": _relative(outcome.directory, root),
    }
    if isinstance(outcome, Proof):
        return found | {
            "recommended": outcome.recommended,
            "settings": outcome.config.slots,
            "switches": outcome.config.switches,
            "file": path_of_file(folder, outcome.tp_size),
            "best_other": outcome.best_other,
            "tuned_to": {
                label: {name: getattr(one, name) for name in ("ratio", "low", "high")}
                for label, one in outcome.against.items()
            },
        }
    return found | {"reason": outcome.reason}


def _trial(trial: Trial | None, root: Path) -> Mapping[str, object]:
    if not trial or not trial.point:
        return {"point": trial.name if trial else None, "variants": {}}
    layer = layers.report(trial.point, trial.layer, root)
    return {**layer, "variants": layers.variants(trial.layer), "warnings": trial.warnings}


def _relative(directory: Path, root: Path) -> str:
    return directory.relative_to(root).as_posix()


def _measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the times of all measured passes, and the tuners' proofs. Only passes under test have choices; points
    time other passes too."""
    points = [_with_plain_settings(point) for point in points]
    cases, failed = group_cases(points, "operator"), failures_by_pass(points)
    choices: dict[Key, PassChoice] = {}
    for case, own in cases.items():
        configs = [point.config_as(Asked) for point in own]
        tested = {(config.tp_size, config.operator, name) for config in configs for name in space.passes(config)}
        for choice in choose_all(own, {}, "time", failed):
            key = choice.tp_size, choice.operator, choice.pass_name
            if key in tested:
                choices[key_of_pass(case, *key)] = choice
    return Comparable(
        times=[time for key, choice in choices.items() for time in _keyed_times(key, choice)],
        decisions={key: _decision(key, choice) for key, choice in choices.items()},
        proofs=[f"TP={outcome.tp_size}: {outcome.verdict}" for outcome in outcomes(records.tuners, points, cases)],
    )


def _samples(result: Result) -> dict[str, Sample]:
    """Returns the total time of the passes under test; empty if the point is launch-bound."""
    if result.launch_bound:
        return {}
    point = result.point_as(Resolved)
    names = space.passes(point)
    passes = [result.measured_as(OperatorTimes).times[name] for name in names]
    none_us = sum(times.none.median_us for times in passes)
    timings = tuple(times.point for times in passes)
    return {space.settings_name(result.settings): Sample(timings, none_us, "+".join(names), point.workload.tokens)}


def plain_setting(slot: str, setting: space.Setting) -> space.Setting:
    """Returns the setting in a form that is equal for all backends: without num_sm of a ring exchange by copy engines,
    and with the knobs that are always named."""
    operator, _, phase = slot.partition("_")
    method = space.method_of(setting)
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


def _keyed_times(key: Key, choice: PassChoice) -> Iterator[KeyedTime]:
    for candidate in choice.candidates:
        yield _keyed_time(key, choice, candidate)
    if choice.default:
        none_us, floor_us = choice.none.time_us, choice.floor_us
        yield KeyedTime(key._replace(setting=DEFAULT), choice.default, none_us, floor_us, ())


def _keyed_time(key: Key, choice: PassChoice, candidate: Candidate) -> KeyedTime:
    own = key._replace(setting=candidate.name)
    return KeyedTime(own, candidate.estimate, choice.none.time_us, choice.floor_us, candidate.points)


def _decision(key: Key, choice: PassChoice) -> Decision:
    slots = space.slots_of_pass(choice.operator, choice.pass_name)
    settings = choice.chosen.settings
    return Decision(
        best=_keyed_time(key, choice, choice.chosen),
        slots={slot: space.brief_name(settings.get(slot)) for slot in slots},
        tried=choice.tried_slots,
    )


COMPARING = Comparing(_measured, _samples, matched=("operator", "phase", "phases", "method", *space.KNOBS))
