"""What tuning_report.json says of operators, by its keys. Times are in microseconds, those of whole layers in
milliseconds; what is unknown or undefined is None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from overlap_sweep.overlap.overlap_cfg import DEFAULT
from overlap_sweep.report.section import Sources
from overlap_sweep.report.table import Row
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.provenance import (
    describe_machine,
    environments,
    launch_commands,
    measured_when,
    multicast,
)
from overlap_sweep.workloads.layer.answer import Comparison, VariantRow
from overlap_sweep.workloads.layer.result import attention_backend
from overlap_sweep.workloads.operator.advice import default_speedup, is_async_tp, path_of_file
from overlap_sweep.workloads.operator.answer import CaseAnalysis, OperatorAnalysis, Scaling, SlotAnswer, config_id
from overlap_sweep.workloads.operator.choice import PassChoice
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Together, Trial, spoken


def report(analysis: OperatorAnalysis, sources: Sources, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what was found. `configurations` are the `rows` of the points, with `overlap_method` for `method`.

    Entries of the lists name their case; `tp_scaling` on top is the only case's, and None where there are several.
    `proof` has an entry for each case and TP size that a tuner measured, and `tuner` one for each of its sweeps.
    """
    cases, root = analysis.cases, sources.reading.root
    of_sizes = [(case, tp_size) for case in cases for tp_size in case.tp_sizes]
    entries = [_case(case) for case in cases]
    proofs = [_outcome(outcome, root, case.folder) for case in cases for outcome in case.outcomes.values()]
    return {
        "cases": entries,
        "best": [_best(answer) for case, tp_size in of_sizes for answer in case.slots(tp_size)],
        "recommendations": [
            entry for case in cases for entry in recommendations(case, sources.config.overlap_threshold)
        ],
        "switches": [
            {**_of(case, tp_size), **asdict(advice), "flag": advice.flag}
            for case, tp_size in of_sizes
            for advice in case.switches(tp_size)
        ],
        "unmeasured_slots": [
            {**_of(case, tp_size), **asdict(slot)} for case, tp_size in of_sizes for slot in case.unmeasured(tp_size)
        ],
        "tp_scaling": entries[0]["tp_scaling"] if len(entries) == 1 else None,
        "repeats": [
            {"case": case.case.name, **_renamed(asdict(one)), "spread": one.spread}
            for case in cases
            for one in case.repeats
        ],
        "drift": [{"case": case.case.name, **_renamed(asdict(drift))} for case in cases for drift in case.drift],
        "configurations": [{**row, "overlap_method": row["method"]} for row in rows],
        "proof": [*proofs, *(_outcome(stray, root, "") for stray in analysis.strays)],
        "tuner": [
            {"directory": _relative(directory, root), **msgspec.to_builtins(record)}
            for directory, record in sources.records.tuners.items()
        ],
    }


def recommendations(case: CaseAnalysis, overlap_threshold: float) -> list[dict[str, Any]]:
    """Returns one for each pass whose overlap was tried, with a sentence, and whether its overlap is `effective`."""
    found = []
    for choice in (choice for tp_size in case.plans for choice in case.tried(tp_size)):
        chosen, ratio = choice.chosen, choice.chosen.overlap_ratio
        effective = bool(chosen.settings) and ratio is not None and ratio >= overlap_threshold
        over_default = _speedup_over_default(choice)
        default = "" if over_default is None else f", {over_default:.2f}x {spoken(DEFAULT, case.case.backend)}"
        at = f"TP={choice.tp_size} {choice.label}"
        if not chosen.settings:
            sentence = f"{at}: don't overlap{default}; {choice.reason}"
        else:
            sentence = f"{at}: {chosen.name}, {choice.speedup:.2f}x no overlap{default}"
            if ratio is not None:
                sentence += f", overlap ratio {ratio:.2f} ({'effective' if effective else 'not effective'})"
            if not chosen.measured:
                sentence += "; predicted from its slots alone, measure them together before you rely on it"
        if is_async_tp(case) and choice.default:
            gain = default_speedup(choice)
            sentence += f"; async TP, for the whole model or not at all, is {gain:.2f}x no overlap here"
        found.append(
            {
                **_of(case, choice.tp_size),
                "operator": choice.operator,
                "pass": choice.pass_name,
                "settings": {slot: dict(setting) for slot, setting in chosen.settings.items()},
                "speedup": choice.speedup,
                "speedup_over_default": over_default,
                "overlap_ratio": ratio,
                "effective": effective,
                "measured": chosen.measured,
                "recommendation": sentence,
            }
        )
    return found


def _of(case: CaseAnalysis, tp_size: int) -> dict[str, Any]:
    return {"case": case.case.name, "tp_size": tp_size}


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


def _tp_scaling(scaling: Scaling) -> dict[str, Any]:
    by_size = ("scaling_efficient", "scaling_ratios", "e2e_times")
    return {
        "optimal_tp_size": scaling.optimal_tp_size,
        "tolerance": scaling.tolerance,
        "reason": scaling.reason,
        "results": {
            operator: {
                name: {str(tp_size): found for tp_size, found in value.items()} if name in by_size else value
                for name, value in asdict(result).items()
            }
            for operator, result in scaling.results.items()
        },
    }


