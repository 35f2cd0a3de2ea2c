"""What a point of workload=fsdp measured: training steps, overlapped, not overlapped and without communication."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from overlap_sweep.results.measured import (
    ComposedConfig,
    Count,
    FileName,
    Gb,
    Measured,
    ModelConfig,
    Name,
    SizedWorkload,
    Speedup,
    Timing,
    Total,
    check_pairs,
    one_of,
)
from overlap_sweep.results.run_directory import Result

VARIANTS = ("point", "none", "floor")
_MOST_VARIANTS = 20
_MOST_OTHER_KNOBS = 100
_LONGEST_OPTIONS = 2000
"""As JSON: a setting's name has them all."""
_Scalar = Name | int | float | bool | None
_Number = int | float | None
_Losses = Annotated[list[float | None], msgspec.Meta(min_length=1, max_length=10**6)]


class _Ranking(msgspec.Struct):
    num_layers: Count
    sequence_length: Count
    num_sparse_features: Count
    num_dense_features: Count
    vocab_size: Count


class _Fsdp(msgspec.Struct):
    forward_prefetch: bool | int = False
    backward_prefetch: Name | None = None
    limit_all_gathers: bool | None = None
    reshard_after_forward: bool | int = True
    sync_module_states: bool | None = None
    use_orig_params: bool | None = None
    replicas: Count | None = None
    reduce_dtype: Name | None = None


class _Training(msgspec.Struct):
    """As it was asked for: null is what the device decides."""

    batch_size: Count | None
    gradient_accumulation: Count
    mixed_precision: Name | None
    learning_rate: _Number = None
    warmup_steps: _Number = None
    weight_decay: _Number = None
    grad_clip_norm: _Number = None


class _Distributed(msgspec.Struct):
    strategy: Annotated[str, one_of(("fsdp2", "ddp"))]
    dp_size: Count
    enable_overlap: bool | None = None
    overlap_reduce_scatter: bool | None = None
    overlap_clone_for_reduce_scatter: bool | None = None
    bucket_cap_mb: _Number = None
    gradient_as_bucket_view: bool | None = None
    env: Annotated[dict[Name, _Scalar], msgspec.Meta(max_length=_MOST_OTHER_KNOBS)] = {}


class _Compile(msgspec.Struct):
    enabled: bool = False
    backend: Name | None = None
    mode: Name | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Annotated[dict[Name, Any], msgspec.Meta(max_length=_MOST_OTHER_KNOBS)] = {}

    def __post_init__(self) -> None:
        if len(json.dumps(self.options)) > _LONGEST_OPTIONS:
            raise ValueError("very long options of torch.compile")


class ComposedTraining(ComposedConfig, kw_only=True):
    model: ModelConfig
    ranking: _Ranking
    fsdp: _Fsdp
    training: _Training
    distributed: _Distributed
    streams: dict[Name, Name]
    compile: _Compile


class ResolvedTraining(ComposedTraining, kw_only=True):
    tp_size: Count
    workload: SizedWorkload
    precision: str


class TrainingRun(Measured, kw_only=True, tag="fsdp"):
    """Its telemetry lies beside it (telemetry.py)."""

    composed = ComposedTraining
    resolved = ResolvedTraining

    step: Annotated[dict[Name, Timing], msgspec.Meta(max_length=_MOST_VARIANTS)]
    """A whole step with all its micro batches and the optimizer, by variant: `point`; `none`, the same with every
    collective alone on the device; `floor`, the same computation without communication. Their i-th samples were taken
    side by side, so they pair."""
    host_us: dict[Name, Annotated[float, msgspec.Meta(ge=0)]]
    """By variant how long the host took to enqueue a step, without waiting for the device: median, slowest rank. Empty
    on a CPU; without a variant whose launches waited for the device."""
    samples_per_step: Total
    """Of all ranks and micro batches."""
    parameters: Total
    losses: _Losses
    """By step of the recorded run, mean over all ranks' samples; null where it is no number."""
    peak_memory_gb: Gb | None = None
    """Most that tensors took on a GPU of any rank, 10^9 bytes; null on a CPU."""
    compiled: Annotated[str, msgspec.Meta(max_length=10_000)] = "no"
    """`no`; the backend that compiled the layers; or `no: ` and why it could not."""
    telemetry: list[FileName] = msgspec.field(default_factory=list)
    """File names in the run directory, one per rank."""

    def __post_init__(self) -> None:
        if missing := set(VARIANTS) - self.step.keys():
            raise ValueError(f"no {min(missing)} times of a step")
        check_pairs(self.step.values())

    def check(self, result: Result) -> None:
        training, ranks = result.point["training"], result.point["distributed"]["dp_size"]
        samples = (training["batch_size"] or 0) * training["gradient_accumulation"] * ranks
        if self.samples_per_step != samples:
            raise ValueError(f"{self.samples_per_step} samples in a step of {samples}")

    @classmethod
    def as_asked(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config with what training alone decides; a precision that was left to the device is unknown."""
        asked = config["training"]["mixed_precision"]
        precision = "fp32" if asked == "none" else asked
        return {**config, "backend": config["distributed"]["strategy"], "precision": precision, "tp_size": 1}

    def compared(self, result: Result) -> Speedup | None:
        return Speedup(self.step["none"].median_us / self.step["point"].median_us, ranks=False)

    @property
    def rate(self) -> str:
        return f"{self.samples_per_step / self.step['point'].median_us * 1e6:,.0f} samples/s"


MEASURED = TrainingRun
