"""The report's section on operators: every measured point, and the best setting of each slot with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.report.section import Answer, File, Section, Sources
from overlap_sweep.report.table import Listing
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import measured_on
from overlap_sweep.workloads.operator.advice import (
    against_other_processes,
    cards,
    cautions,
    file_name,
    is_async_tp,
    recommendation,
    scaling_sentence,
)
from overlap_sweep.workloads.operator.answer import (
    CaseAnalysis,
    OperatorAnalysis,
    SlotAnswer,
    analyse_operators,
)
from overlap_sweep.workloads.operator.chart import exhibits, tuning
from overlap_sweep.workloads.operator.choice import Frozen, frozen, of_pass
from overlap_sweep.workloads.operator.columns import ANSWERS, TABLE, PhaseRow, PhaseTimes
from overlap_sweep.workloads.operator.config import Asked
from overlap_sweep.workloads.operator.exports import training_files
from overlap_sweep.workloads.operator.report import report


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
        answers=[
            _answer(case, analysis.cases[:number], sources.config.overlap_threshold)
            for number, case in enumerate(analysis.cases)
        ],
        points=Listing(
            *(TABLE, rows),
            "Every operator point: one row per phase, with the times of the phase's pass.",
            chosen=lambda row: bool(row.measured and row.measured.is_chosen and not row.measured.launch_bound),
            order=_place,
        ),
        report=report(analysis, sources, TABLE.records(rows), decided),
        decided=decided,
        files=[file for case in analysis.cases for file in _files(case, sources)],
        more=tuning(sources, analysis.strays),
        launch_bound=sum(len(case.launch_bound) for case in analysis.cases),
        problems=[problem for trace in read for problem in trace.problems],
        warnings=[warning for trace in read for warning in trace.warnings],
    )


def point_rows(points: Sequence[Point], root: Path, analysis: OperatorAnalysis) -> list[PhaseRow]:
    """Returns one row per phase that a point overlaps, or that it requests if it overlaps none."""
    chosen: dict[tuple[Any, ...], Frozen] = {
        (case.case, choice.tp_size, choice.operator, choice.pass_name): frozen(choice.chosen.settings)
        for case in analysis.cases
        for tp_size in case.plans
        for choice in case.tried(tp_size)
    }
    rows = []
    for point in points:
        config, result = point.recorded, point.result
        if not result or point.status != "ok":
            rows += [PhaseRow(point, root, None, phase) for phase in config.get("phases") or (config["phase"],)]
            continue
        for phase in _phases(point):
            name = space.PASS_OF_PHASE[phase]
            chosen_settings = chosen.get((point.case, config["tp_size"], config["operator"], name))
            is_chosen = chosen_settings == frozen(of_pass(result.settings, name))
            measured = PhaseTimes(point, name, analysis.traces[point.directory], is_chosen)
            rows.append(PhaseRow(point, root, measured, phase, pass_name=name))
    return rows


def _phases(point: Point) -> list[str]:
    """Returns the phases that the point overlaps; for `none`, every phase that it requests."""
    assert point.result
    operator = point.config_as(Asked).operator
    if point.result.settings:
        return [phase for phase in space.PHASES if space.slot(operator, phase) in point.result.settings]
    requested = point.recorded.get("phases") or (point.recorded["phase"],)
    return list(space.PHASES) if "all" in requested else [phase for phase in space.PHASES if phase in requested]


def _place(row: PhaseRow) -> tuple[Any, ...]:
    """Returns a sort key from simple to complex, without the device, which failed points did not record."""
    config, phases = row.point.recorded, (*space.PHASES, "all")
    knobs = [abs(int(config.get(knob) or 0)) for knob in space.KNOBS]
    operator, method = list(space.OPERATORS).index(config["operator"]), space.METHODS.index(config["method"])
    case = str(row.point.case._replace(device=""))
    return case, config["tp_size"], operator, method, config["phase"], knobs, row.point.name, phases.index(row.part)


def _answer(case: CaseAnalysis, before: Sequence[CaseAnalysis], overlap_threshold: float) -> Answer:
    """`before`: the cases with which it may be compared."""
    slots = [answer for tp_size in case.plans for answer in case.slots(tp_size)]
    return Answer(
        title=str(case.case),
        brief=f"{case.case.model}, {case.case.tokens} tokens, {case.case.precision}, {case.case.backend}",
        sentences=[*filter(None, [scaling_sentence(case)]), *case.applies_to, *against_other_processes(case, before)],
        cards=list(cards(case).values()),
        cautions=cautions(case),
        compared=Listing(
            *(ANSWERS, slots, "The best setting of every slot, with each operator measured alone."),
            chosen=lambda row: row.setting is not None,
            group=lambda row: row.tp_size,
        ),
        points=case.points,
        legend=_legend(case, slots),
        more=exhibits(case),
        details=[
            *(recommendation(c, case, overlap_threshold) for size in case.plans for c in case.tried(size)),
            measured_on(case.points),
        ],
    )


def _legend(case: CaseAnalysis, slots: Sequence[SlotAnswer]) -> str:
    default = "async TP in all slots" if is_async_tp(case) else "Transformer Engine's own settings"
    lines = [
        *(["dgrad and wgrad can only be timed together"] if any(one.phase == "wgrad" for one in slots) else []),
        *([f"default: {default}"] if any(one.choice.default for one in slots) else []),
        *(["*: the switches don't allow it"] if any(one.setting != one.final_setting for one in slots) else []),
    ]
    return "; ".join(lines)


def _files(case: CaseAnalysis, sources: Sources) -> Iterator[File]:
    """Yields the files to train with; that of the smallest TP size is also written under a plain name."""
    directory = sources.reading.root / case.folder
    for tp_size in case.tp_sizes:
        for name, text in training_files(case, tp_size, sources.command).items():
            if name == file_name(min(case.tp_sizes)):
                yield File(directory, "optimal_tp_comm_overlap_cfg.yaml", text.encode)
            yield File(directory, name, text.encode)
