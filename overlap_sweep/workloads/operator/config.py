"""The typed configuration of `workload=operator`. The field docstrings are the manual."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from overlap_sweep.config import NO_PART_OF_A_POINT, ResolvedModel, ResolvedPoint
from overlap_sweep.declared import Count, one_of, resolved
from overlap_sweep.overlap.space import METHODS, OPERATORS, PHASES
from overlap_sweep.overlap.space import Asked as AskedSetting
from overlap_sweep.results.measured import Phase, WholeSetting
from overlap_sweep.workloads.layer.config import KnobsConfig


@dataclass
class WorkloadOptions:
    """One parallel linear operator, forward and backward, with sequence parallelism."""

    name: str = "operator"
    tokens: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    """Tokens in the whole sequence-parallel batch. null: 8192 on a GPU, 128 on a CPU."""
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 1
    """Untimed forward and backward passes of every variant before the first timed one."""
    repeats: Annotated[int, Meta(ge=3, le=1000)] | None = None
    """Timed passes of every variant. null: 21 on a GPU, 7 on a CPU. The variants (overlapped, none, floor) alternate,
    so that drift affects all equally."""
    noise_goal: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Stop repeating a point once the noise of each pass under test is at most this fraction of its time, or the
    setting is slower than the best of its operator so far by more than that. null: always `repeats`."""
    profiled: Annotated[int, Meta(ge=1, le=100)] = 2
    """Passes recorded with the profiler, after timing, for the points that `profile` selects."""
    default_every_s: Annotated[float, Meta(ge=0.0, le=86400.0)] = 30.0
    """Seconds after which a point measures the library's default overlap again; `none` and `floor` are measured with
    every point."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Random seed of weights and inputs."""
    tolerance: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Largest allowed relative error of output and gradients against the operator with no overlap. null: 1e-4 for
    fp32, 0.2 if `fp8_buf` reduces in FP8, else 2e-2."""


@dataclass
class Config(KnobsConfig):
    """Options of one operator. `layer` is the whole layer on which the tuner proves its answer."""

    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    operator: Annotated[str, one_of(*OPERATORS)] = "fc1"
    """Linear operator of the layer."""
    phase: Annotated[str, one_of("all", *PHASES)] = "all"
    """Phase of the operator that gets the method; the others are not overlapped. `all`: every phase that takes it."""
    method: Annotated[str, one_of(*METHODS)] = "bulk"
    """Method that overlaps the operator's communication with its GEMMs."""
    phases: Annotated[Any, Meta(description="null, or a map by phase")] = None
    """Settings of several phases at once, instead of `phase`, `method` and the knobs, such as
    `{fprop: {method: ring_exchange}, dgrad: {method: bulk, num_sm: 8}, wgrad: {method: bulk, num_sm: 16}}`.
    Phases that are left out are not overlapped."""


@resolved
class ResolvedOptions(WorkloadOptions):
    tokens: Count = field()
    repeats: Count = field()


@resolved
class Asked(Config, ResolvedPoint):
    not_recorded = (*NO_PART_OF_A_POINT, "layer")

    model: ResolvedModel = field()
    backend: str = field()
    operator: Annotated[str, one_of(*OPERATORS)] = field()
    phase: Annotated[str, one_of("all", *PHASES)] = field()


@resolved
class Resolved(Asked):
    workload: ResolvedOptions = field()
    precision: str = field()
    tp_size: Count = field()
    num_sm: Count | None = None  # type: ignore[assignment]
    """null: an unused knob, which no longer has its default."""
    phases: Mapping[str, AskedSetting] | None = None

    def __post_init__(self) -> None:
        msgspec.convert(self.phases, dict[Phase, WholeSetting] | None)
