"""The times of settings whose points have one timing each: pooled over the points, with the noise between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point


@dataclass(frozen=True)
class StepTime:
    """The time of a step, or of what else a point repeats."""

    step: Estimate


def time_of_point(timing: Timing) -> StepTime:
    """Returns the median of a point's samples, with the noise within it."""
    return StepTime(estimate(timing.samples_us))


def step_times(settings: Sequence[Sequence[Point]], timing: Callable[[Point], Timing]) -> list[StepTime]:
    """Returns the time of each setting: the mean of its points, with the noise between points of all settings, and what
    such points typically differ by."""
    samples_us = [[timing(point).samples_us for point in points] for points in settings]
    limited = [any(point.launch_bound for point in points) for points in settings]
    device_kind = settings[0][0].recorded["runtime"]["device"]
    return [StepTime(step) for step in verdict.times_of_steps(samples_us, limited, device_kind)]
