"""Runs the command as it is, before anything is tried: how many processes it starts, how many steps a run should time,
and what its recordings say."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.optimizer import as_typed
from overlap_sweep.recorder.recording import PROFILER_STEPS, progress
from overlap_sweep.report.numbers import as_us, counted
from overlap_sweep.results.run_directory import LOG_FILE, Result, find_points
from overlap_sweep.runtime.kept import whole_result
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import limits
from overlap_sweep.search.knob_space import KnobSpace
from overlap_sweep.search.measured import Measurements, SearchInputs
from overlap_sweep.workloads.job.config import Resolved
from overlap_sweep.workloads.job.result import JobRun

FIRST_RUNS = 2
"""Runs of the command as it is before anything else: by two its noise is known, and whether it repeats its results."""
LEAST_S = 2.0
"""Time that a run's steps should be timed for: rare slow steps are in it about as often as in a training."""
PART_OF_REST = 0.25
"""The same as a share of what else a run takes, its start above all, if that is more."""
MOST_STEPS = 1000
"""Steps from which on runs differ from each other by more than their steps."""


def base(inputs: SearchInputs) -> KnobSpace:
    """Returns the command as it is. UsageError for an option with several values."""
    several = next((key for key, texts in inputs.values.items() if len(texts) > 1), None)
    if several:
        raise UsageError(f"optimize chooses what to try; give one value of {several}, or sweep it with launch.")
    if inputs.config.workload.name != "job":
        raise UsageError("hydra/sweeper=optimize is for workload=job.")
    return _space(inputs, [f"{key}={text}" for key, (text,) in inputs.values.items()])


def _space(inputs: SearchInputs, overrides: Sequence[str]) -> KnobSpace:
    """Returns the space without levers. UserError if its point makes no sense."""
    space = KnobSpace(inputs, overrides)
    point = space.point()
    space.label = f"{workloads.of(point).subject(point)} on {counted(point.world_size, 'rank')}"
    if reason := workloads.of(point).refusal(point):
        raise UserError(f"{reason}.")
    return space


def check_folder(directory: Path, point: Resolved) -> None:
    """Raises UserError if the directory has measurements of something else, with which none of the point's compares."""
    results = (whole_result(one) for one in find_points(directory))
    earlier = next((one.point for one in results if one and one.status == "ok"), None)
    if earlier is None:
        return
    if not isinstance(earlier, Resolved):
        raise UserError(f"{directory} has points of workload={earlier.workload.name}; give another directory.")
    if earlier.job.command != point.job.command:
        typed = as_typed(earlier.job.command)
        raise UserError(f"{directory} is of another command: {typed}; give that one, or another directory.")
    now, before = _compared(point), _compared(earlier)
    if other := next((name for name in now if now[name] != before[name]), None):
        was = "the script before it was changed" if other == "files" else f"{other}={override_value(before[other])}"
        raise UserError(f"{directory} is of {was}; give another directory.")


def _compared(point: Resolved) -> dict[str, object]:
    """Returns what must be equal for points of a command to be compared."""
    job, names = point.job, ("directory", "optimizer_steps", "metric", "metric_is")
    found: dict[str, object] = {f"job.{name}": getattr(job, name) for name in names}
    files = {name: digest for name, digest in job.files.items() if name not in job.values.values()}
    return found | {"runtime.device": point.runtime.device, "runtime.nodes": point.nodes, "files": files}


def first_runs(inputs: SearchInputs, space: KnobSpace, measurements: Measurements) -> tuple[KnobSpace, list[Result]]:
    """Returns the command as it is, with the number of ranks that it starts and of steps that a run should time, and
    FIRST_RUNS runs with traces. UserError if one has no times or no traces.

    The first run times as many steps as launch does. If that is too few, later runs time more, with which its own times
    are not compared.
    """

    def measured(space: KnobSpace, repetition: int = 0) -> Result:
        with limits.inspecting():
            (result,) = measurements.measure([space.job((), repetition)])
        if result is None:
            raise UserError(
                f"{measurements.budget.why_spent} before the command had run {FIRST_RUNS} times; raise it, "
                f"or if a run hangs, see worker.log in its folder in {measurements.directory}"
            )
        return result

    def changed(space: KnobSpace, key: str, value: int) -> KnobSpace:
        return _space(inputs, [*(one for one in space.overrides if not one.startswith(f"{key}=")), f"{key}={value}"])

    def once(space: KnobSpace) -> Result:
        # What has never worked would fail again.
        return measured(changed(space, "runtime.retries", 0))

    first = once(space)
    started, _ = progress(measurements.directory / first.name) or (0, 0)
    if first.status != "ok" and started and started != space.point().world_size:
        print(f"optimize: the command starts {started} training processes", flush=True)
        space = changed(space, "job.ranks", started)
        first = once(space)
    _check(first, measurements.directory)
    asked = first.point_as(Resolved).job.steps
    is_chosen = any(one.startswith("job.steps=") for one in space.overrides)

    def second(steps: int, why: str) -> tuple[KnobSpace, Result]:
        if steps == asked:
            return space, measured(space, 1)
        print(f"optimize: {why}, so runs time {steps} instead of {asked} of them", flush=True)
        more = changed(space, "job.steps", steps)
        return more, measured(more)

    steps = asked if is_chosen else worth_timing(first)
    again, result = second(steps, f"a step takes {as_us(first.measured_as(JobRun).mean_us)} us")
    if (fewer := max(asked, possible(result))) < steps:
        again, result = second(fewer, "the script has fewer steps than that")
    _check(result, measurements.directory)
    return again, [first, result]


def worth_timing(first: Result) -> int:
    """Returns how many steps a run should time, from one that timed as many as its point says, at least that."""
    run, asked = first.measured_as(JobRun), first.point_as(Resolved).job.steps
    if run.timed_by == "metric" or len(run.step.samples_us) < asked:
        # What is printed may be no step, and the command has no more of them.
        return asked
    timed_s = sum(run.step.samples_us) / 1e6
    wanted_s = max(LEAST_S, PART_OF_REST * ((first.wall_s or 0.0) - timed_s))
    return max(asked, min(ceil(wanted_s / timed_s * len(run.step.samples_us)), MOST_STEPS))


def possible(run: Result) -> int:
    """Returns how many steps a run can time of a command so that some can be profiled after them: as many as it was
    asked for, or what it had."""
    job = run.point_as(Resolved).job
    timed = len(run.measured_as(JobRun).step.samples_us) if run.status == "ok" else job.steps
    return job.steps if timed >= job.steps else timed - PROFILER_STEPS - job.profile_steps


def _check(result: Result, directory: Path) -> None:
    """Raises UserError if the run has no times or no traces. `directory`: that of all runs."""
    log = directory / result.name / LOG_FILE
    if result.status != "ok":
        outcomes.may_resume = False
        raise UserError(f"The command as it is cannot be measured: {result.reason.rstrip('.')}; its output: {log}")
    if not result.traces:
        outcomes.may_resume = False
        asked = result.point_as(Resolved).job.profile_steps
        why = next(iter(result.warnings), f"see {log}") if asked else "leave out profile=none and job.profile_steps=0."
        raise UserError(f"No trace was recorded: {why}")
