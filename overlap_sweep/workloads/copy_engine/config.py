"""The typed configuration of `workload=copy_engine`. The field docstrings are the manual."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlap_sweep.config import TORCHS, PointConfig
from overlap_sweep.declared import one_of, ranged
from overlap_sweep.workloads.profilers import Profiler


@dataclass
class WorkloadOptions:
    """GEMMs and copies, in sequence and concurrently: how much a copy engine can hide; see `copy_engine`."""

    name: str = "copy_engine"
    tokens: int | None = ranged(None, 1, 2**24)
    """Rows of the GEMM; set by `copy_engine.matrix_size`."""
    warmup: int = ranged(2, 0, 1000)
    """Untimed iterations."""
    repeats: int | None = ranged(None, 3, 10**5)
    """Timed iterations; set by `copy_engine.iterations`."""
    seed: int = ranged(0, 0, 2**31 - 1)
    """Random seed of the matrices."""


@dataclass
class CopyEngine:
    """GEMMs on one stream, copies on another with high priority."""

    matrix_size: int = ranged(4096, 1, 2**16)
    """Rows and columns of the square matrices that the GEMM multiplies."""
    copy_mb: float = ranged(64.0, 0.001, 2**17)
    """Size of each copy, in MiB."""
    device: int = ranged(0, 0, 1023)
    """Number of the GPU, among the visible ones."""
    direction: str = one_of("device_to_device", "device_to_device", "peer", "host_to_device", "device_to_host")
    """Source and target of the copies. `peer`: into the next GPU's memory."""
    dtype: str = one_of("bfloat16", "bfloat16", "float16", "float32", also=TORCHS)
    """Data type of the GEMM."""
    gemms: int = ranged(4, 1, 1000)
    """Number of GEMMs in each iteration, in sequence."""
    chunks: int | None = ranged(None, 2, 1024)
    """Split each GEMM by rows into this many smaller ones, so that other work can start between them, and compare with
    the whole GEMMs. null: no splitting."""
    copies: int = ranged(4, 1, 1000)
    """Number of copies in each iteration, in sequence."""
    iterations: int | None = ranged(None, 3, 10**5)
    """Timed iterations. null: 21, on a CPU 7."""


@dataclass
class Config(PointConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    profiling: Profiler = field(default_factory=Profiler)
