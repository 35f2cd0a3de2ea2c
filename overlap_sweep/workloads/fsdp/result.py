"""What a point of workload=fsdp measured: steps as configured, with no overlap, and without communication."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, NamedTuple

import msgspec

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import FileName, Gb, Name
from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS
from overlap_sweep.report.numbers import UNDEFINED
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.measured import Measured, Timing, Total, check_pairs
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.fsdp.config import HOST_LIMITS, PRECISION_OF, Config, Resolved

VARIANTS = ("point", "none", "floor")
_MOST_VARIANTS = 20
_Losses = Annotated[list[float | None], msgspec.Meta(min_length=1, max_length=10**6)]


class TrainingRun(Measured, kw_only=True, tag="fsdp"):
    """A training run. Its telemetry lies beside it (telemetry.py)."""

    step: Annotated[dict[Name, Timing], msgspec.Meta(max_length=_MOST_VARIANTS)]
    """Time of a whole step with all its micro batches and the optimizer, by variant: `point`; `none`, each collective
    alone on the device; `floor`, without communication. Their i-th samples pair: they were taken in the same round."""
    host_us: dict[Name, Annotated[float, msgspec.Meta(ge=0)]]
    """Time in which the host enqueues a step, without waiting for the device, by variant: median, slowest rank. Empty
    on a CPU; without variants whose launches waited for the device."""
    samples_per_step: Total
    """Samples in a step, over all ranks and micro batches."""
    parameters: Total
    """Number of the whole model's parameters."""
    losses: _Losses
    """Loss after each step of the recorded run, mean over all ranks' samples; null if it is NaN or infinite."""
    peak_memory_gb: Gb | None = None
    """Peak memory of tensors on the GPU of any rank, 10^9 bytes; null on a CPU."""
    compiled: Annotated[str, msgspec.Meta(max_length=10_000)] = "no"
    """`no`; the backend that compiled the layers; or `no: ` and why it could not."""
    telemetry: list[FileName] = msgspec.field(default_factory=list)
    """File names in the run directory, one per rank."""

    def __post_init__(self) -> None:
        if missing := set(VARIANTS) - self.step.keys():
            raise ValueError(f"no {min(missing)} times of a step")
        check_pairs(self.step.values())

    def check(self, result: Result) -> None:
        samples = result.point_as(Resolved).samples_per_step
        if self.samples_per_step != samples:
            raise ValueError(f"{self.samples_per_step} samples in a step of {samples}")

    @classmethod
    def as_asked(cls, config: PointConfig) -> dict[str, object]:
        """Returns the config with sharding, backend and precision; a precision left to the device is unknown."""
        assert isinstance(config, Config)
        return {
            **config,
            "fsdp": asdict(config.fsdp.numbered(config.nodes, config.distributed.dp_size)),
            "backend": config.distributed.strategy,
            "precision": PRECISION_OF.get(config.training.mixed_precision or ""),
            "tp_size": 1,
        }

    def compared(self, result: Result) -> str | None:
        gain = verdict.gain_of_point(self.step["point"], self.step["none"], result.point.runtime.device)
        return gain.in_words(NONE_IN_WORDS)

    @property
    def rate(self) -> str:
        return f"{self.samples_per_step / self.step['point'].median_us * 1e6:,.0f} samples/s"


MEASURED = TrainingRun


def limited_by_host(result: Result) -> list[str]:
    """Returns the launch-bound variants, which the host enqueued hardly faster than the device ran them."""
    run = result.measured_as(TrainingRun)
    limited = {name for name in VARIANTS if run.host_us.get(name, 0.0) >= HOST_LIMITS * run.step[name].median_us}
    return [name for name in VARIANTS if name in limited or (name == "point" and result.launch_bound)]


class Hidden(NamedTuple):
    """The hidden fraction, (none - point) / (none - floor), with its noise."""

    fraction: float
    noise: float

    @property
    def known(self) -> bool:
        """Returns whether it is conclusive: its noise interval is narrower than the range from 0 to 1."""
        return self.noise < 0.5

    @property
    def in_words(self) -> str:
        return f"{self.fraction:.0%} \N{PLUS-MINUS SIGN} {self.noise:.0%}" if self.known else UNDEFINED


def hidden(*steps: Mapping[str, Timing]) -> Hidden:
    """Returns the hidden fraction of points with these step times; unknown if `none` takes no longer than `floor`:
    there is nothing to hide.

    It is the ratio of the medians of differences within rounds; its noise is theirs in quadrature.
    """
    rounds = [one for step in steps for one in zip(*(step[name].samples_us for name in VARIANTS), strict=True)]
    saved = [none - point for point, none, _ in rounds]
    comm = [none - floor for _, none, floor in rounds]
    comm_us = statistics.median(comm)
    if comm_us <= 0:
        return Hidden(math.nan, math.inf)
    fraction = statistics.median(saved) / comm_us
    return Hidden(fraction, math.hypot(estimate(saved).noise_us, fraction * estimate(comm).noise_us) / comm_us)
