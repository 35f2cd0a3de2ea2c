"""Measurements of a point of workload=job: the steps of the user's own command."""

from statistics import fmean
from typing import Annotated, Literal

import msgspec

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import Count, Gb, Name, Us
from overlap_sweep.errors import UserError
from overlap_sweep.recorder.recording import TrainingState
from overlap_sweep.report.numbers import as_rate
from overlap_sweep.results.measured import Measured, Timing
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads import Sample
from overlap_sweep.workloads.job.command import as_measured, command_line
from overlap_sweep.workloads.job.config import Config, Resolved

MOST = 1000
"""Most entries of a list."""
_Amount = Annotated[float, msgspec.Meta(gt=0, lt=1e18)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Text = Annotated[str, msgspec.Meta(max_length=2000)]


class GroupExposure(msgspec.Struct, kw_only=True):
    """The communication of one process group in a profiled step: medians of the rank that exposes most."""

    group: _Text
    """Name, description and ranks; the library's name if the traces do not tell."""
    exposed_us: Annotated[float, msgspec.Meta(ge=0)]
    """Time with no computation at the same time."""
    hidden_us: Annotated[float, msgspec.Meta(ge=0)]


class FoundCause(msgspec.Struct, kw_only=True):
    """A cause of exposed communication, as `analyze.py diagnose` found it when the point was measured."""

    cause: Name
    where: _Text = ""
    lost_us: Annotated[float, msgspec.Meta(ge=0)]
    """Upper bound of what fixing it could gain, per step."""
    share: _Share
    """The same as a share of the step."""
    advice: _Text = ""
    """What to try."""


class JobRun(Measured, kw_only=True, tag="job"):
    """The timed steps of a command."""

    is_users_program = True

    step: Timing
    """Times of the steps, of the slowest rank; with a rate as metric and no amount of work, those per unit."""
    timed_by: Literal["gpu", "host", "metric"]
    """Events on the GPUs, the ranks' clocks, or the metric in the output."""
    long_collections: list[Annotated[int, msgspec.Meta(ge=0)]] = msgspec.field(default_factory=list)
    """Numbers of the samples in `step`, from 0, in which Python collected garbage for long. They are few, by chance,
    and do not count."""
    collecting_share: _Share | None = None
    """Share of the timed steps in which the rank that collects garbage longest does; null if unknown."""
    samples_per_step: _Amount | None = None
    tokens_per_step: _Amount | None = None
    unit: Name = ""
    """Name of the metric if `step` is a time per unit of it; empty if `step` is the time of a step."""
    calls_per_step: Count | None = None
    """Calls of optimizers, or of overlap_sweep.step(), in a step; null if only a metric was read."""
    peak_memory_gb: Gb | None = None
    """Largest peak memory of tensors on any rank's GPU, 10^9 bytes; null on a CPU."""
    gave_up: bool = False
    """Whether its first steps took longer than a search allowed, so that it has only these, and no traces."""
    state: TrainingState | None = None
    """At the end of the skipped steps: norms and sums over all ranks, also of what several of them have alike, and the
    mean of the losses that ranks gave."""
    losses: Annotated[list[_Text], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=list)
    """The first losses that `job.loss` found, as they were printed."""
    profiled_us: Us | None = None
    """Time of a profiled step, median; null without traces."""
    exposed_comm_us: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Time of a profiled step in which communication runs and no computation; null without traces."""
    groups: Annotated[list[GroupExposure], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=list)
    causes: Annotated[list[FoundCause], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=list)
    """The first finding of each cause, the most worthwhile cause first."""

    def __post_init__(self) -> None:
        if not {*self.long_collections} < {*range(len(self.step.samples_us))}:
            raise ValueError("long_collections must be some of the steps, not all")

    def check(self, result: Result) -> None:
        try:
            command_line(result.point_as(Resolved))
        except UserError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def as_asked(cls, config: PointConfig) -> dict[str, object]:
        assert isinstance(config, Config)
        return as_measured(config)

    @property
    def times_us(self) -> list[float]:
        """Returns the times of the steps that count."""
        left_out = {*self.long_collections}
        return [time_us for step, time_us in enumerate(self.step.samples_us) if step not in left_out]

    @property
    def longer_us(self) -> float:
        """Returns the time by which the steps that don't count are longer than others."""
        return max(0.0, sum(self.step.samples_us) - self.mean_us * len(self.step.samples_us))

    @property
    def mean_us(self) -> float:
        """Returns the time of the steps that count over their number. What a run computes in an hour follows from the
        mean, to which rare slow steps belong: those that wait for data, or log."""
        return fmean(self.times_us)

    @property
    def host_was_ahead(self) -> bool:
        is_known = self.timed_by == "gpu" and self.profiled_us is not None
        return is_known and all(one.cause != "host_bound" for one in self.causes)

    def shown_us(self, result: Result) -> float:
        return self.mean_us

    @property
    def amount(self) -> float:
        """Returns the work that `step` is divided by to compare settings: samples, else tokens, else 1."""
        return 1.0 if self.unit else self.samples_per_step or self.tokens_per_step or 1.0

    @property
    def rate(self) -> str:
        return rate_in_words(self.mean_us, self.unit, self.samples_per_step, self.tokens_per_step)


MEASURED = JobRun


def rate_in_words(time_us: float, unit: str | None, samples: float | None, tokens: float | None) -> str:
    """Returns the work per second; empty if it is unknown. `unit`: the metric's name if the time is that of a unit."""
    amounts = {unit: 1.0} if unit else {"samples/s": samples, "tokens/s": tokens}
    return next((f"{as_rate(amount / time_us * 1e6)} {name}" for name, amount in amounts.items() if amount), "")


def memory_share(result: Result) -> float | None:
    """Returns the largest peak memory of tensors on a GPU over the memory of the first rank's; None on a CPU, or if
    one of them is unknown."""
    peak_gb = result.measured.peak_memory_gb if isinstance(result.measured, JobRun) else None
    memory_gb = result.machine.memory_gb
    return peak_gb / memory_gb if peak_gb is not None and memory_gb else None


def sample(result: Result) -> Sample:
    """Returns the step's sample for a search over knobs: compared by time per sample, or token, where that is known."""
    run = result.measured_as(JobRun)
    return Sample(tuple(run.times_us), amount=run.amount, by_mean=True)
