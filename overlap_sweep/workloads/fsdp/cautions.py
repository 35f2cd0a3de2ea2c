"""What to know before believing what is said about training steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any

from overlap_sweep.report.numbers import some_of
from overlap_sweep.results.estimate import NOTABLE_DRIFT, later_change
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments, slowed_gpus
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow
from overlap_sweep.workloads.fsdp.knobs import knobs_of, same_floor, same_training
from overlap_sweep.workloads.fsdp.result import limited_by_host, measured

LOSS_TOLERANCE = {"fp32": 1e-3}
DEFAULT_LOSS_TOLERANCE = 0.05
"""By how much of itself, and of the run's first one, a loss may be off: reductions in another order round differently,
and steps add it up. What is learnt by heart has a loss that is next to nothing, and rounding is all of it."""


def cautions(analysis: TrainingAnalysis) -> list[str]:
    """Returns the cautions, a sentence each; empty if all is well."""
    return [
        *_trains_differently(analysis),
        *_no_losses(analysis),
        *_wrong_losses(analysis),
        *_of_settings(analysis),
        *_drift(analysis),
        *slowed_gpus(analysis.points),
        *dict.fromkeys(warning for point in analysis.points if point.result for warning in point.result.warnings),
        *_environments(analysis),
    ]


def _environments(analysis: TrainingAnalysis) -> Iterator[str]:
    if len(environments(analysis.points)) > 1:
        yield "The points were measured in different environments; see tuning_report.json."


def _trains_differently(analysis: TrainingAnalysis) -> Iterator[str]:
    best, reference = analysis.best, analysis.reference
    if same_training(best.knobs) != same_training(reference.knobs):
        yield f"The best, {best.setting}, does not compute the same as {reference.setting}."


def _no_losses(analysis: TrainingAnalysis) -> Iterator[str]:
    for point in analysis.points:
        losses = measured(point.result).losses
        if None in losses:
            yield f"{point.name} has a loss that is no number from step {losses.index(None) + 1} on: it does not train."


def _wrong_losses(analysis: TrainingAnalysis) -> Iterator[str]:
    """Yields points whose losses differ from others': with equal seeds, schedules must not change the losses."""
    groups: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    for point in analysis.points:
        groups[repr(point.config["workload"].get("seed")), *same_training(knobs_of(point.config))].append(point)
    for group in groups.values():
        losses = [(point.name, _numbers(measured(point.result).losses)) for point in group]
        steps = min(len(of_point) for _, of_point in losses)
        middle = [statistics.median(of_point[step] for _, of_point in losses) for step in range(steps)]
        precision = str(group[0].config["precision"])
        tolerance = LOSS_TOLERANCE.get(precision, DEFAULT_LOSS_TOLERANCE)
        for name, of_point in losses:
            pairs = enumerate(zip(of_point, middle, strict=False))
            off = [(abs(a - b) / max(abs(b), abs(middle[0])), step) for step, (a, b) in pairs if b or middle[0]]
            error, step = max(off, default=(0.0, 0))
            if error > tolerance:
                yield (
                    f"{name} has a loss of {of_point[step]:.4g} after step {step + 1}, and those that compute the same "
                    f"{middle[step]:.4g}: don't trust it before you know why."
                )


def _numbers(losses: Iterable[float | None]) -> list[float]:
    """Returns the losses before the first None."""
    return [loss for loss in takewhile(lambda loss: loss is not None, losses) if loss is not None]


def _of_settings(analysis: TrainingAnalysis) -> Iterator[str]:
    """Yields a sentence for each problem, with the settings that have it."""
    doubts: dict[str, Callable[[TrainingRow], bool]] = {
        "What communication costs without overlap cannot be told from noise, so that hidden fractions say nothing": (
            lambda row: not row.hidden.known
        ),
        "Launch-bound: the host takes as long to enqueue a step as the device to run it, and what is hidden is hidden "
        "behind the host (larger batches, or compile.enabled=true, help)": lambda row: row.launch_bound,
        "The host limits the step without overlap, or without communication, which the hidden fraction is measured "
        "against": lambda row: row.baseline_launch_bound and not row.launch_bound,
        "The layers could not be compiled; `compiled` in training.csv says why": (
            lambda row: row.compiled.startswith("no:")
        ),
    }
    for doubt, holds in doubts.items():
        settings = [row.setting for row in analysis.rows if holds(row)]
        if settings:
            every = len(settings) == len(analysis.rows) > 1
            yield f"{doubt}: {'all settings' if every else some_of(settings, separator='; ')}."


def _drift(analysis: TrainingAnalysis) -> Iterator[str]:
    """Yields by how much the steps without communication, which many points measure alike, drifted."""
    times_us = defaultdict(list)
    for point in sorted(analysis.points, key=lambda point: (point.result and point.result.started) or ""):
        assert point.result
        # Where the host limits, it is the host's time.
        if "floor" not in limited_by_host(point.result):
            times_us[same_floor(knobs_of(point.config))].append(measured(point.result).step["floor"].median_us)
    changes = [later_change(of_floor) for of_floor in times_us.values() if len(of_floor) > 1]
    worst = max(changes, key=abs, default=0.0)
    if abs(worst) >= NOTABLE_DRIFT:
        yield f"Baselines drifted: the step without communication by up to {worst:+.0%}."
