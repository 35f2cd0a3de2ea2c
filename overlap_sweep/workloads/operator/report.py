"""The operators' part of tuning_report.json. Times are in microseconds; unknown or undefined values are None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from overlap_sweep.overlap.overlap_cfg import FLAGS
from overlap_sweep.report.section import Sources
from overlap_sweep.report.table import Listing, Row
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments, measured_when, multicast
from overlap_sweep.workloads.layer import section as layers
from overlap_sweep.workloads.operator.advice import cards, is_effective, path_of_file, recommendation
from overlap_sweep.workloads.operator.answer import CaseAnalysis, OperatorAnalysis, SlotAnswer, config_id
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Trial

USUAL_NAMES = {
    "overlap_method": "method",
    **{
        f"{usual}_{key}": f"{ours}_{column}"
        for usual, ours in (("forward", "fwd"), ("backward", "bwd"))
        for key, column in {
            "gemm_time_us": "gemm_us",
            "comm_time_us": "comm_us",
            "overlap_time_us": "overlap_us",
            "overlap_ratio": "overlap_ratio",
            "e2e_time_us": "span_us",
        }.items()
    },
    "operator_e2e_time_us": "total_span_us",
}
"""Our columns by the keys of other tuners' tuning_report.json, for scripts that read those."""


def report(
    analysis: OperatorAnalysis, sources: Sources, rows: Sequence[Row], decided: Listing[SlotAnswer]
) -> dict[str, Any]:
    """Returns the operators' part of the report. `configurations` are the points' `rows` and `best` the answers' rows,
    both also with the `USUAL_NAMES` of some columns.

    List entries name their case. `configurations` has an entry per point and phase that it overlaps; `config_id` names
    one configuration of the case, and `point` the measurement. `tp_scaling` is that of each case in `by_case`; where
    there is one case, its keys are at the top too. `proof` has one entry per case and TP size that a tuner measured,
    `tuner` one per sweep of a tuner.
    """
    cases, root = analysis.cases, sources.reading.root
    sizes = [(case, tp_size) for case in cases for tp_size in case.tp_sizes]
    outcomes = [(outcome, case.folder) for case in cases for outcome in case.outcomes.values()]
    names = {_relative(point.directory, root): _case_name(point, cases) for point in sources.points("operator")}
    threshold = sources.config.overlap_threshold
    return {
        "cases": [_case(case) for case in cases],
        "answers": [answer for case in cases for answer in _answers(case)],
        "best": [_best(answer, row) for answer, row in zip(decided.rows, decided.records, strict=True)],
        "recommendations": [
            {
                **_of(case, tp_size),
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
            {**_of(case, tp_size), **asdict(advice), "flag": FLAGS.get(advice.name)}
            for case, tp_size in sizes
            for advice in case.switches(tp_size)
        ],
        "unmeasured_slots": [
            {**_of(case, tp_size), **asdict(slot)} for case, tp_size in sizes for slot in case.unmeasured(tp_size)
        ],
        "tp_scaling": {
            **(asdict(cases[0].scaling) if len(cases) == 1 else {}),
            "by_case": {case.case.name: asdict(case.scaling) for case in cases},
        },
        "configurations": [{"case": names.get(str(row["directory"])), **row, **_usually_named(row)} for row in rows],
        "proof": [_outcome(one, root, folder) for one, folder in [*outcomes, *((one, "") for one in analysis.strays)]],
        "tuner": [
            {"directory": _relative(directory, root), **msgspec.to_builtins(record)}
            for directory, record in sources.records.tuners.items()
        ],
    }


def _usually_named(row: Row) -> Row:
    return {usual: row[column] for usual, column in USUAL_NAMES.items() if column in row}


def _of(case: CaseAnalysis, tp_size: int) -> dict[str, Any]:
    return {"case": case.case.name, "tp_size": tp_size}


def _case_name(point: Point, cases: Sequence[CaseAnalysis]) -> str | None:
    """Returns the name of the point's case. A point that was not measured recorded no device: None if only that
    distinguishes several cases."""
    own = [point.case._replace(device=case.case.device) if point.status != "ok" else point.case for case in cases]
    found = [case.case.name for case, one in zip(cases, own, strict=True) if case.case == one]
    return found[0] if len(found) == 1 else None


def _case(case: CaseAnalysis) -> dict[str, Any]:
    environment, *others = environments(case.points)
    return {
        "name": case.case.name,
        **case.case._asdict(),
        "sizes": case.sizes,
        "applies_to": case.applies_to,
        "measured": measured_when(case.points),
        "environment": environment,
        "other_environments": others,
        "multicast": multicast(case.points),
        "launch_bound": case.launch_bound,
        "overruled": {tp_size: plan.overruled for tp_size, plan in case.plans.items() if plan.overruled},
        "tp_scaling": asdict(case.scaling),
    }


def _answers(case: CaseAnalysis) -> list[dict[str, Any]]:
    """Returns the advice for each TP size, in words."""
    return [
        {
            **_of(case, tp_size),
            "headline": card.headline,
            "sentences": card.sentences,
            "is_best_tp_size": case.scaling.optimal_tp_size == tp_size,
            "file": card.file,
            "use": card.use,
            "to_set": card.to_set,
        }
        for tp_size, card in cards(case).items()
    ]


def _best(answer: SlotAnswer, row: Row) -> dict[str, Any]:
    return {
        "case": answer.case.case.name,
        **row,
        "config_id": config_id(answer.tp_size, answer.choice.operator, answer.phase, answer.choice.chosen.settings),
        **_usually_named(row),
        "setting": answer.setting,
        "setting_in_yaml": answer.case.config(answer.tp_size).slots.get(answer.slot),
        "points": list(answer.choice.chosen.points),
    }


def _outcome(outcome: Outcome, root: Path, folder: str) -> dict[str, Any]:
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
            "tuned_to": {label: {"ratio": one.ratio, **asdict(one.interval)} for label, one in outcome.against.items()},
        }
    return found | {"reason": outcome.reason}


def _trial(trial: Trial | None, root: Path) -> dict[str, Any]:
    """Returns the report of a whole layer, its variants by label."""
    if not trial or not trial.point:
        return {"point": trial.name if trial else None, "variants": {}}
    layer = layers.report(trial.point, trial.layer, root)
    variants = {variant["variant"]: variant for variant in layer["variants"]}
    return {**layer, "variants": variants, "warnings": trial.warnings}


def _relative(directory: Path, root: Path) -> str:
    return directory.relative_to(root).as_posix()
