"""Rows of jobs: the steps of each setting, pooled over its runs, with the noise between runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from overlap_sweep.report.numbers import as_rate, as_us, shortened, some_of
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, estimate_of_mean
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.job.result import FoundCause, JobRun
from overlap_sweep.workloads.job.setting import Options, differing, identity, in_words, numbered, options_of

Work = Literal["sample", "token", "step"]
"""What settings are compared by the time of."""
LONGEST_GROUP = 40
"""Longest name of a process group in a cell, in characters."""


@dataclass(frozen=True)
class JobRow:
    """One setting over all its runs, or one run by itself."""

    setting: str
    """What distinguishes it from the other settings of its case, in words."""
    whole_setting: str
    """Everything that is set, in words."""
    options: Options
    points: list[Point]
    """Its runs, in the order of their starts."""
    step: Estimate
    """Time of a step: mean of the runs, with the noise between runs; NaN if no setting of the case was
    repeated."""
    between_runs_us: float | None
    """Standard deviation of the runs' means; None with one run."""
    changes: int = 0
    """Number of options that differ from the reference's."""
    standing: str = ""
    """`best`, `best, proven`, `reference`, or `only` if there is no other setting; empty for the others."""

    @cached_property
    def runs(self) -> list[JobRun]:
        return [point.measured_as(JobRun) for point in self.points]

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def repeats(self) -> int:
        return self.step.repeats

    @property
    def samples_per_step(self) -> float | None:
        """Returns the samples of a step; None if they are unknown, differ between runs, or if no step was timed."""
        return _common([None if run.unit else run.samples_per_step for run in self.runs])

    @property
    def tokens_per_step(self) -> float | None:
        """Returns the tokens of a step; None if they are unknown, differ between runs, or if no step was timed."""
        return _common([None if run.unit else run.tokens_per_step for run in self.runs])

    @property
    def unit(self) -> str | None:
        """Returns the metric's name if the time is that of a unit of it; None if it is that of a step."""
        return self.runs[0].unit or None

    def per(self, work: Work) -> Estimate:
        """Returns the time of a sample, token or step; of a step if the amount is unknown."""
        amounts = {"sample": self.samples_per_step, "token": self.tokens_per_step, "step": 1.0}
        return self.step.relative_to(amounts[work] or 1.0)

    @property
    def us_per_sample(self) -> float | None:
        return self.per("sample").time_us if self.samples_per_step else None

    @property
    def samples_per_s(self) -> float | None:
        return self.samples_per_step / self.time_us * 1e6 if self.samples_per_step else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens_per_step / self.time_us * 1e6 if self.tokens_per_step else None

    @property
    def units_per_s(self) -> float | None:
        return 1e6 / self.time_us if self.unit else None

    @property
    def rate(self) -> str:
        """Returns the work per second, in words; empty if it is unknown."""
        rates = {"samples/s": self.samples_per_s, "tokens/s": self.tokens_per_s, self.unit: self.units_per_s}
        return next((f"{as_rate(rate)} {name}" for name, rate in rates.items() if rate), "")

    @property
    def profiled_us(self) -> float | None:
        return _median(run.profiled_us for run in self.runs)

    @property
    def exposed_comm_us(self) -> float | None:
        return _median(run.exposed_comm_us for run in self.runs)

    @property
    def exposed_fraction(self) -> float | None:
        """Returns the exposed communication's share of the profiled step, at most 1; None without traces."""
        if self.exposed_comm_us is None or self.profiled_us is None:
            return None
        return min(self.exposed_comm_us / self.profiled_us, 1.0)

    @property
    def exposed_us_by_group(self) -> dict[str, float]:
        """Returns the exposed communication of each process group, the largest first."""
        found: dict[str, list[float]] = defaultdict(list)
        for run in self.runs:
            for one in run.groups:
                found[one.group].append(one.exposed_us)
        medians = {group: statistics.median(times_us) for group, times_us in found.items()}
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    @property
    def exposed_by_group(self) -> str | None:
        """Returns the same in words; None if it is unknown."""
        groups = self.exposed_us_by_group.items()
        texts = [f"{shortened(group, LONGEST_GROUP)} {as_us(time_us)}" for group, time_us in groups]
        return some_of(texts, separator="; ") or None

    @property
    def peak_memory_gb(self) -> float | None:
        """Returns the largest peak memory of any run; None on a CPU."""
        return max((run.peak_memory_gb for run in self.runs if run.peak_memory_gb is not None), default=None)

    @property
    def causes(self) -> list[FoundCause]:
        """Returns the findings of its first run that has traces, the most worthwhile first."""
        return next((run.causes for run in self.runs if run.causes), [])

    @property
    def main_cause(self) -> str | None:
        return self.causes[0].cause if self.causes else None

    @property
    def main_cause_share(self) -> float | None:
        return self.causes[0].share if self.causes else None

    @property
    def timed_by(self) -> str:
        return ", ".join(sorted({run.timed_by for run in self.runs}))

    @property
    def calls_per_step(self) -> int | None:
        calls = {run.calls_per_step for run in self.runs}
        return calls.pop() if len(calls) == 1 else None

    @property
    def median_us(self) -> float:
        """Returns the median of all steps: less than the mean if some are much slower than most."""
        return statistics.median(sample for run in self.runs for sample in run.step.samples_us)

    @property
    def launch_bound(self) -> bool:
        return is_launch_bound(self.points)

    @property
    def note(self) -> str:
        """Returns what distinguishes it from rows that are simply slower."""
        standing = "" if self.standing == "only" else self.standing
        wanted = any(point.config["job"]["profile_steps"] for point in self.points)
        notes = {"launch-bound": self.launch_bound, "not profiled": wanted and self.profiled_us is None}
        return ", ".join(filter(None, [standing, *(note for note, holds in notes.items() if holds)]))


