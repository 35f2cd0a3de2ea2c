"""From recordings, printed times and traces to the fields of a point's Result."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from overlap_sweep.diagnosis import LISTED, Diagnosis
from overlap_sweep.recorder.recording import NOT_FINITE, Number, Recording, TrainingState
from overlap_sweep.report.diagnosis import lost
from overlap_sweep.report.numbers import some_of
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.measured import summarise
from overlap_sweep.results.traces import ranks_of_each
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.config import Resolved
from overlap_sweep.workloads.job.garbage import changes_collecting, collecting_share, long_collections
from overlap_sweep.workloads.job.output import AMOUNTS, Output, amount_of
from overlap_sweep.workloads.job.result import MOST, FoundCause, GroupExposure, JobRun

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.groups import GroupTotal

RANKS_NAMED = 8
HOST_BOUND = 0.1
"""Share of a step for which the GPU waits for the host, from which on a step is launch-bound."""


def fields_of(
    point: Resolved,
    directory: Path,
    recordings: Sequence[Recording],
    output: Output | None,
    losses: Sequence[str],
    warnings: Sequence[str],
) -> dict[str, object]:
    """Returns the measured fields of the point's Result, the given warnings last."""
    job = point.job
    amounts = {name: command.amount(point, name) for name in AMOUNTS}
    unit, timed_by = "", "metric"
    # Other ranks may have been ended before they recorded anything.
    slow = [one for one in recordings if one.gave_up]
    if output:
        times_us = output.times_us()
        if job.metric_is == "rate":
            amount = amounts.get(amount_of(job) or "")
            unit, times_us = ("", [amount * one for one in times_us]) if amount else (output.name, times_us)
    else:
        times_us, timed_by = slowest_us(slow or recordings)
    # What the output says may be of other steps.
    collections = [] if output else long_collections(slow or recordings, len(times_us))
    traces = [one.trace for one in recordings if one.trace and not slow and (directory / one.trace).exists()]
    traced, trace_warnings = read_traces([directory / name for name in traces], ranks_of_each(point))
    memory_gb = [one.peak_memory_gb for one in recordings if one.peak_memory_gb is not None]
    measured = JobRun(
        step=summarise(times_us),
        timed_by=timed_by,  # type: ignore[arg-type]
        long_collections=[] if changes_collecting(point) else collections,
        collecting_share=collecting_share(recordings),
        unit=unit,
        calls_per_step=recordings[0].calls_per_step if recordings else None,
        peak_memory_gb=max(memory_gb, default=None),
        gave_up=bool(slow),
        losses=list(losses)[:MOST],
        state=state_of_all(recordings, job.ranks),
        samples_per_step=amounts["samples_per_step"],
        tokens_per_step=amounts["tokens_per_step"],
        **traced,
    )
    if measured.profiled_us is not None and not output and recordings[0].device == "cuda":
        measured.causes = without_profiler(measured.causes, measured.profiled_us, measured.mean_us)
    return {
        "measured": measured,
        "objective_us": measured.mean_us / measured.amount,
        "launch_bound": is_launch_bound(measured),
        "traces": traces,
        "warnings": [*_warnings(point, recordings, len(times_us), traces), *trace_warnings, *warnings],
        "environment": recordings[0].environment if recordings else {},
    }


def state_of_all(recordings: Sequence[Recording], ranks: int) -> TrainingState | None:
    """Returns the state of the training from those of its ranks; None unless all have recorded it, at one step."""
    states = [one.state for one in recordings if one.state]
    if len(states) != ranks or len({one.step for one in states}) > 1:
        return None
    return TrainingState(
        step=states[0].step,
        gradients_norm=_together([one.gradients_norm for one in states], math.hypot),
        gradients_sum=_together([one.gradients_sum for one in states], _sum),
        # Ranks without gradients have none.
        signed_sums=[_together(ones, _sum) for ones in zip(*(one.signed_sums for one in states), strict=False)],
        layout=key_of({"layouts": [one.layout for one in states]})[:8],
        parameters_norm=_together([one.parameters_norm for one in states], math.hypot),
        parameters_sum=_together([one.parameters_sum for one in states], _sum),
        loss=_together([one.loss for one in states], lambda *losses: fmean(losses)),
        is_short=any(one.is_short for one in states),
    )


def _sum(*numbers: float) -> float:
    return math.fsum(numbers)


def _together(numbers: Sequence[Number], combined: Callable[..., float]) -> Number:
    if NOT_FINITE in numbers:
        return NOT_FINITE
    known = [one for one in numbers if one is not None]
    return combined(*known) if known else None


def without_profiler(causes: Sequence[FoundCause], profiled_us: float, time_us: float) -> list[FoundCause]:
    """Returns the causes that a step has without the profiler, which slows the host down: it is no longer late by what
    a profiled step takes longer."""
    slower_us = max(profiled_us - time_us, 0.0)
    found = []
    for one in causes:
        if one.cause == "host_bound":
            lost_us = max(one.lost_us - slower_us, 0.0)
            one = structs.replace(one, lost_us=lost_us, share=min(lost_us / profiled_us, 1.0))
        if one.share >= LISTED:
            found.append(one)
    return sorted(found, key=lambda one: -one.share)


