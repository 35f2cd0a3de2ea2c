"""The typed configuration of `workload=kernel`. The field docstrings are the manual."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from overlap_sweep.config import MOST_SMS, OF_OPERATORS, TORCHS, ResolvedModel, ResolvedPoint, TensorParallelConfig
from overlap_sweep.declared import Count, Name, one_of, resolved
from overlap_sweep.overlap.models import COLLECTIVES, KERNELS, PRECISION_OF_DTYPE
from overlap_sweep.overlap.space import OPERATORS
from overlap_sweep.results.measured import Knobs, Scalar

MOST_IMPLEMENTATIONS = 200
"""Limit for charts, which have a row for each implementation."""


class KernelSetting(Knobs, kw_only=True):
    """Implementations of other packages may have other knobs, and unknown methods."""

    method: str | None = None


Implementations = Annotated[dict[Name, dict[str, Scalar]], Meta(max_length=MOST_IMPLEMENTATIONS)]


@dataclass
class WorkloadOptions:
    """One GEMM and one collective: compares every implementation that a backend has; see `kernel`."""

    name: str = "kernel"
    tokens: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    """Rows of the whole input; set by `m`."""
    warmup: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Untimed iterations; set by `warmup_iters`."""
    repeats: Annotated[int, Meta(ge=3, le=1000)] | None = None
    """Timed iterations; set by `iters`. The implementations and baselines take turns."""
    profiled: Annotated[int, Meta(ge=1, le=100)] = 2
    """Profiled iterations of each implementation; with `profile=best` only of the fastest and of `sequential`."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Random seed of the matrices."""
    tolerance: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Largest allowed difference from the float32 result, relative to its largest magnitude. null: 1e-4 for float32,
    2e-2 otherwise."""


@dataclass
class Config(TensorParallelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    operator: Annotated[str, one_of(*OPERATORS)] = "fc1"
    """Operator of the model that the kernel takes its sizes from, unless `n` and `k` are given."""
    kernel: Annotated[str, one_of(*KERNELS, *COLLECTIVES)] | None = None
    """Kernel of `workload=kernel`: a GEMM after an all-gather, or before a reduce-scatter or an all-reduce. null: that
    of `operator`'s forward pass. Its dgrad is `ag_gemm` for row-parallel operators, and `gemm_rs` or `gemm_ar` for
    column-parallel ones. A collective alone: what it and a GEMM that is independent of it cost each other."""
    m: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    """Rows of the whole input and output: tokens. null: 8192, on a CPU 128. Of the GEMM beside a collective `m`, `n`
    and `k` are each rank's own."""
    n: Annotated[int, Meta(ge=1, le=2**22)] | None = None
    """Columns of the whole output. null: from `model` and `operator`; beside a collective `m`."""
    k: Annotated[int, Meta(ge=1, le=2**22)] | None = None
    """Columns of the whole input, the dimension that the GEMM sums over. null: from `model` and `operator`; beside a
    collective `m`."""
    size_mb: Annotated[float, Meta(ge=0.001, le=2**17)] | None = None
    """Buffer of a collective alone, in MiB, as nccl-tests count it: of all ranks together. null: 64, on a CPU 1."""
    num_sm: Annotated[int, Meta(ge=1, le=MOST_SMS)] | None = None
    """Thread blocks of a collective alone: NCCL's `max_ctas` and `min_ctas`, on a CPU chunks of gloo. null: 1, 2, 4, 8,
    16 and 32 in turns, on a CPU 1 and 2."""
    dtype: Annotated[str, one_of(*PRECISION_OF_DTYPE, also={**TORCHS, "fp8": "float8_e4m3fn"})] | None = None
    """Data type of the GEMM. null: `precision`. float8_e4m3fn: FP8 with one scale per tensor and bfloat16 output."""
    iters: Annotated[int, Meta(ge=3, le=1000)] | None = None
    """Timed iterations of each implementation. null: 21, on a CPU 7."""
    warmup_iters: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Untimed iterations of each implementation. null: 3, on a CPU 1."""
    implementations: list[str] | None = None
    """Implementations of the backend to run, by their names in the printed table, such as `ring_agg1`; other knob
    values are possible, such as `pipeline_sm12_split8`. null: all."""

    reads_of_model: ClassVar[tuple[str, ...]] = OF_OPERATORS
    own_sizes: ClassVar[tuple[str, ...]] = ("n", "k")
    precision_from: ClassVar[str | None] = "dtype"


@resolved
class ResolvedOptions(WorkloadOptions):
    tokens: Count = field()
    warmup: Annotated[int, Meta(ge=0, le=1000)] = field()
    repeats: Count = field()


@resolved
class Asked(Config, ResolvedPoint):
    backend: Name = field()
    model: ResolvedModel = field()
    operator: Annotated[str, one_of(*OPERATORS)] | None = None  # type: ignore[assignment]
    """null: sizes were given."""


@resolved
class Resolved(Asked):
    workload: ResolvedOptions = field()
    precision: str = field()
    tp_size: Count = field()
    kernel: Annotated[str, one_of(*KERNELS, *COLLECTIVES)] = field()
    m: Count = field()
    n: Count = field()
    k: Count = field()
    implementations: Implementations = field()  # type: ignore[assignment]
    """Settings by name."""
    provider: str | None = None
    """Package and version of another package's kernels."""

    def __post_init__(self) -> None:
        for setting in self.implementations.values():
            msgspec.convert(setting, KernelSetting)
