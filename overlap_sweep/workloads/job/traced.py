"""What the traces of a job's ranks tell: exposed communication, of each process group, and its causes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.diagnosis import LISTED, Diagnosis
from overlap_sweep.report.diagnosis import lost
from overlap_sweep.workloads.job.result import FoundCause, GroupExposure

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.groups import GroupTotal

RANKS_NAMED = 16


def of_traces(paths: Sequence[Path], ranks_per_node: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Returns fields of `JobRun`, and a sentence for each trace that was left out or is missing. `ranks_per_node`: None
    on a single node.

    Not the diagnosis's other notes, which every recording has: that a step with the profiler's start is left out, and
    that recording slows the host.
    """
    if not paths:
        return {}, []
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.diagnosis.runs import read_runs

    runs = read_runs(paths, dict.fromkeys(paths, ranks_per_node) if ranks_per_node else None)
    warnings = [file.problem for run in runs for file in run.files if file.problem]
    # Traces that do not fit together are several runs: the one with most ranks is told of.
    run = max(runs, key=lambda run: len(run.files))
    if len(runs) > 1:
        left_out = ", ".join(file.path.name for other in runs if other is not run for file in other.files)
        warnings.append(f"Traces that belong to another run than {run.name} are left out: {left_out}.")
    if run.found is None:
        return {}, warnings
    if run.missing:
        warnings.append(f"No trace of rank {_some(run.missing)}: whether the other ranks wait for it is unknown.")
    step = lost(run.found.diagnosis)
    if step is None:
        return {}, [*warnings, "The traces have no step to diagnose."]
    return {
        "profiled_us": step.step_us,
        "exposed_comm_us": step.exposed_comm_us,
        "groups": [_exposure(total) for total in run.found.totals],
        "causes": _causes(run.found.diagnosis),
    }, warnings


def _exposure(total: GroupTotal) -> GroupExposure:
    title = " ".join(filter(None, (total.group, total.about and f"({total.about})"))) or total.backend
    name = f"{title}, ranks {_some(total.ranks)}" if total.ranks else title
    return GroupExposure(group=name, exposed_us=total.exposed_us, hidden_us=total.hidden_us)


def _some(ranks: Sequence[int]) -> str:
    """Returns the ranks, of many the first and the last."""
    if len(ranks) > RANKS_NAMED:
        return f"{ranks[0]},{ranks[1]}...{ranks[-1]}"
    return ",".join(map(str, ranks))


def _causes(diagnosis: Diagnosis) -> list[FoundCause]:
    """Returns the first finding of each cause; findings are sorted."""
    found: dict[str, FoundCause] = {}
    for one in diagnosis.findings:
        if one.cause != "none" and one.share >= LISTED and one.cause not in found:
            found[one.cause] = FoundCause(
                cause=one.cause, where=one.where, lost_us=one.lost_us, share=min(one.share, 1.0), advice=one.try_
            )
    return list(found.values())
