"""The typed configuration of `workload=kernel`. The field docstrings are the manual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from overlap_sweep.config import OF_OPERATORS, TORCHS, TensorParallelConfig
from overlap_sweep.declared import one_of, ranged
from overlap_sweep.overlap.kernel_shape import KERNELS, PRECISION_OF_DTYPE
from overlap_sweep.overlap.space import OPERATORS


@dataclass
class WorkloadOptions:
    """One GEMM and one collective, by every implementation that a backend has, side by side: see `kernel`."""

    name: str = "kernel"
    tokens: int | None = ranged(None, 1, 2**24)
    """Rows of the whole input: what `m` says."""
    warmup: int | None = ranged(None, 0, 1000)
    """Untimed iterations: what `warmup_iters` says."""
    repeats: int | None = ranged(None, 3, 1000)
    """Timed iterations: what `iters` says. The implementations and baselines take turns."""
    profiled: int = ranged(2, 1, 100)
    """Iterations under the profiler, of all implementations, or with `profile=best` of the fastest and the baseline."""
    seed: int = ranged(0, 0, 2**31 - 1)
    """Of the matrices."""
    tolerance: float | None = ranged(None, 0.0, 1.0)
    """Largest difference from the result in float32, over its largest magnitude. null: 1e-4 for float32, else 2e-2."""


@dataclass
class Config(TensorParallelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    operator: str = one_of("fc1", *OPERATORS)
    """Whose sizes the kernel has, unless `n` and `k` are given."""
    kernel: str | None = one_of(None, *KERNELS)
    """What `workload=kernel` runs: a GEMM after an all-gather, or before a reduce-scatter or an all-reduce. null: what
    `operator` does in its forward. Of a row-parallel operator `ag_gemm` is its dgrad, of a column-parallel one
    `gemm_rs` and `gemm_ar` are."""
    m: int | None = ranged(None, 1, 2**24)
    """Rows of the whole input and output: tokens. null: 8192, on a CPU 128."""
    n: int | None = ranged(None, 1, 2**22)
    """Columns of the whole output; null: `model` and `operator` say it."""
    k: int | None = ranged(None, 1, 2**22)
    """Columns of the whole input, which the GEMM sums over; null: `model` and `operator` say it."""
    dtype: str | None = one_of(None, *PRECISION_OF_DTYPE, also={**TORCHS, "fp8": "float8_e4m3fn"})
    """What the kernel multiplies in; null: `precision`. float8_e4m3fn: FP8 with one scale a tensor, into bfloat16."""
    iters: int | None = ranged(None, 3, 1000)
    """Timed iterations of each implementation; null: 21, on a CPU 7."""
    warmup_iters: int | None = ranged(None, 0, 1000)
    """Untimed iterations of each implementation; null: 3, on a CPU 1."""
    implementations: list[str] | None = None
    """Which of the backend's implementations. Names as in the table that is printed, such as
    `ring_agg1`, and with other knobs, such as `pipeline_sm12_split8`. null: all that it lists."""

    groups: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
        "operator": {operator: {"operator": operator} for operator in OPERATORS}
    }
    reads_of_model: ClassVar[tuple[str, ...]] = OF_OPERATORS
    own_sizes: ClassVar[tuple[str, ...]] = ("n", "k")
    precision_from: ClassVar[str | None] = "dtype"
