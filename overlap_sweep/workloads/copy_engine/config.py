"""The typed configuration of `workload=copy_engine`. The field docstrings are the manual."""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from overlap_sweep.config import TORCHS, PointConfig, ResolvedPoint
from overlap_sweep.declared import Count, one_of, resolved
from overlap_sweep.workloads.profilers import Profiler


@dataclass
class WorkloadOptions:
    """GEMMs and copies, in sequence and concurrently: how much a copy engine can hide; see `copy_engine`."""

    name: str = "copy_engine"
    tokens: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    """Rows of the GEMM; set by `copy_engine.matrix_size`."""
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 2
    """Untimed iterations."""
    repeats: Annotated[int, Meta(ge=3, le=10**5)] | None = None
    """Timed iterations; set by `copy_engine.iterations`."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Random seed of the matrices."""


@dataclass
class CopyEngine:
    """GEMMs on one stream, copies on another with high priority."""

    matrix_size: Annotated[int, Meta(ge=1, le=2**16)] = 4096
    """Rows and columns of the square matrices that the GEMM multiplies."""
    copy_mb: Annotated[float, Meta(ge=0.001, le=2**17)] = 64.0
    """Size of each copy, in MiB."""
    device: Annotated[int, Meta(ge=0, le=1023)] = 0
    """Number of the GPU, among the visible ones."""
    direction: Annotated[str, one_of("device_to_device", "peer", "host_to_device", "device_to_host")] = (
        "device_to_device"
    )
    """Source and target of the copies. `peer`: into the next GPU's memory."""
    dtype: Annotated[str, one_of("bfloat16", "float16", "float32", also=TORCHS)] = "bfloat16"
    """Data type of the GEMM."""
    gemms: Annotated[int, Meta(ge=1, le=1000)] = 4
    """Number of GEMMs in each iteration, in sequence."""
    chunks: Annotated[int, Meta(ge=2, le=1024)] | None = None
    """Split each GEMM by rows into this many smaller ones, so that other work can start between them, and compare with
    the whole GEMMs. null: no splitting."""
    copies: Annotated[int, Meta(ge=1, le=1000)] = 4
    """Number of copies in each iteration, in sequence."""
    iterations: Annotated[int, Meta(ge=3, le=10**5)] | None = None
    """Timed iterations. null: 21, on a CPU 7."""


@dataclass
class Config(PointConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    profiling: Profiler = field(default_factory=Profiler)


@resolved
class ResolvedOptions(WorkloadOptions):
    tokens: Count = field()


@resolved
class Resolved(Config, ResolvedPoint):
    backend: str = field()
    copy_engine: CopyEngine = field()
    workload: ResolvedOptions = field()
    precision: str = field()
    tp_size: Count = field()
