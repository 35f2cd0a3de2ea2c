"""tuning_report.json: everything that was found, for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.overlap.overlap_cfg import DEFAULT
from overlap_sweep.report.numbers import finite
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.provenance import environments, launch_commands, measured_when, multicast
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.cases import CaseAnalysis, SlotAnswer
from overlap_sweep.workloads.operator.choice import PassChoice
from overlap_sweep.workloads.operator.frame import config_id
from overlap_sweep.workloads.operator.proof import spoken
from overlap_sweep.workloads.operator.proof_report import outcome_entries, tuner_entries
from overlap_sweep.workloads.operator.scaling import Scaling

FILE_NAME = "tuning_report.json"
SCHEMA = 1


def tuning_report(analysis: Analysis) -> dict[str, Any]:
    """The report as plain data. Times are in microseconds; what is unknown or undefined is None.

    `configurations` are the rows of the tidy table, with `overlap_method` for `method`. Entries of the lists name
    their case; `tp_scaling` on top is the only case's, and None where there are several. `proof` has an entry for each
    case and TP size that a tuner measured, and `tuner` one for each of its sweeps. What else was measured has the keys
    of its section's `report`.
    """
    cases = [_case(case) for case in analysis.operators.cases]
    return {
        "schema": SCHEMA,
        "directory": str(analysis.reading.root),
        "analysed": datetime.now(UTC).isoformat(timespec="seconds"),
        "objective": analysis.config.objective,
        "overlap_threshold": analysis.config.overlap_threshold,
        "unmeasured": analysis.config.unmeasured,
        "counts": analysis.counts(),
        "problems": analysis.problems,
        "commands": launch_commands(analysis.reading.points),
        "cases": cases,
        "best": [
            _best(case, tp_size, answer)
            for case in analysis.operators.cases
            for tp_size in case.plans
            for answer in case.slots(tp_size)
            if answer.tried
        ],
        "recommendations": [
            entry
            for case in analysis.operators.cases
            for entry in recommendations(case, analysis.config.overlap_threshold)
        ],
        "switches": [
            {"case": case.case.name, "tp_size": tp_size, **asdict(advice), "flag": advice.flag}
            for case in analysis.operators.cases
            for tp_size in case.tp_sizes
            for advice in case.switches(tp_size)
        ],
        "unmeasured_slots": [
            {"case": case.case.name, "tp_size": tp_size, **asdict(slot)}
            for case in analysis.operators.cases
            for tp_size in case.tp_sizes
            for slot in case.unmeasured(tp_size)
        ],
        "tp_scaling": cases[0]["tp_scaling"] if len(cases) == 1 else None,
        "repeats": [
            {"case": case.case.name, **_renamed(asdict(repeats)), "spread": repeats.spread}
            for case in analysis.operators.cases
            for repeats in case.repeats
        ],
        "drift": [
            {"case": case.case.name, **_renamed(asdict(drift))}
            for case in analysis.operators.cases
            for drift in case.drift
        ],
        "configurations": [_row(row) for row in analysis.operators.rows],
        **{name: _plain(said) for section in analysis.sections for name, said in section.report.items()},
        "proof": outcome_entries(analysis.operators),
        "tuner": tuner_entries(analysis.operators),
    }


def recommendations(case: CaseAnalysis, overlap_threshold: float) -> list[dict[str, Any]]:
    """One for each pass whose overlap was tried, with a sentence, and whether its overlap is `effective`."""
    found = []
    for tp_size, plan in case.plans.items():
        for choice in plan.choices:
            if not choice.tried_slots:
                continue
            chosen, ratio = choice.chosen, choice.chosen.overlap_ratio
            effective = bool(chosen.settings) and ratio is not None and ratio >= overlap_threshold
            speedup, over_default = choice.none.time_us / chosen.time_us, _speedup_over_default(choice)
            default = "" if over_default is None else f", {over_default:.2f}x {spoken(DEFAULT, case.case.backend)}"
            if not chosen.settings:
                sentence = f"TP={tp_size} {choice.label}: don't overlap{default}; {choice.reason}"
            else:
                sentence = f"TP={tp_size} {choice.label}: {chosen.name}, {speedup:.2f}x no overlap{default}"
                if ratio is not None:
                    sentence += f", overlap ratio {ratio:.2f} ({'effective' if effective else 'not effective'})"
                if not chosen.measured:
                    sentence += "; predicted from its slots alone, measure them together before you rely on it"
            sentence += async_tp.beside_setting(choice) if case.case.backend == async_tp.BACKEND else ""
            found.append(
                {
                    "case": case.case.name,
                    "tp_size": tp_size,
                    "operator": choice.operator,
                    "pass": choice.pass_name,
                    "settings": {slot: dict(setting) for slot, setting in chosen.settings.items()},
                    "speedup": speedup,
                    "speedup_over_default": over_default,
                    "overlap_ratio": ratio,
                    "effective": effective,
                    "measured": chosen.measured,
                    "recommendation": sentence,
                }
            )
    return found


def _case(case: CaseAnalysis) -> dict[str, Any]:
    environment, *others = environments(case.points)
    return {
        "name": case.case.name,
        **case.case._asdict(),
        "measured": measured_when(case.points),
        "environment": environment,
        "other_environments": others,
        "multicast": multicast(case.points),
        "launch_bound": case.launch_bound,
        "overruled": {str(tp_size): plan.overruled for tp_size, plan in case.plans.items() if plan.overruled},
        "tp_scaling": _tp_scaling(case.scaling),
    }


def _plain(said: Any) -> Any:
    """The same without the numbers that JSON has not, however deep they lie."""
    if isinstance(said, dict):
        return {name: _plain(value) for name, value in said.items()}
    return [_plain(value) for value in said] if isinstance(said, list) else finite(said)


def _finite(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: finite(value) for name, value in row.items()} for row in rows]


def _tp_scaling(scaling: Scaling) -> dict[str, Any]:
    return {
        "optimal_tp_size": scaling.optimal_tp_size,
        "tolerance": scaling.tolerance,
        "reason": scaling.reason,
        "results": {
            operator: {
                "optimal_tp_size": result.optimal_tp_size,
                "scaling_efficient": _by_size(result.scaling_efficient),
                "scaling_ratios": _by_size(result.scaling_ratios),
                "e2e_times": _by_size(result.e2e_times),
                "reason": result.reason,
            }
            for operator, result in scaling.results.items()
        },
    }


def _by_size(values: Mapping[int, Any]) -> dict[str, Any]:
    return {str(tp_size): value for tp_size, value in values.items()}


def _best(case: CaseAnalysis, tp_size: int, answer: SlotAnswer) -> dict[str, Any]:
    choice, chosen = answer.choice, answer.choice.chosen
    in_yaml = case.config(tp_size).slots.get(answer.slot)
    return {
        "case": case.case.name,
        "tp_size": tp_size,
        "operator": choice.operator,
        "phase": answer.phase,
        "slot": answer.slot,
        "pass": choice.pass_name,
        "config_id": config_id(tp_size, choice.operator, answer.phase, answer.setting),
        "overlap_method": answer.setting["method"] if answer.setting else "none",
        "setting": dict(answer.setting) if answer.setting else None,
        "setting_in_yaml": in_yaml and dict(in_yaml),
        "measured": chosen.measured,
        "time_us": chosen.time_us,
        "noise_us": chosen.estimate.noise_us,
        "none_us": choice.none.time_us,
        "floor_us": choice.floor_us,
        "default_us": choice.default.time_us if choice.default else None,
        "default_noise_us": choice.default.noise_us if choice.default else None,
        "speedup": choice.none.time_us / chosen.time_us,
        "speedup_over_default": _speedup_over_default(choice),
        "hidden_fraction": finite(hidden_fraction(chosen.time_us, choice.none.time_us, choice.floor_us)),
        "overlap_ratio": chosen.overlap_ratio,
        "candidates": len(choice.candidates),
        "reason": choice.reason,
        "points": list(chosen.points),
    }


def _speedup_over_default(choice: PassChoice) -> float | None:
    return choice.default.time_us / choice.chosen.time_us if choice.default else None


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    values = {column: finite(value) for column, value in row.items()}
    return {**values, "overlap_method": row["method"]}


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {"pass" if name == "pass_name" else name: value for name, value in fields.items()}
