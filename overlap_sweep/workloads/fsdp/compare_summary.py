"""What `compare --output` writes about training runs in summary.json."""

from __future__ import annotations

from typing import Any

from overlap_sweep.results.provenance import describe_machine, launch_commands
from overlap_sweep.workloads.fsdp.compare import TelemetryComparison
from overlap_sweep.workloads.fsdp.compare_rows import telemetry_summary

SUMMARY_FILE = "summary.json"


def telemetry_summary_of(comparison: TelemetryComparison) -> dict[str, Any]:
    """What analysis knows; with the machines in a line each, and the commands that measured the runs."""
    machines, commands = {}, {}
    for dataset in comparison.datasets:
        machines[dataset.label] = list(
            dict.fromkeys(describe_machine(measured.run.environment) for measured in dataset.runs)
        )
        commands[dataset.label] = launch_commands([one.run.point for one in dataset.runs if one.run.point])
    return {**telemetry_summary(comparison), "machines": machines, "commands": commands}
