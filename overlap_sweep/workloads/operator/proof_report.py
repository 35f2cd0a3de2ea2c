"""What the tuner proved on the whole layer, for programs: in tuning_report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from overlap_sweep.report.numbers import finite
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.provenance import describe_machine, launch_commands, measured_when
from overlap_sweep.workloads.layer.answer import Comparison, VariantRow
from overlap_sweep.workloads.layer.result import attention_backend
from overlap_sweep.workloads.operator.analysis import OperatorAnalysis
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Together
from overlap_sweep.workloads.operator.proofs import path_of_file
from overlap_sweep.workloads.operator.trials import Trial


def outcome_entries(analysis: OperatorAnalysis) -> list[dict[str, Any]]:
    """Returns one for each case and TP size that a tuner measured. What is undefined is None.

    `proven` says whether it could be judged; where not, `reason` and `verdict` say why, and `recommended` and its kin
    are None.
    """
    root = analysis.reading.root
    found = [
        _entry(outcome, root, analysis.folder(case)) for case in analysis.cases for outcome in case.outcomes.values()
    ]
    return found + [_entry(stray, root, "") for stray in analysis.strays]


def tuner_entries(analysis: OperatorAnalysis) -> list[dict[str, Any]]:
    """One for each sweep of the tuner: what it ran, how long it took (in seconds), and what it dropped."""
    return [
        {"directory": _relative(directory, analysis.reading.root), **msgspec.to_builtins(record)}
        for directory, record in analysis.records.tuners.items()
    ]


def _entry(outcome: Outcome, root: Path, folder: str) -> dict[str, Any]:
    proof = outcome if isinstance(outcome, Proof) else None
    trial = outcome.trial
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
    """What was measured, in milliseconds."""
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
        "hidden_fraction": finite(row.hidden_fraction),
        "launch_bound": row.launch_bound,
        "relative_error": row.relative_error,
        **({"settings": config.slots, "switches": config.switches} if config else {}),
    }


def _ms(pass_name: str, timing: Timing) -> dict[str, float]:
    """Median and quartiles, to the nanosecond."""
    of = {"ms": timing.median_us, "q1_ms": timing.q1_us, "q3_ms": timing.q3_us}
    return {f"{pass_name}_{name}": round(time_us / 1e3, 6) for name, time_us in of.items()}


def _comparison(found: Comparison) -> dict[str, Any]:
    """Below 1 is faster; `confidence` is that of the interval from `low` to `high`."""
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
