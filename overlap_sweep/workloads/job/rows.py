"""Settings of jobs: what may differ between points that are compared, and how it is called. Their rows: the steps of
each setting, pooled over its runs, with the noise between runs."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import NamedTuple

from overlap_sweep.levers import OPTION as LEVERS
from overlap_sweep.levers import flat, of_option
from overlap_sweep.recorder.recording import Number, TrainingState
from overlap_sweep.report.numbers import as_us, counted, shortened
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.traces import on_nodes
from overlap_sweep.study import CaseAnalysis, SettingRow, Times
from overlap_sweep.study.settings import Naming, Options
from overlap_sweep.workloads.job.command import in_words
from overlap_sweep.workloads.job.config import Resolved
from overlap_sweep.workloads.job.result import FoundCause, JobRun, rate_in_words

VALUES, VARIABLES = "job.values.", "job.env."
CONNECTIONS, MULTICAST = "runtime.max_connections", "runtime.multicast"
LONGEST_VALUE = 60


def options_of(config: Resolved) -> Options:
    """Returns the setting of a point, by names such as `job.values.bucket`."""
    job, runtime = config.job, config.runtime
    # Sorted, since a search has other orders than a sweep.
    found = {f"{VALUES}{name}": value for name, value in sorted(job.values.items())}
    found |= {f"{VARIABLES}{name}": value for name, value in sorted(job.env.items())}
    found |= {f"{LEVERS}{name}": value for name, value in sorted(flat(job.levers))}
    found |= {CONNECTIONS: runtime.max_connections, MULTICAST: runtime.multicast or None}
    return {name: value for name, value in found.items() if value is not None}


def script_of(config: Resolved) -> str:
    """Returns a short name of what the command runs, or the placeholder of the value that names it."""
    name, values = config.model.name, config.job.values.items()
    return next((f"{{{key}}}" for key, value in values if PurePath(in_words(value)).name == name), name)


def _brief(name: str) -> str:
    for prefix in (VALUES, VARIABLES, LEVERS, "runtime."):
        name = name.removeprefix(prefix)
    return name


def _value(value: Scalar) -> str:
    text = in_words(value)
    # Of a file its name is enough: settings that are called the same are numbered.
    is_path = "/" in text and len(text.split()) == 1
    return shortened(PurePath(text).name if is_path else text, LONGEST_VALUE)


NAMING = Naming(brief=_brief, value=_value)


class JobCase(NamedTuple):
    """What must be equal for jobs to be compared; the values in the command and its environment may differ."""

    script: str
    ranks: int
    device: str
    command: str
    """The command line as configured, with its placeholders."""
    directory: str
    content: str
    """Digest of the script; empty if it is unknown, or if a value names the script."""
    optimizer_steps: int | None
    metric: str | None
    metric_is: str
    unit: str
    """The metric's name if times are those of a unit of it."""
    nodes: int

    @property
    def brief(self) -> str:
        return f"{self.script}, {counted(self.ranks, 'rank')}{on_nodes(self.nodes)}"

    def __str__(self) -> str:
        return f"{self.brief} on {self.device}"


@dataclass(frozen=True)
class JobTimes(Times):
    """The time of a step: mean of the runs, with the noise between them; NaN if no setting of the case was repeated."""

    between_runs_us: float | None
    """Standard deviation of the runs' means; None with one run."""


@dataclass(frozen=True)
class JobRow(SettingRow[JobTimes]):
    @cached_property
    def runs(self) -> list[JobRun]:
        return [point.measured_as(JobRun) for point in self.points]

    @property
    def samples_per_step(self) -> float | None:
        """Returns the samples of a step; None if they are unknown, differ between runs, or if no step was timed."""
        return _common([None if run.unit else run.samples_per_step for run in self.runs])

    @property
    def tokens_per_step(self) -> float | None:
        """Returns the tokens of a step; None as above."""
        return _common([None if run.unit else run.tokens_per_step for run in self.runs])

    @property
    def amounts(self) -> Mapping[str, float | None]:
        return {"sample": self.samples_per_step, "token": self.tokens_per_step}

    @property
    def unit(self) -> str | None:
        """Returns the metric's name if the time is that of a unit of it; None if it is that of a step."""
        return self.runs[0].unit or None

    @property
    def must_compute_the_same(self) -> bool:
        return any(name.startswith(LEVERS) for name in self.options)

    @property
    def trains_differently(self) -> list[str]:
        levers = ((name, value, of_option(name)) for name, value in self.options.items())
        return [
            f"{name}={in_words(value)}" for name, value, one in levers if one and one.results == "trains differently"
        ]

    @property
    def states(self) -> list[TrainingState]:
        return [run.state for run in self.runs if run.state]

    @property
    def gradients_norm(self) -> float | None:
        return _median(_finite(one.gradients_norm) for one in self.states)

    @property
    def parameters_norm(self) -> float | None:
        return _median(_finite(one.parameters_norm) for one in self.states)

    @property
    def loss_of_step(self) -> float | None:
        return _median(_finite(one.loss) for one in self.states)

    @property
    def rate(self) -> str:
        """Returns the work per second, in words; empty if it is unknown."""
        return rate_in_words(self.time_us, self.unit, self.samples_per_step, self.tokens_per_step)

    @property
    def in_words(self) -> str:
        time = "" if self.unit else f"{as_us(self.time_us)} us per step"
        return ", ".join(filter(None, [time, self.rate]))

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
    def peak_memory_gb(self) -> float | None:
        return max((run.peak_memory_gb for run in self.runs if run.peak_memory_gb is not None), default=None)

    @property
    def causes(self) -> list[FoundCause]:
        """Returns the findings of its first run that has traces, the most worthwhile first."""
        return next((run.causes for run in self.runs if run.causes), [])

    @property
    def timed_by(self) -> str:
        return ", ".join(sorted({run.timed_by for run in self.runs}))

    @property
    def calls_per_step(self) -> int | None:
        calls = {run.calls_per_step for run in self.runs}
        return calls.pop() if len(calls) == 1 else None

    @property
    def garbage_share(self) -> float | None:
        """Returns the share of the steps' time by which those with a long garbage collection are longer than others;
        None if there is none."""
        if not any(run.long_collections for run in self.runs):
            return None
        return sum(run.longer_us for run in self.runs) / sum(sum(run.step.samples_us) for run in self.runs)

    @property
    def median_us(self) -> float:
        """Returns the median of all steps: less than the mean if some are much slower than most."""
        return statistics.median(time_us for run in self.runs for time_us in run.times_us)

    @property
    def notes(self) -> Mapping[str, bool]:
        wanted = any(point.config_as(Resolved).job.profile_steps for point in self.points)
        gave_up = any(run.gave_up for run in self.runs)
        unprofiled = wanted and not gave_up and self.profiled_us is None
        return {"launch-bound": self.launch_bound, "given up": gave_up, "not profiled": unprofiled}


Analysis = CaseAnalysis[JobCase, JobRow]


def _common(values: Sequence[float | None]) -> float | None:
    return values[0] if len(set(values)) == 1 else None


def _finite(number: Number) -> float | None:
    return None if isinstance(number, str) else number


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
