"""The typed configuration of `workload=fsdp`. The field docstrings are the manual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from overlap_sweep.config import BY_TORCH, ModelConfig
from overlap_sweep.declared import any_of, one_of, ranged

AS_MIXED_PRECISION = {**BY_TORCH, "fp32": "none", "float32": "none"}


@dataclass
class Ranking:
    """The ranking model: embedded features and a user's history through a transformer backbone, whose layers have the
    sizes of `model`, into the probability of a click. The data is synthetic."""

    num_layers: int = ranged(8, 1, 1024)
    """Layers of the backbone; each is a unit of sharding and of communication."""
    sequence_length: int = ranged(128, 1, 2**20)
    """Events in a user's history: tokens, beside one for each sparse feature and one for all dense ones."""
    num_sparse_features: int = ranged(16, 1, 4096)
    """Categorical features, each with an embedding table of its own."""
    num_dense_features: int = ranged(32, 1, 2**16)
    """Numerical features, which a linear layer embeds together."""
    vocab_size: int = ranged(1000, 2, 2**31 - 1)
    """Rows of each embedding table."""


@dataclass
class Fsdp:
    """Scheduling of `fully_shard`. Nothing here concerns DDP but `sync_module_states`."""

    forward_prefetch: Any = any_of(False, "false, true, or a number of layers")
    """Gather the next layer's parameters before this one's forward: false leaves it to torch, which gathers a layer
    when the host comes to it; true is one layer ahead, a number so many."""
    backward_prefetch: str | None = one_of("BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST")
    """Gather the next layer's parameters before this one's gradients are computed, or after; null: when they are
    needed."""
    limit_all_gathers: bool = False
    """The host waits before it has more than two layers gathered that are not yet computed. FSDP2 needs no such limit;
    FSDP1 had it."""
    reshard_after_forward: Any = any_of(True, "true, false, or a number of ranks")
    """Free the gathered parameters after the forward, and gather them again for the backward; false keeps them; a
    number keeps them in groups of so many ranks."""
    sync_module_states: bool = True
    """Rank 0's initial parameters are broadcast; false: every rank draws the same ones."""
    use_orig_params: bool = True
    """FSDP2 knows no flat parameters: false is refused."""
    replicas: int = ranged(1, 1, 1024)
    """Hybrid sharding: so many groups of ranks with a whole model each, whose gradients are all-reduced."""
    reduce_dtype: str | None = one_of(None, "fp32", "bf16", "fp16", also=BY_TORCH)
    """In which gradients are reduced; null: as they are computed."""


@dataclass
class Training:
    """The training loop, and how much there is to compute in each step."""

    max_steps: int | None = ranged(None, 2, 10**6)
    """Steps of the run that the telemetry records; null: 30, on a CPU 8. The comparison with `none` and `floor` comes
    after it."""
    log_interval: int = ranged(10, 1, 10**6)
    """Steps between lines in worker.log."""
    batch_size: int | None = ranged(None, 1, 2**20)
    """Samples of a rank's micro batch; null: 64, on a CPU 4."""
    gradient_accumulation: int = ranged(1, 1, 4096)
    """Micro batches of a step; only the last one's backward reduces gradients."""
    mixed_precision: str | None = one_of(None, "bf16", "fp16", "none", also=AS_MIXED_PRECISION)
    """What is computed in. null: bf16, on a CPU none. FSDP2 gathers and computes in it; DDP computes by autocast. fp16
    scales the loss."""
    learning_rate: float = ranged(1e-4, 0.0, 100.0)
    """Of AdamW, after its warm-up."""
    warmup_steps: int = ranged(5, 0, 10**6)
    """Steps over which the learning rate rises linearly."""
    weight_decay: float = ranged(0.01, 0.0, 100.0)
    """Of AdamW."""
    grad_clip_norm: float = ranged(1.0, 0.0, 10**6)
    """Largest norm of the gradients. 0: they are not clipped, only their norm is recorded."""
    output_dir: str | None = None
    """Where the run directory is made instead of `multirun/<date>/<time>`: that of a single run, or the sweep's."""


@dataclass
class Distributed:
    """Who holds what, and how collectives are issued."""

    strategy: str = one_of("fsdp2", "fsdp2", "ddp")
    """`fsdp2`: `fully_shard` on each layer; `ddp`: DistributedDataParallel."""
    dp_size: int = ranged(2, 1, 1024)
    """Data-parallel ranks: the world size of the torchrun group."""
    enable_overlap: bool = False
    """Issue the collectives on streams of our own, with `streams`' priorities: DDP's all-reduces through a
    communication hook, FSDP2's through its custom collectives. false: where the library issues them."""
    overlap_reduce_scatter: bool = False
    """DDP with enable_overlap: also reduce and scatter every bucket, for nothing but the load."""
    overlap_clone_for_reduce_scatter: bool = True
    """DDP with overlap_reduce_scatter: of a copy, so that the two collectives don't share memory."""
    bucket_cap_mb: float = ranged(25.0, 0.001, 10**5)
    """Size of DDP's gradient buckets, MiB."""
    gradient_as_bucket_view: bool = True
    """DDP: gradients are views of the buckets."""
    env: dict[str, Any] = field(default_factory=dict)
    """Environment of the workers, for NCCL, RCCL and their transports. null: not set. Another environment is another
    torchrun group."""


