"""Training runs' comparisons as a table and for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from overlap_sweep.report.frame import Row, column_types
from overlap_sweep.results.provenance import describe_machine, launch_commands
from overlap_sweep.workloads.fsdp.compare import (
    MeasuredRun,
    TelemetryComparison,
    mean_ratios,
    settings_of,
    settings_throughout,
)
from overlap_sweep.workloads.fsdp.telemetry_steps import QUANTITIES

SUMMARY_FILE = "summary.json"
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
    """Returns the content of summary.json: every dataset's runs with aggregates, settings and dips, how they relate to
    the reference's, and the machines and commands that measured them. NaN where something is undefined."""
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
        "machines": {
            dataset.label: list(dict.fromkeys(describe_machine(one.run.environment) for one in dataset.runs))
            for dataset in comparison.datasets
        },
        "commands": {
            dataset.label: launch_commands([one.run.point for one in dataset.runs if one.run.point])
            for dataset in comparison.datasets
        },
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
        "dips": measured.dips,
    }
