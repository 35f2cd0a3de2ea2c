"""What a point of workload=tp_training measured: training steps of a language model by a tensor-parallel stack."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from overlap_sweep.results.checks import excess
from overlap_sweep.results.measured import (
    PRINTABLE,
    Count,
    Gb,
    Measured,
    ShardedConfig,
    SizedWorkload,
    Timing,
    Total,
    Us,
    one_of,
    options_type,
)
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.tp_training.config import DEFAULT_IMPL, IMPLEMENTATIONS, PRECISION_OF, TpTraining

_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_PartUs = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Impl = Annotated[str, one_of(IMPLEMENTATIONS)]


_ASKED = (
    *("batch_size", "gradient_accumulation_steps", "seq_length", "num_training_steps", "warmup_steps", "seed"),
    *("learning_rate", "weight_decay", "max_grad_norm", "dtype", "vocab_parallel"),
)
_FILE = Annotated[str, msgspec.Meta(max_length=4096, pattern=PRINTABLE)]
_Options = options_type(TpTraining, _ASKED, tp_comm_overlap_cfg=_FILE)
"""As they were asked for: null is what the device or the implementation decides."""
_ResolvedOptions = options_type(
    TpTraining,
    _ASKED,
    tp_comm_overlap_cfg=_FILE,
    seq_length=Count,
    num_training_steps=Count,
    warmup_steps=_Whole,
    dtype=Annotated[str, one_of(PRECISION_OF)],
)


class _LanguageModel(msgspec.Struct):
    num_hidden_layers: Count


class ComposedStack(ShardedConfig, kw_only=True):
    impl: _Impl | None
    dp_size: Count | None
    tp_training: _Options  # type: ignore[valid-type]


class ResolvedStack(ComposedStack, kw_only=True):
    workload: SizedWorkload
    precision: str
    impl: _Impl
    dp_size: Count
    tp_training: _ResolvedOptions  # type: ignore[valid-type]
    language_model: _LanguageModel


class TpTrainingStep(msgspec.Struct, kw_only=True):
    """One training step. Times are the slowest rank's, memory is that of the rank with the most, 10^9 bytes; null on a
    CPU."""

    step: _Whole
    """Counted from 0."""
    warmup: bool
    """One of the first, which count in nothing but the comparison of losses."""
    loss: float | None
    """Mean over all ranks' tokens; null where it is no number."""
    grad_norm: Annotated[float, msgspec.Meta(ge=0)] | None
    """Before clipping, over all ranks; null where it is no number (float16, whose step is then left out)."""
    step_us: Us
    """From its first micro batch to the end of its optimizer, on the device."""
    forward_us: _PartUs
    """Of all micro batches together; so is the backward, to which the reduction of gradients belongs."""
    backward_us: _PartUs
    optimizer_us: _PartUs
    """With clipping, and with what the stack gathers after it."""
    memory_allocated_gb: Gb | None = None
    """When the host had enqueued the step."""
    memory_peak_gb: Gb | None = None
    """Most since the end of the warm-up."""


class TpTrainingRun(Measured, kw_only=True, tag="tp_training"):
    composed = ComposedStack
    resolved = ResolvedStack

    steps: Annotated[list[TpTrainingStep], msgspec.Meta(max_length=10**6)]
    parameters: Total
    """Of the whole model, up to norms, biases and the vocabulary's padding."""
    tokens_per_step: Total
    """Of all data-parallel ranks and micro batches; likewise the next two."""
    samples_per_step: Total
    flops_per_step: Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
    """language_model.flops_per_token of all tokens."""
    host_ahead_us: Annotated[float, msgspec.Meta(gt=-1e15, lt=1e15)] | None = None
    """How far the host was ahead of the device at the end of a step's last backward: median over the timed steps, of
    the rank where it is least. Near zero the host takes so long, or the stack waits for the device. null on a CPU."""
    details: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the implementation tells of itself, such as who computes attention."""

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
        options = result.point["tp_training"]
        samples = options["batch_size"] * options["gradient_accumulation_steps"] * result.point["dp_size"]
        asked = options["num_training_steps"], samples, samples * options["seq_length"]
        found = len(self.steps), self.samples_per_step, self.tokens_per_step
        if found != asked:
            raise ValueError(f"{found} steps, samples and tokens of a step instead of {asked}")

    @classmethod
    def as_asked(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config with nulls resolved; a precision left to the device is unknown."""
        impl, precision = config["impl"] or DEFAULT_IMPL, PRECISION_OF.get(config["tp_training"]["dtype"])
        known = {"impl": impl, "backend": impl, "dp_size": config["dp_size"] or 1, "precision": precision}
        return {**config, **known}

    @property
    def rate(self) -> str:
        return f"{self.tokens_per_step / self.timing.median_us * 1e6:,.0f} tokens/s"


MEASURED = TpTrainingRun