@dataclass
class Streams:
    """Priorities of the streams that `distributed.enable_overlap` makes, on a GPU."""

    compute: str = one_of("normal", "normal", "high")
    """Stream of the computation."""
    all_reduce: str = one_of("high", "normal", "high")
    """Stream of DDP's all-reduces."""
    reduce_scatter: str = one_of("high", "normal", "high")
    """Stream of reduce-scatters of gradients."""
    auxiliary: str = one_of("high", "normal", "high")
    """Stream of all-gathers of parameters."""


@dataclass
class Compile:
    """torch.compile of every layer. Where it fails, the layers run as they are, and the reason is recorded."""

    enabled: bool = False
    """Compile the layers."""
    backend: str = "inductor"
    """torch.compile's backend. On ROCm inductor becomes aot_eager."""
    mode: str | None = None
    """torch.compile's mode, such as max-autotune."""
    fullgraph: bool = False
    """Fail where the layer has a graph break."""
    dynamic: bool | None = None
    """Compile for dynamic shapes. null: torch decides."""
    options: dict[str, Any] = field(default_factory=dict)
    """Handed to torch.compile; not together with `mode`."""


@dataclass
class Profiling:
    """torch.profiler over further steps of the run; their telemetry is marked."""

    enabled: bool | None = None
    """Run the profiler. null: unless `profile=none`."""
    wait: int = ranged(1, 0, 10**4)
    """Steps without the profiler, in each cycle."""
    warmup: int = ranged(1, 0, 10**4)
    """Steps under the profiler that are thrown away."""
    active: int = ranged(2, 1, 10**4)
    """Steps that are kept."""
    repeat: int = ranged(1, 1, 1000)
    """Cycles, each with a trace of its own."""
    tensorboard: bool = False
    """Also write `torch_profiler/rank<r>/` for TensorBoard."""
    chrome_trace: bool = True
    """Write the traces that analyze.py reads. ROCm's are not written: exporting them is known to crash."""
    record_shapes: bool = False
    """Record the operators' input shapes in the trace."""
    profile_memory: bool = False
    """Record allocations in the trace."""
    with_stack: bool = False
    """Record Python stacks in the trace."""
    rocprofv3: bool = False
    """Run the workers under AMD's rocprofv3, whose output goes to rocprofv3/ in the run directory."""
    rocprofv3_args: str = "--kernel-trace --memory-copy-trace --rccl-trace"
    """What rocprofv3 is to record: its command-line options."""


@dataclass
class Telemetry:
    """What is recorded beside the spans."""

    sample_interval_s: float = ranged(0.1, 0.0, 3600.0)
    """Between samples of clocks, power and temperature, by NVML or rocm-smi; 0: none are taken."""


@dataclass
class WorkloadOptions:
    """Training steps of a ranking model under FSDP2 or DDP, compared with the same steps whose collectives have the
    device to themselves (`none`), and without communication (`floor`); see `fsdp`, `training`, `distributed`."""

    name: str = "fsdp"
    tokens: int | None = ranged(None, 1, 2**31 - 1)
    """Tokens of all ranks' micro batches of a step: what `training` and `ranking` say."""
    warmup: int = ranged(1, 0, 1000)
    """Untimed turns of every variant before the first timed one, after the run that the telemetry records."""
    repeats: int = ranged(7, 3, 1000)
    """Timed turns of every variant."""
    steps: int = ranged(3, 1, 1000)
    """Consecutive steps of each turn, after an untimed one; their mean is the turn's time."""
    seed: int = ranged(0, 0, 2**31 - 1)
    """Of parameters and data."""


@dataclass
class Config(ModelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    ranking: Ranking = field(default_factory=Ranking)
    fsdp: Fsdp = field(default_factory=Fsdp)
    training: Training = field(default_factory=Training)
    distributed: Distributed = field(default_factory=Distributed)
    streams: Streams = field(default_factory=Streams)
    compile: Compile = field(default_factory=Compile)
    profiling: Profiling = field(default_factory=Profiling)
    telemetry: Telemetry = field(default_factory=Telemetry)

    precision_option: ClassVar[str | None] = "training.mixed_precision"
    instead_of_model: ClassVar[Mapping[str, str]] = {
        "num_layers": "ranking.num_layers",
        "vocab_size": "ranking.vocab_size",
    }


HOST_LIMITS = 0.95
"""Share of a step's time from which on the host that enqueues it is what takes so long."""

TRAINING_ON: dict[str, dict[str, Any]] = {
    "cuda": {"max_steps": 30, "batch_size": 64, "mixed_precision": "bf16"},
    "cpu": {"max_steps": 8, "batch_size": 4, "mixed_precision": "none"},
}
"""What null stands for in `training`, by device."""
