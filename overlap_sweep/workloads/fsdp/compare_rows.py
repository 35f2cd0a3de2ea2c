"""Training runs' comparisons as a table and for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from overlap_sweep.report.frame import Row, column_types
from overlap_sweep.workloads.fsdp.compare import MeasuredRun, TelemetryComparison, mean_ratios, settings_throughout
from overlap_sweep.workloads.fsdp.run_pairs import settings_of
from overlap_sweep.workloads.fsdp.telemetry_dips import Dip
from overlap_sweep.workloads.fsdp.telemetry_steps import QUANTITIES

COLUMNS = {
    **column_types("dataset", "reference", "run", "reference_run", "quantity", "value", "noise", "reference_value"),
    **column_types("reference_noise", "difference", "ratio", "ratio_noise", "verdict", "count", "reference_count"),
    **dict.fromkeys(("dataset", "reference", "run", "reference_run", "quantity", "verdict"), "string"),
    **dict.fromkeys(("count", "reference_count"), "Int64"),
}
"""One row per quantity and run; values are medians, units are in the quantities' names."""


def quantity_rows(comparison: TelemetryComparison) -> list[Row]:
    """With exactly the keys of COLUMNS."""
    rows = []
    for match in comparison.matches:
        for one in match.quantities.values():
            ours, theirs = one.ours, one.theirs
            row = {
                "dataset": match.dataset,
                "reference": match.reference,
                "run": match.ours.name,
                "reference_run": match.theirs.name,
                "quantity": one.quantity,
                "value": ours.median if ours else None,
                "noise": ours.noise if ours else None,
                "reference_value": theirs.median if theirs else None,
                "reference_noise": theirs.noise if theirs else None,
                "difference": ours.median - theirs.median if ours and theirs else None,
                "ratio": one.ratio,
                "ratio_noise": one.ratio_noise,
                "verdict": one.verdict,
                "count": ours.count if ours else None,
                "reference_count": theirs.count if theirs else None,
            }
            rows.append({name: row[name] for name in COLUMNS})
    return rows


def telemetry_summary(comparison: TelemetryComparison) -> dict[str, Any]:
    """Every dataset's runs with aggregates, settings and dips, and how they relate to the reference's. NaN where
    something is undefined."""
    datasets: dict[str, Any] = {
        dataset.label: {
            "path": str(dataset.path),
            "runs": {measured.name: _run(measured) for measured in dataset.runs},
            "ratios": {},
        }
        for dataset in comparison.datasets
    }
    for match in comparison.matches:
        datasets[match.dataset]["ratios"][match.ours.name] = {
            "reference_run": match.theirs.name,
            "settings_that_differ": {
                name: {match.reference: theirs, match.dataset: ours} for name, (theirs, ours) in match.settings.items()
            },
            "different_work": {
                name: {match.reference: theirs, match.dataset: ours}
                for name, (theirs, ours) in match.different_work.items()
            },
            "quantities": {
                name: {"ratio": one.ratio, "noise": one.ratio_noise, "verdict": one.verdict}
                for name, one in match.quantities.items()
            },
        }
    for label in comparison.candidates:
        matches = comparison.of(label)
        datasets[label]["mean_ratios"] = mean_ratios(matches)
        datasets[label]["settings_that_differ_throughout"] = {
            name: {comparison.reference: theirs, label: ours}
            for name, (theirs, ours) in settings_throughout(matches).items()
        }
    return {
        "kind": "telemetry",
        "reference": comparison.reference,
        "candidates": comparison.candidates,
        "quantities": {name: quantity.meaning for name, quantity in QUANTITIES.items()},
        "datasets": datasets,
        "unmatched": comparison.unmatched,
        "problems": comparison.problems,
        "warnings": comparison.warnings,
    }


def _run(measured: MeasuredRun) -> dict[str, Any]:
    selection = measured.selection
    return {
        "directory": str(measured.run.directory),
        "ranks": measured.run.ranks,
        "steps": {
            "measured": len(selection.measured),
            "warm_up": selection.warm_up,
            "profiled": selection.profiled,
            "incomplete": selection.incomplete,
        },
        "settings": settings_of(measured.run),
        "environment": measured.run.environment,
        "aggregates": {name: asdict(known) for name, known in measured.aggregates.items()},
        "marks_disagree_with_kernels": not measured.believed,
        "dips": [_dip(dip) for dip in measured.dips],
    }


def _dip(dip: Dip) -> dict[str, Any]:
    device = dip.device
    return {
        "step": dip.step,
        "rank": dip.rank,
        "other_ranks": dip.other_ranks,
        "hidden_share": dip.hidden_share,
        "usual_hidden_share": dip.usual_hidden_share,
        "less_hidden": dip.less_hidden,
        "step_ms": dip.step_ms,
        "usual_step_ms": dip.usual_step_ms,
        "slower": dip.slower,
        "device": device
        and {
            "rank": device.rank,
            "sample": msgspec.to_builtins(device.sample),
            "usual": msgspec.to_builtins(device.usual),
            "explains": device.explains,
            "reasons": device.reasons,
            "hottest": device.hottest,
        },
    }
