"""The typed configuration of `workload=kernel`. The field docstrings are the manual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from overlap_sweep.config import OF_OPERATORS, TORCHS, TensorParallelConfig
from overlap_sweep.declared import one_of, ranged
from overlap_sweep.overlap.kernel_shape import KERNELS, PRECISION_OF_DTYPE
from overlap_sweep.overlap.space import OPERATORS


@dataclass
class WorkloadOptions:
    """One GEMM and one collective: compares every implementation that a backend has; see `kernel`."""

    name: str = "kernel"
    tokens: int | None = ranged(None, 1, 2**24)
    """Rows of the whole input; set by `m`."""
    warmup: int | None = ranged(None, 0, 1000)
    """Untimed iterations; set by `warmup_iters`."""
    repeats: int | None = ranged(None, 3, 1000)
    """Timed iterations; set by `iters`. The implementations and baselines take turns."""
    profiled: int = ranged(2, 1, 100)
    """Profiled iterations of each implementation; with `profile=best` only of the fastest and of `sequential`."""
    seed: int = ranged(0, 0, 2**31 - 1)
    """Random seed of the matrices."""
    tolerance: float | None = ranged(None, 0.0, 1.0)
    """Largest allowed difference from the float32 result, relative to its largest magnitude. null: 1e-4 for float32,
    2e-2 otherwise."""


@dataclass
class Config(TensorParallelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    operator: str = one_of("fc1", *OPERATORS)
    """Operator of the model that the kernel takes its sizes from, unless `n` and `k` are given."""
    kernel: str | None = one_of(None, *KERNELS)
    """Kernel of `workload=kernel`: a GEMM after an all-gather, or before a reduce-scatter or an all-reduce. null: that
    of `operator`'s forward pass. Its dgrad is `ag_gemm` for row-parallel operators, and `gemm_rs` or `gemm_ar` for
    column-parallel ones."""
    m: int | None = ranged(None, 1, 2**24)
    """Rows of the whole input and output: tokens. null: 8192, on a CPU 128."""
    n: int | None = ranged(None, 1, 2**22)
    """Columns of the whole output. null: from `model` and `operator`."""
    k: int | None = ranged(None, 1, 2**22)
    """Columns of the whole input, the dimension that the GEMM sums over. null: from `model` and `operator`."""
    dtype: str | None = one_of(None, *PRECISION_OF_DTYPE, also={**TORCHS, "fp8": "float8_e4m3fn"})
    """Data type of the GEMM. null: `precision`. float8_e4m3fn: FP8 with one scale per tensor and bfloat16 output."""
    iters: int | None = ranged(None, 3, 1000)
    """Timed iterations of each implementation. null: 21, on a CPU 7."""
    warmup_iters: int | None = ranged(None, 0, 1000)
    """Untimed iterations of each implementation. null: 3, on a CPU 1."""
    implementations: list[str] | None = None
    """Implementations of the backend to run, by their names in the printed table, such as `ring_agg1`; other knob
    values are possible, such as `pipeline_sm12_split8`. null: all."""

    reads_of_model: ClassVar[tuple[str, ...]] = OF_OPERATORS
    own_sizes: ClassVar[tuple[str, ...]] = ("n", "k")
    precision_from: ClassVar[str | None] = "dtype"
