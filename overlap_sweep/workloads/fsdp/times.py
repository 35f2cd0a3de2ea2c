"""The times of training steps, comparable between points that were measured minutes apart, with their noise."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, estimate, normalised, pooled_none
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads import Sample
from overlap_sweep.workloads.fsdp.config import HOST_LIMITS
from overlap_sweep.workloads.fsdp.knobs import knobs_of, same_floor
from overlap_sweep.workloads.fsdp.result import VARIANTS, TrainingRun


def measured(result: Result | None) -> TrainingRun:
    """Returns what a point that is ok measured."""
    assert result
    return result.measured_as(TrainingRun)


def limited_by_host(result: Result) -> list[str]:
    """Returns the variants of the step that the host took nearly as long to enqueue as the device to run."""
    run = measured(result)
    limited = {name for name in VARIANTS if run.host_us.get(name, 0.0) >= HOST_LIMITS * run.step[name].median_us}
    return [name for name in VARIANTS if name in limited or (name == "point" and result.launch_bound)]


def sample(result: Result) -> Sample:
    """Returns the step for a search over knobs. A step that the host limits counts all the same, but not relative to
    its floor: that is the host's time, too, and the slowest host would seem the fastest setting."""
    run = measured(result)
    point_us, none_us, floor_us = (tuple(run.step[name].samples_us) for name in ("point", "none", "floor"))
    work = str(sorted(same_floor(knobs_of(result.point)), key=str))
    return Sample(point_us, () if limited_by_host(result) else floor_us, none_us, work, run.samples_per_step)


class Hidden(NamedTuple):
    """(none - point) / (none - floor)."""

    fraction: float
    noise: float

    @property
    def known(self) -> bool:
        """Whether it says anything: an interval as wide as all the communication there is leaves nothing."""
        return self.noise < 0.5

    @property
    def in_words(self) -> str:
        """`37% \N{PLUS-MINUS SIGN} 8%`; `-` where it says nothing."""
        return f"{self.fraction:.0%} \N{PLUS-MINUS SIGN} {self.noise:.0%}" if self.known else "-"


def hidden(step: Mapping[str, Timing]) -> Hidden:
    """Returns what is hidden, which is not known where `none` takes no longer than `floor`: there is nothing to hide.

    The medians of the differences of samples that were taken side by side, and their noises; the quotient's noise is
    that of its parts, in quadrature.
    """
    samples = (step[name].samples_us for name in ("point", "none", "floor"))
    rounds = list(zip(*samples, strict=True))
    saved = [none - point for point, none, _ in rounds]
    comm = [none - floor for _, none, floor in rounds]
    comm_us = statistics.median(comm)
    if comm_us <= 0:
        return Hidden(math.nan, math.inf)
    fraction = statistics.median(saved) / comm_us
    return Hidden(fraction, math.hypot(estimate(saved).noise_us, fraction * estimate(comm).noise_us) / comm_us)


@dataclass(frozen=True)
class StepTimes:
    """The times of a step in one setting, over all its points."""

    step: Estimate
    """Its noise is also what points of equal settings are apart, where that was measured."""
    none: Estimate
    """Every collective alone on the device."""
    floor: Estimate
    """No communication."""
    hidden: Hidden
    """By the rounds of its points."""
    relative: bool
    """Times are relative to the floors that were measured beside it; else as measured."""

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def none_us(self) -> float:
        return self.none.time_us

    @property
    def floor_us(self) -> float:
        return self.floor.time_us

    @property
    def speedup(self) -> float:
        """Over the same step with every collective alone on the device."""
        return self.none_us / self.time_us

    @property
    def comm_us(self) -> float:
        """What communication adds to the step where nothing hides it."""
        return self.none_us - self.floor_us

    @property
    def exposed_us(self) -> float:
        """What it adds as configured."""
        return self.time_us - self.floor_us


