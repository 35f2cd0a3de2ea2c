"""The typed configuration of `workload=layer`. The field docstrings are the manual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from overlap_sweep.config import MOST_SMS, TensorParallelConfig
from overlap_sweep.declared import one_of, ranged
from overlap_sweep.overlap.space import LAYER_KINDS, MOST_OF


@dataclass
class WorkloadOptions:
    """A whole transformer layer or a part of it, under several overlap configurations side by side; see `layer`."""

    name: str = "layer"
    tokens: int | None = ranged(None, 1, 2**24)
    """Tokens in the whole batch: sequence length x `layer.micro_batch_size`. null: 8192, on a CPU 128."""
    warmup: int = ranged(2, 0, 1000)
    """Untimed iterations of every variant before the first timed one."""
    repeats: int | None = ranged(None, 3, 1000)
    """Timed iterations of every variant; null: 21, on a CPU 7."""
    profiled: int = ranged(2, 1, 100)
    """Iterations under the profiler, of the variants that `profile` asks for."""
    seed: int = ranged(0, 0, 2**31 - 1)
    """Of weights and inputs."""
    tolerance: float | None = ranged(None, 0.0, 1.0)
    """Largest relative error of output and gradients against `none`. null: 1e-4 for fp32, 5e-2 for fp16 and bf16, 0.2
    for FP8."""


@dataclass
class Layer:
    """The whole layer, a transformer layer or a part of one with `layer=<kind>`. It is Transformer Engine's
    own, or with backend=torch one of the same form on plain torch.distributed."""

    kind: str = one_of("transformer_layer", *LAYER_KINDS)
    """Which part: `layer=<kind>` sets it."""
    variants: list[str] | None = None
    """Overlap configurations, interleaved: `none`; `default` (Transformer Engine's; torch has none); `file:<path>` (a
    tp_comm_overlap_cfg); a method (each slot that takes it gets it with `num_sm` and the other knobs, the rest is not
    overlapped); `split` (ring exchange of all-gathers, pipelined reduce-scatters); `rs_dgrad` (the default, but dgrad's
    own reduce-scatter by ring exchange instead of the bulk overlaps); `atomic` (ring exchange of one atomic GEMM).
    `floor`, the same layer without communication, is always measured too. null: none, and what the next three say."""
    comm_overlap: bool = True
    """false: `none` alone, whatever else is given."""
    tp_comm_overlap_cfg: str | None = None
    """A file to overlap by instead of the default; in `variants` it is `file:<path>`."""
    ub_overlap_rs_dgrad: bool = False
    """`rs_dgrad` instead of the default."""
    num_replicas: int = ranged(1, 1, 1024)
    """Data-parallel replicas, through DDP: the layer runs on tp_size x num_replicas GPUs."""
    micro_batch_size: int = ranged(1, 1, 2**20)
    """Sequences in the batch."""
    training: bool = False
    """Training steps: an optimizer (Adam) after each backward, and with delayed scaling new FP8 scales in each step."""


@dataclass
class KnobsConfig(TensorParallelConfig):
    """What layers and operators are overlapped by, and what kind of layer that is."""

    num_sm: int = ranged(4, 1, MOST_SMS)
    """The communication's share of the machine: CTAs of the NCCL communicator, or concurrent chunks (and worker
    threads) of gloo."""
    aggregate: bool | None = None
    """ring_exchange of an all-gather: multiply two chunks at a time, half as many GEMMs of twice the size."""
    num_splits: int | None = ranged(None, 1, MOST_OF["num_splits"])
    """pipeline: chunks into which the GEMM and its reduce-scatter are cut."""
    cga_size: int | None = ranged(None, 1, MOST_OF["cga_size"])
    """CTAs per cluster of the communication kernels."""
    set_sm_margin: bool | None = None
    """Transformer Engine: the GEMM leaves the SMs of the communication kernel free."""
    use_ce: bool | None = None
    """Transformer Engine: ring exchange by the copy engines instead of SMs."""
    atomic_gemm: bool | None = None
    """Transformer Engine: one GEMM that signals its finished chunks (FP8, CUDA 12 only)."""
    fp8_buf: bool | None = None
    """Transformer Engine: communicate in FP8."""
    layer: Layer = field(default_factory=Layer)

    groups: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
        "layer": {kind: {"layer": {"kind": kind}} for kind in LAYER_KINDS}
    }


@dataclass
class Config(KnobsConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