def _best(answer: SlotAnswer) -> dict[str, Any]:
    choice, chosen, tp_size = answer.choice, answer.choice.chosen, answer.tp_size
    in_yaml = answer.case.config(tp_size).slots.get(answer.slot)
    return {
        **_of(answer.case, tp_size),
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
        "speedup": choice.speedup,
        "speedup_over_default": _speedup_over_default(choice),
        "hidden_fraction": choice.hidden_fraction,
        "overlap_ratio": chosen.overlap_ratio,
        "candidates": len(choice.candidates),
        "reason": choice.reason,
        "points": list(chosen.points),
    }


def _speedup_over_default(choice: PassChoice) -> float | None:
    return choice.default.time_us / choice.chosen.time_us if choice.default else None


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {"pass" if name == "pass_name" else name: value for name, value in fields.items()}


def _outcome(outcome: Outcome, root: Path, folder: str) -> dict[str, Any]:
    """Returns what was proven; where it could not be judged, `reason` and `verdict` say why, and `recommended` and its
    kin are None."""
    proof, trial = outcome if isinstance(outcome, Proof) else None, outcome.trial
    return {
        "case": outcome.case.name if outcome.case else None,
        **(outcome.case._asdict() if outcome.case else {}),
        "tp_size": outcome.tp_size,
        "proven": proof is not None,
        "reason": None if isinstance(outcome, Proof) else outcome.reason,
        "recommended": proof.recommended if proof else None,
        "verdict": outcome.verdict,
        "settings": proof.config.slots if proof else None,
        "switches": proof.config.switches if proof else None,
        "file": path_of_file(folder, outcome.tp_size) if proof else None,
        "best_other": proof.best_other if proof else None,
        "tuned_to_best_other": _comparison(proof.decisive) if proof else None,
        **_layer(trial, proof),
        "tried_together": [_together(one, root) for one in outcome.together],
        "sweep": _relative(outcome.directory, root),
        **_origin(trial),
    }


def _layer(trial: Trial | None, proof: Proof | None) -> dict[str, Any]:
    """Returns what was measured."""
    point = trial.point if trial else None
    return {
        "point": trial.name if trial else None,
        "layer": point.config["layer"]["kind"] if point and point.workload == "layer" else None,
        "attention_backend": attention_backend(point.result) if point else None,
        "rounds": trial.layer.rounds if trial and trial.layer else None,
        "reference": trial.layer.reference if trial and trial.layer else None,
        "variants": {label: _variant(row, trial, proof) for label, row in trial.rows.items()} if trial else {},
        "left_out": trial.left_out if trial else {},
        "warnings": trial.warnings if trial else [],
    }


def _variant(row: VariantRow, trial: Trial, proof: Proof | None) -> dict[str, Any]:
    times, config = trial.times[row.name].times, trial.configs.get(row.name)
    tuned = proof.against.get(row.name) if proof else None
    return {
        **{name: value for pass_name, timing in times.items() for name, value in _ms(pass_name, timing).items()},
        "to_reference": _comparison(row.to_reference),
        "tuned_to_this": _comparison(tuned) if tuned else None,
        "hidden_fraction": row.hidden_fraction,
        "launch_bound": row.launch_bound,
        "relative_error": row.relative_error,
        **({"settings": config.slots, "switches": config.switches} if config else {}),
    }


def _ms(pass_name: str, timing: Timing) -> dict[str, float]:
    """Returns median and quartiles, to the nanosecond."""
    of = {"ms": timing.median_us, "q1_ms": timing.q1_us, "q3_ms": timing.q3_us}
    return {f"{pass_name}_{name}": round(time_us / 1e3, 6) for name, time_us in of.items()}


def _comparison(found: Comparison) -> dict[str, Any]:
    """Returns a ratio of times, below 1 where faster; `confidence` is that of the interval from `low` to `high`."""
    return {
        "ratio": found.ratio,
        "low": found.interval.low,
        "high": found.interval.high,
        "confidence": CONFIDENCE,
        "speedup": found.speedup,
        "differs": found.differs,
    }


def _together(found: Together, root: Path) -> dict[str, Any]:
    trial = found.trial
    return {
        "point": _relative(trial.directory / trial.name, root),
        "reason": None if trial.layer else trial.why_not_ok,
        "reference": trial.layer.reference if trial.layer else None,
        "taken": found.taken,
        "combinations": {
            row.name: {
                "all_ms": round(row.all_us / 1e3, 6),
                "to_reference": _comparison(row.to_reference),
                "launch_bound": row.launch_bound,
                "settings": trial.configs[row.name].slots,
                "switches": trial.configs[row.name].switches,
            }
            for row in found.combinations
        },
        "left_out": trial.left_out,
    }


def _origin(trial: Trial | None) -> dict[str, Any]:
    point = trial.point if trial else None
    environment = point.result.environment if point and point.result else {}
    return {
        "measured": measured_when([point]) if point else None,
        "machine": describe_machine(environment),
        "environment": environment,
        "commands": launch_commands([point]) if point else [],
    }


def _relative(directory: Path, root: Path) -> str:
    return directory.relative_to(root).as_posix()
