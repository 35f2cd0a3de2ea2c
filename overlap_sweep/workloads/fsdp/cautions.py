"""Caveats of the answers about training steps."""

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
"""Largest relative difference of a loss, by precision. Reductions in another order round differently, and steps add
that up. It is relative to the larger of the loss and the run's first loss: rounding dominates a loss near zero."""


def cautions(analysis: TrainingAnalysis) -> list[str]:
    """Returns the caveats, a sentence each; empty if there are none."""
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
        yield f"The best setting, {best.setting}, trains differently from {reference.setting}: compare their losses."


def _no_losses(analysis: TrainingAnalysis) -> Iterator[str]:
    for point in analysis.points:
        losses = measured(point.result).losses
        if None in losses:
            yield f"{point.name} diverges: the loss is NaN or infinite from step {losses.index(None) + 1} on."


def _wrong_losses(analysis: TrainingAnalysis) -> Iterator[str]:
    """Yields points with deviating losses: with equal seeds, schedules must not change the losses."""
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
                    f"{name} has a loss of {of_point[step]:.4g} after step {step + 1}, equivalent settings have "
                    f"{middle[step]:.4g}: find out why before you use it."
                )


def _numbers(losses: Iterable[float | None]) -> list[float]:
    """Returns the losses before the first None."""
    return [loss for loss in takewhile(lambda loss: loss is not None, losses) if loss is not None]


def _of_settings(analysis: TrainingAnalysis) -> Iterator[str]:
    """Yields a sentence for each problem, with the settings that have it."""
    problems: dict[str, Callable[[TrainingRow], bool]] = {
        "Hidden fraction unknown, since none - floor is within the noise": lambda row: not row.hidden.known,
        "Launch-bound, so the times say little about overlap (use larger batches or compile.enabled=true)": (
            lambda row: row.launch_bound
        ),
        "The baseline (none or floor) is launch-bound, so the hidden fraction is unreliable": (
            lambda row: row.baseline_launch_bound and not row.launch_bound
        ),
        "The layers could not be compiled (see compiled in training.csv)": lambda row: row.compiled.startswith("no:"),
    }
    for problem, holds in problems.items():
        settings = [row.setting for row in analysis.rows if holds(row)]
        if settings:
            every = len(settings) == len(analysis.rows) > 1
            yield f"{problem}: {'all settings' if every else some_of(settings, separator='; ')}."


def _drift(analysis: TrainingAnalysis) -> Iterator[str]:
    """Yields the drift of the floor, which many points measure alike."""
    times_us = defaultdict(list)
    for point in sorted(analysis.points, key=lambda point: (point.result and point.result.started) or ""):
        assert point.result
        # A launch-bound floor is the host's time.
        if "floor" not in limited_by_host(point.result):
            times_us[same_floor(knobs_of(point.config))].append(measured(point.result).step["floor"].median_us)
    changes = [later_change(of_floor) for of_floor in times_us.values() if len(of_floor) > 1]
    worst = max(changes, key=abs, default=0.0)
    if abs(worst) >= NOTABLE_DRIFT:
        yield f"Baselines drifted: the floor changed by up to {worst:+.0%} during the sweep."