def is_launch_bound(run: JobRun) -> bool:
    """Returns whether the GPU waits for the host for much of a step."""
    lost_us = next((one.lost_us for one in run.causes if one.cause == "host_bound"), 0.0)
    return run.timed_by == "gpu" and lost_us >= HOST_BOUND * run.mean_us


def slowest_us(recordings: Sequence[Recording]) -> tuple[list[float], Literal["gpu", "host"]]:
    """Returns the time of every step on the slowest rank, by the GPUs' clocks if all have them. Not of the slowest rank
    of each step: ranks don't wait for each other at its end, so what one loses in a step it gains in the next."""
    on_gpu = all(len(one.gpu_us) == len(one.host_us) for one in recordings)
    times_by_rank = [one.gpu_us if on_gpu else one.host_us for one in recordings]
    # A rank that was still at work when the command ended has recorded less.
    steps = min(map(len, times_by_rank))
    return max((times_us[:steps] for times_us in times_by_rank), key=sum), "gpu" if on_gpu else "host"


def _warnings(point: Resolved, recordings: Sequence[Recording], timed: int, traces: Sequence[str]) -> list[str]:
    job, device = point.job, point.runtime.device
    found = []
    gave_up = any(one.gave_up for one in recordings)
    if timed < job.steps and not gave_up and not any(one.problems for one in recordings):
        found.append(f"The command ended after {timed} timed steps of {job.steps}.")
    if other := [one.rank for one in recordings if one.device != device]:
        did = "used a GPU" if device == "cpu" else "used no GPU"
        found.append(f"runtime.device={device}, but {_ranks(other)} {did}.")
    if not recordings:
        found.append("Only the metric was read: no rank recorded its steps, so memory and communication are unknown.")
    elif not gave_up and (gone := [one.rank for one in recordings if one.trace and one.trace not in traces]):
        found.append(f"The traces of {_ranks(gone)} are gone.")
    problems: dict[str, list[int]] = defaultdict(list)
    for one in recordings:
        for problem in one.problems:
            problems[problem].append(one.rank)
    return [*(f"{_ranks(ranks).capitalize()}: {problem}" for problem, ranks in problems.items()), *found]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some_of(ranks, RANKS_NAMED)}"


def read_traces(paths: Sequence[Path], ranks_per_node: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Returns fields of `JobRun`, and a sentence for each trace that was left out or is missing: not the diagnosis's
    other notes, which every recording has. `ranks_per_node`: None on a single node."""
    if not paths:
        return {}, []
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.diagnosis.runs import read_runs

    runs = read_runs(paths, dict.fromkeys(paths, ranks_per_node) if ranks_per_node else None)
    warnings = [file.problem for run in runs for file in run.files if file.problem]
    # Traces that do not fit together are several runs: the one with most ranks counts.
    run = max(runs, key=lambda run: len(run.files))
    if len(runs) > 1:
        left_out = ", ".join(file.path.name for other in runs if other is not run for file in other.files)
        warnings.append(f"Traces that belong to another run than {run.name} are left out: {left_out}.")
    if run.found is None:
        return {}, warnings
    if run.missing:
        warnings.append(f"No trace of rank {_numbers(run.missing)}: whether the other ranks wait for it is unknown.")
    step = lost(run.found.diagnosis)
    if step is None:
        return {}, [*warnings, "The traces have no step to diagnose."]
    return {
        "profiled_us": step.step_us,
        "exposed_comm_us": step.exposed_comm_us,
        "groups": [
            GroupExposure(group=_group(total), exposed_us=total.exposed_us, hidden_us=total.hidden_us)
            for total in run.found.totals
        ],
        "causes": _causes(run.found.diagnosis),
    }, warnings


def _group(total: GroupTotal) -> str:
    title = " ".join(filter(None, (total.group, total.about and f"({total.about})"))) or total.backend
    return f"{title}, ranks {_numbers(total.ranks)}" if total.ranks else title


def _numbers(ranks: Sequence[int]) -> str:
    """Returns the ranks, of many the first and the last."""
    many = len(ranks) > 2 * RANKS_NAMED
    return f"{ranks[0]},{ranks[1]}...{ranks[-1]}" if many else ",".join(map(str, ranks))


def _causes(diagnosis: Diagnosis) -> list[FoundCause]:
    found: dict[str, FoundCause] = {}
    for one in diagnosis.findings:
        if one.cause != "none" and one.share >= LISTED and one.cause not in found:
            found[one.cause] = FoundCause(
                cause=one.cause, where=one.where, lost_us=one.lost_us, share=min(one.share, 1.0), advice=one.try_
            )
    return list(found.values())
