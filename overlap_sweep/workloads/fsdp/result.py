"""What a point of workload=fsdp measured: training steps, overlapped, not overlapped and without communication."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
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
    options_type,
)
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.fsdp.config import Compile, Distributed, Fsdp, Ranking, Streams, Training

VARIANTS = ("point", "none", "floor")
_MOST_VARIANTS = 20
_MOST_OTHER_KNOBS = 100
_LONGEST_OPTIONS = 2000
"""As JSON: a setting's name has them all."""
_Losses = Annotated[list[float | None], msgspec.Meta(min_length=1, max_length=10**6)]


def _check_compile(compile_options: Any) -> None:
    if len(json.dumps(compile_options.options)) > _LONGEST_OPTIONS:
        raise ValueError("very long options of torch.compile")


_Variables = Annotated[dict[Name, Name | int | float | bool | None], msgspec.Meta(max_length=_MOST_OTHER_KNOBS)]
_CompileOptions = Annotated[dict[Name, Any], msgspec.Meta(max_length=_MOST_OTHER_KNOBS)]

ComposedTraining: Any = msgspec.defstruct(
    "ComposedTraining",
    [
        ("model", ModelConfig),
        ("ranking", options_type(Ranking, [declared.name for declared in fields(Ranking)])),
        ("fsdp", options_type(Fsdp, forward_prefetch=bool | int, reshard_after_forward=bool | int)),
        ("training", options_type(Training, ["batch_size", "gradient_accumulation", "mixed_precision"])),
        ("distributed", options_type(Distributed, ["strategy", "dp_size"], env=_Variables)),
        ("streams", options_type(Streams)),
        ("compile", options_type(Compile, options=_CompileOptions, check=_check_compile)),
    ],
    bases=(ComposedConfig,),
    kw_only=True,
)
ResolvedTraining: Any = msgspec.defstruct(
    "ResolvedTraining",
    [("tp_size", Count), ("workload", SizedWorkload), ("precision", str)],
    bases=(ComposedTraining,),
    kw_only=True,
)


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