def is_launch_bound(points: Iterable[Point]) -> bool:
    return any(point.result and point.result.launch_bound for point in points)


def _common(values: Sequence[float | None]) -> float | None:
    return values[0] if len(set(values)) == 1 else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def rows_of(points: Iterable[Point]) -> list[JobRow]:
    """Returns a row for each setting, the reference first and the others in the order of their first starts. `points`:
    the `ok` points of one case."""
    alike: dict[str, list[Point]] = defaultdict(list)
    for point in sorted(points, key=_start):
        alike[identity(point.config)].append(point)
    settings = [options_of(of_setting[0].config) for of_setting in alike.values()]
    shown = differing(settings) or None
    names = numbered(in_words(options, shown) for options in settings)
    whole_names = numbered(map(in_words, settings))
    between = verdict.noise_of_runs(map(_means_us, alike.values()))
    return [
        JobRow(
            setting=name,
            whole_setting=whole_name,
            options=options,
            points=of_setting,
            step=between.of_runs(_pooled(_timings(of_setting)), _means_us(of_setting)),
            between_runs_us=statistics.stdev(_means_us(of_setting)) if len(of_setting) > 1 else None,
            changes=len(differing([settings[0], options])),
        )
        for name, whole_name, options, of_setting in zip(names, whole_names, settings, alike.values(), strict=True)
    ]


def point_row(point: Point, standing: str = "") -> JobRow:
    """Returns the row of a single `ok` point, whose noise is that within the run alone."""
    options, timing = options_of(point.config), point.measured_as(JobRun).step
    name = in_words(options)
    return JobRow(name, name, options, [point], _pooled([timing]), None, standing=standing)


def _start(point: Point) -> tuple[str, str]:
    return (point.result and point.result.started) or "", point.name


def _timings(points: Iterable[Point]) -> list[Timing]:
    return [point.measured_as(JobRun).step for point in points]


def _means_us(points: Iterable[Point]) -> list[float]:
    return [statistics.fmean(timing.samples_us) for timing in _timings(points)]


def _pooled(timings: Sequence[Timing]) -> Estimate:
    """Returns the time of all runs, with the noise of their steps, without that between runs."""
    means_us = [statistics.fmean(timing.samples_us) for timing in timings]
    time_us = statistics.fmean(means_us)
    scaled = [
        [sample * time_us / mean_us for sample in timing.samples_us]
        for timing, mean_us in zip(timings, means_us, strict=True)
    ]
    return replace(estimate_of_mean(*scaled), time_us=time_us)
