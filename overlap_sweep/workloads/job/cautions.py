"""Caveats of the answers on jobs."""

from __future__ import annotations

from collections.abc import Iterator

from overlap_sweep.report.numbers import some_of
from overlap_sweep.results.estimate import LEAST_RUNS
from overlap_sweep.results.provenance import different_environments, slowed_gpus
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.answer import JobAnalysis
from overlap_sweep.workloads.job.rows import JobRow
from overlap_sweep.workloads.job.setting import MULTICAST, VARIABLES

UNEVEN = 0.05
"""Share by which the mean exceeds the median from which on steps are said to vary."""


def cautions(analysis: JobAnalysis) -> list[str]:
    """Returns the caveats, a sentence each; empty if there are none."""
    recorded = (warning for point in analysis.points if point.result for warning in point.result.warnings)
    return [
        *_too_few_runs(analysis),
        *_different_work(analysis),
        *_timed_differently(analysis),
        *_uneven_steps(analysis),
        *_launch_bound(analysis),
        *_multicast(analysis),
        *slowed_gpus(analysis.points),
        *dict.fromkeys(recorded),
        *different_environments(analysis.points, _variables(analysis)),
    ]


def _too_few_runs(analysis: JobAnalysis) -> Iterator[str]:
    """Yields which settings cannot be judged where others can."""
    if analysis.unjudged and not analysis.too_few_runs:
        settings = some_of((row.setting for row in analysis.unjudged), separator="; ")
        yield f"Too few runs to judge {settings}: each setting needs at least {LEAST_RUNS}."


def _different_work(analysis: JobAnalysis) -> Iterator[str]:
    rows, work = analysis.rows, analysis.work
    unknown = [row.setting for row in rows if not row.samples_per_step]
    if work == "step" and any(row.samples_per_step or row.tokens_per_step for row in rows):
        yield (
            f"The samples of a step are unknown for {some_of(unknown, separator='; ')}, so settings are compared by "
            "the time of a step; give job.samples_per_step to all."
        )
    amounts = {row.samples_per_step if work == "sample" else row.tokens_per_step for row in rows}
    if work != "step" and len(amounts) > 1:
        differing = some_of(f"{amount:,.6g}" for amount in sorted(filter(None, amounts)))
        yield f"Settings differ in {work}s per step ({differing}): they train differently, so compare their losses."
    if len({row.calls_per_step for row in rows if row.calls_per_step}) > 1:
        calls = some_of(f"{row.calls_per_step} with {row.setting}" for row in rows if row.calls_per_step)
        yield (
            f"Steps have different numbers of optimizer calls ({calls}), so they may not be the same work; set "
            "job.optimizer_steps."
        )


def _timed_differently(analysis: JobAnalysis) -> Iterator[str]:
    if len({row.timed_by for row in analysis.rows}) > 1:
        by = some_of(f"{row.setting} by {row.timed_by}" for row in analysis.rows)
        yield f"Settings were timed in different ways ({by}), so small differences mean nothing."


def _uneven_steps(analysis: JobAnalysis) -> Iterator[str]:
    """Yields that a few slow steps make up much of the time, of which a short measurement has few."""
    shares = {row.setting: row.time_us / row.median_us - 1 for row in (analysis.best, analysis.reference)}
    asked = analysis.points[0].config["job"]["steps"]
    more = "; raise job.steps" if analysis.best.repeats >= asked * len(analysis.best.points) else ""
    if uneven := [f"{share:.0%} with {setting}" for setting, share in shares.items() if share > UNEVEN]:
        yield (
            f"Steps vary: the mean, which counts, is above the median by {some_of(uneven)}. Few steps measure rare "
            f"events (waiting for data, logging, garbage collection) poorly{more}."
        )


def _launch_bound(analysis: JobAnalysis) -> Iterator[str]:
    if bound := [row.setting for row in analysis.rows if row.launch_bound]:
        yield f"Launch-bound, so the times are the host's, not the GPU's: {some_of(bound, separator='; ')}."


def _multicast(analysis: JobAnalysis) -> Iterator[str]:
    on_gpus = analysis.case.ranks > 1 and analysis.points[0].config["runtime"]["device"] == "cuda"
    if on_gpus and not all(map(_has_multicast, analysis.rows)):
        yield "NVLink multicast was off (runtime.multicast=false); a training run with it may differ."


def _has_multicast(row: JobRow) -> bool:
    return MULTICAST in row.options


def _variables(analysis: JobAnalysis) -> set[str]:
    """Returns the environment variables that settings set, which make no other environment."""
    names = {name.removeprefix(VARIABLES) for row in analysis.rows for name in row.options}
    return names | (set(command.MULTICAST) if any(map(_has_multicast, analysis.rows)) else set())
