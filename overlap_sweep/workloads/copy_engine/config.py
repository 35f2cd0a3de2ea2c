"""The typed configuration of `workload=copy_engine`. The field docstrings are the manual."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlap_sweep.config import TORCHS, PointConfig
from overlap_sweep.declared import one_of, ranged


@dataclass
class WorkloadOptions:
    """GEMMs and copies, one after the other and at once: what a copy engine can hide; see `copy_engine`."""

    name: str = "copy_engine"
    tokens: int | None = ranged(None, 1, 2**24)
    """Rows of the GEMM: what `copy_engine.matrix_size` says."""
    warmup: int = ranged(2, 0, 1000)
    """Untimed iterations."""
    repeats: int | None = ranged(None, 3, 10**5)
    """Timed iterations: what `copy_engine.iterations` says."""
    seed: int = ranged(0, 0, 2**31 - 1)
    """Of the matrices."""


@dataclass
class CopyEngine:
    """GEMMs on one stream, copies on another of high priority."""

    matrix_size: int = ranged(4096, 1, 2**16)
    """The GEMM multiplies two square matrices of this size."""
    copy_mb: float = ranged(64.0, 0.001, 2**17)
    """MiB that are copied beside it."""
    direction: str = one_of("device_to_device", "device_to_device", "peer", "host_to_device", "device_to_host")
    """From where to where is copied. `peer`: into the next GPU's memory."""
    dtype: str = one_of("bfloat16", "bfloat16", "float16", "float32", also=TORCHS)
    """What the GEMM multiplies in."""
    gemms: int = ranged(4, 1, 1000)
    """GEMMs of each iteration, one after the other."""
    copies: int = ranged(4, 1, 1000)
    """Copies of each iteration, one after the other."""
    iterations: int | None = ranged(None, 3, 10**5)
    """Timed iterations. null: 21, on a CPU 7."""


@dataclass
class Config(PointConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