def times_as_measured(point: Point) -> StepTimes:
    """Returns the times of a point that is ok, beside no other."""
    (steps,) = _steps([point])
    step, none, floor = (replace(estimate(steps[name].samples_us), time_us=steps[name].median_us) for name in VARIANTS)
    return StepTimes(step, none, floor, hidden(steps), relative=False)


def compared_times(settings: Sequence[Sequence[Point]]) -> list[StepTimes]:
    """Returns the times of each setting's points, for all settings of a case.

    A point can be told relative to its own floor, the step without communication that was measured in turns with it:
    what makes the whole machine slower cancels, and the floor's own noise comes in. Which of the two is larger is seen
    at settings that were measured in several points: relative times are used where they bring those closer together,
    and where there are none such, since drift of some percent is common. A point that the host limits in any variant
    takes no part: its floor is the host's time, and dividing by it would make the slowest host the fastest setting.
    """
    works = [same_floor(knobs_of(points[0].config)) for points in settings]
    floors: dict[frozenset[tuple[str, Any]], list[Timing]] = defaultdict(list)
    for work, points in zip(works, settings, strict=True):
        floors[work] += [step["floor"] for step in _steps(point for point in points if not _limited([point]))]
    repeated = [(_steps(points), _limited(points)) for points in settings if len(points) > 1]
    free = [steps for steps, limited in repeated if not limited]
    as_measured = _scatter([step["point"].median_us for step in steps] for steps in free)
    to_floor = _scatter([step["point"].median_us / step["floor"].median_us for step in steps] for steps in free)
    relative = as_measured is None or to_floor is None or to_floor < as_measured
    between = verdict.scatters_of_steps(
        (
            ([_step(step, over_floor=relative and not limited) for step in steps], limited)
            for steps, limited in repeated
        ),
        settings[0][0].config["runtime"]["device"],
    )
    # Relative to nothing but itself, a time gains the floor's noise for nothing.
    pools = [floors[work] if relative and len(floors[work]) > 1 else [] for work in works]
    return [
        _pooled(_steps(points), [] if (limited := _limited(points)) else pool, between[limited])
        for points, pool in zip(settings, pools, strict=True)
    ]


def _pooled(steps: Sequence[dict[str, Timing]], floors: Sequence[Timing], between: verdict.Scatter) -> StepTimes:
    """Returns the times of one setting, relative to the `floors` if there are any."""
    if floors:
        floor = pooled_none(floors)
        step, none = (normalised([(one[name], one["floor"]) for one in steps], floor) for name in ("point", "none"))
    else:
        step, none, floor = (pooled_none([one[name] for one in steps]) for name in VARIANTS)
    rounds = {name: together([one[name] for one in steps]) for name in VARIANTS}
    return StepTimes(between.added_to(step, len(steps)), none, floor, hidden(rounds), relative=bool(floors))


def _steps(points: Iterable[Point]) -> list[dict[str, Timing]]:
    return [measured(point.result).step for point in points]


def _limited(points: Iterable[Point]) -> bool:
    """Returns whether the host limits any variant of any of them."""
    return any(limited_by_host(point.result) for point in points if point.result)


def _step(step: Mapping[str, Timing], *, over_floor: bool) -> Estimate:
    if over_floor:
        floor = step["floor"]
        return normalised([(step["point"], floor)], Estimate(floor.median_us, 0.0, 1)).relative_to(floor.median_us)
    return estimate(step["point"].samples_us)


def _scatter(times: Iterable[Sequence[float]]) -> float | None:
    """Returns the relative standard deviation within each sequence, over all; None where none has two times."""
    squares, free = 0.0, 0
    for alike in times:
        mean = statistics.mean(alike)
        squares += sum((time / mean - 1) ** 2 for time in alike)
        free += len(alike) - 1
    return math.sqrt(squares / free) if free else None


def together(timings: Sequence[Timing]) -> Timing:
    """Returns one timing with the samples of all."""
    if len(timings) == 1:
        return timings[0]
    samples_us = [sample_us for timing in timings for sample_us in timing.samples_us]
    q1_us, median_us, q3_us = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(median_us, q1_us, q3_us, samples_us)
