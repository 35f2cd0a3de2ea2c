"""Measurements of a point of workload=tp_training: training steps of a language model by a tensor-parallel stack."""

import statistics
from typing import Annotated

import msgspec

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import Gb, Us
from overlap_sweep.results.checks import excess
from overlap_sweep.results.measured import Measured, Timing, Total
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.tp_training.config import (
    DEFAULT_IMPL,
    PRECISION_OF,
    Config,
    Resolved,
    dp_size_of,
)

_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_PartUs = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]


class TpTrainingStep(msgspec.Struct, kw_only=True):
    """One training step. Times are the slowest rank's, memory is that of the rank with the most, 10^9 bytes; null on a
    CPU."""

    step: _Whole
    """Number of the step, from 0."""
    warmup: bool
    """Whether it is a warm-up step, which counts only in the comparison of losses."""
    loss: float | None
    """Mean over all ranks' tokens; null if it is NaN or infinite."""
    grad_norm: Annotated[float, msgspec.Meta(ge=0)] | None
    """Norm over all ranks before clipping; null if it is NaN or infinite (float16 then skips the step)."""
    step_us: Us
    """Time on the device from the first micro batch to the end of the optimizer."""
    forward_us: _PartUs
    """Forward time of all micro batches."""
    backward_us: _PartUs
    """Backward time of all micro batches, including the reduction of gradients."""
    optimizer_us: _PartUs
    """Time of clipping, the optimizer, and the stack's gathers after it."""
    memory_allocated_gb: Gb | None = None
    """Allocated memory when the host had enqueued the step."""
    memory_peak_gb: Gb | None = None
    """Peak memory since the end of the warm-up."""


class TpTrainingRun(Measured, kw_only=True, tag="tp_training"):
    steps: Annotated[list[TpTrainingStep], msgspec.Meta(max_length=10**6)]
    parameters: Total
    """Parameters of the whole model, without norms, biases and the vocabulary's padding."""
    tokens_per_step: Total
    """Tokens of all data-parallel ranks and micro batches; likewise the next two."""
    samples_per_step: Total
    flops_per_step: Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
    """`LanguageModel.flops_per_token` times the tokens."""
    host_ahead_us: Annotated[float, msgspec.Meta(gt=-1e15, lt=1e15)] | None = None
    """Lead of the host over the device at the end of a step's last backward: median over the timed steps, smallest of
    the ranks. Near zero the host limits the step, or the stack waits for the device. null on a CPU."""
    details: dict[str, object] = msgspec.field(default_factory=dict)
    """Facts reported by the implementation, such as the attention backend."""

    def __post_init__(self) -> None:
        if not self.timed_steps:
            raise ValueError("no timed step")
        if [step.step for step in self.steps] != list(range(len(self.steps))):
            raise ValueError("steps that don't follow each other")
        if reason := excess([self.details]):
            raise ValueError(reason)

    @property
    def timed_steps(self) -> list[TpTrainingStep]:
        """Returns the steps after the warm-up."""
        return [step for step in self.steps if not step.warmup]

    @property
    def timing(self) -> Timing:
        """Returns the summarised times of the steps after the warm-up."""
        times_us = [step.step_us for step in self.timed_steps]
        two_or_more = times_us if len(times_us) > 1 else times_us * 2
        q1_us, median_us, q3_us = statistics.quantiles(two_or_more, n=4, method="inclusive")
        return Timing(median_us, q1_us, q3_us, times_us)

    def check(self, result: Result) -> None:
        point = result.point_as(Resolved)
        options = point.tp_training
        samples = options.batch_size * options.gradient_accumulation_steps * point.dp_size
        asked = options.num_training_steps, samples, samples * options.seq_length
        found = len(self.steps), self.samples_per_step, self.tokens_per_step
        if found != asked:
            raise ValueError(f"{found} steps, samples and tokens of a step instead of {asked}")

    @classmethod
    def as_asked(cls, config: PointConfig) -> dict[str, object]:
        """Returns the config with nulls resolved; a precision left to the device is unknown."""
        assert isinstance(config, Config)
        impl, precision = config.impl or DEFAULT_IMPL, PRECISION_OF.get(config.tp_training.dtype or "")
        dp_size = config.dp_size if config.tp_size is None else dp_size_of(config)
        return {**config, "impl": impl, "backend": impl, "precision": precision, "dp_size": dp_size}

    @property
    def rate(self) -> str:
        return f"{self.tokens_per_step / self.timing.median_us * 1e6:,.0f} tokens/s"


MEASURED = TpTrainingRun
