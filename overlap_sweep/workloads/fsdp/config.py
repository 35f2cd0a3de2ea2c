"""The typed configuration of `workload=fsdp`. The field docstrings are the manual."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from overlap_sweep.config import BY_TORCH, ModelConfig, ResolvedModel, ResolvedPoint
from overlap_sweep.declared import CASE, FLOOR, NOTHING, SCHEDULES, TRAINS_DIFFERENTLY, Count, Name, one_of, resolved
from overlap_sweep.workloads.profilers import Profiler

_MOST_KNOBS = 100
_LONGEST_OPTIONS = 2000
"""Longest options of torch.compile as JSON, in characters, since a setting's name has them all."""

PRECISION_OF = {"bf16": "bf16", "fp16": "fp16", "none": "fp32"}
"""Precision of a point by its mixed precision."""
AS_MIXED_PRECISION = {**BY_TORCH, "fp32": "none", "float32": "none"}


@dataclass
class Ranking:
    """The ranking model: a transformer backbone, whose layers have the sizes of `model`, predicts the probability of a
    click from embedded features and a user's history. The data is synthetic."""

    num_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Layers of the backbone; each is a unit of sharding and of communication. null: 8, on a CPU 2."""
    sequence_length: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """Events in a user's history. Each is a token, as is each sparse feature; all dense features together are one.
    null: 128, on a CPU 16."""
    num_sparse_features: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Categorical features, each with its own embedding table."""
    num_dense_features: Annotated[int, Meta(ge=1, le=2**16)] = 32
    """Numerical features, embedded together by a linear layer."""
    vocab_size: Annotated[int, Meta(ge=2, le=2**31 - 1)] = 1000
    """Rows of each embedding table."""


KERNELS, COPY_ENGINES = "kernels", "copy_engines"
"""Values of `fsdp.symmetric_memory`: what all-gathers."""
PER_NODE = "nodes"
"""Value of `fsdp.replicas` for one replica on each node."""
WITHIN_NODE = "node"
"""Value of `fsdp.reshard_after_forward` for the ranks of a node."""


@dataclass
class Fsdp:
    """Scheduling of `fully_shard`. Under DDP only `sync_module_states` has an effect."""

    forward_prefetch: Annotated[Any, Meta(description="false, true, or a number of layers"), SCHEDULES] = False
    """Number of layers whose parameters are all-gathered ahead in the forward pass; true: 1. false: torch gathers each
    layer when the host reaches it. With `layers_per_unit`, number of units."""
    backward_prefetch: Annotated[str, one_of("BACKWARD_PRE", "BACKWARD_POST"), SCHEDULES] | None = "BACKWARD_PRE"
    """In the backward pass, all-gather the next layer's parameters before the current layer's gradients are computed
    (BACKWARD_PRE) or after (BACKWARD_POST). null: when they are needed."""
    limit_all_gathers: Annotated[bool, SCHEDULES] = False
    """Let the host wait while two gathered layers are not computed yet, as FSDP1 does. FSDP2 does not need it."""
    reshard_after_forward: Annotated[Any, Meta(description="true, false, node, or a number of ranks"), FLOOR] = True
    """Free the gathered parameters after the forward pass and gather them again for the backward pass. false: keep
    them. A number: reshard them to groups of that many ranks. node: to the ranks of each node, so that the backward
    pass gathers within nodes; where every model lies within a node, the same as true."""
    sync_module_states: Annotated[bool, SCHEDULES] = True
    """Broadcast rank 0's initial parameters. false: every rank draws the same ones."""
    use_orig_params: Annotated[bool, FLOOR] = True
    """Option of FSDP1. FSDP2 has no flat parameters, so false is refused."""
    replicas: Annotated[Any, Meta(description="a number of replicas, or nodes"), FLOOR] = 1
    """Number of replicas in hybrid sharding (HSDP). Each group of neighbouring ranks shards a whole model; gradients
    are all-reduced between groups. nodes: one replica on each node, so that no parameter is gathered from another; with
    one node the same as 1."""
    reduce_dtype: Annotated[str, one_of("fp32", "bf16", "fp16", also=BY_TORCH), FLOOR, TRAINS_DIFFERENTLY] | None = None
    """Data type in which gradients are reduced. null: the type in which they are computed."""
    layers_per_unit: Annotated[int, Meta(ge=1, le=1024), FLOOR] = 1
    """Number of neighbouring layers that are gathered and reduced as one unit: fewer and larger collectives, more
    memory for gathered parameters. The last unit has the rest."""
    separate_reduce_scatter_group: Annotated[bool, SCHEDULES] = False
    """Reduce-scatter in a process group of its own, so that reduce-scatters and all-gathers don't queue in one
    communicator."""
    symmetric_memory: Annotated[str, one_of(KERNELS, COPY_ENGINES), FLOOR] | None = None
    """Keep the buffers of collectives in symmetric memory of NCCL. `kernels`: NCCL all-gathers and reduce-scatters by
    kernels that access the other GPUs' buffers directly (torch 2.9, NCCL 2.27). `copy_engines`: all-gathers by copy
    engines, which take no SMs (NCCL 2.28, NCCL_CTA_POLICY=2). Needs peer access between GPUs, and shards within a
    node. null: torch's memory."""

    def numbered(self, nodes: int, ranks: int | None) -> Self:
        """Returns the options with numbers for what refers to nodes, so that equal shardings are equal points. As they
        are if the number of ranks is not known, of a point that was not measured."""
        replicas, reshard = self.replicas, self.reshard_after_forward
        if replicas == PER_NODE:
            replicas = nodes
        if reshard == WITHIN_NODE and ranks:
            per_node = ranks // nodes
            # One rank alone keeps what it has gathered.
            reshard = replicas * per_node >= ranks or (per_node > 1 and per_node)
        return replace(self, replicas=replicas, reshard_after_forward=reshard)


@dataclass
class Training:
    """The training loop and the amount of work in each step."""

    max_steps: Annotated[int, Meta(ge=2, le=10**6), NOTHING] | None = None
    """Steps of the run that telemetry records, before the comparison with `none` and `floor`. null: 30, on a CPU 8."""
    log_interval: Annotated[int, Meta(ge=1, le=10**6), NOTHING] = 10
    """Steps between lines in worker.log."""
    batch_size: Annotated[int, Meta(ge=1, le=2**20), FLOOR, TRAINS_DIFFERENTLY] | None = None
    """Samples in each rank's micro batch. null: 64, on a CPU 4."""
    gradient_accumulation: Annotated[int, Meta(ge=1, le=4096), FLOOR, TRAINS_DIFFERENTLY] = 1
    """Micro batches in a step; gradients are reduced in the backward pass of the last one."""
    mixed_precision: (
        Annotated[str, one_of("bf16", "fp16", "none", also=AS_MIXED_PRECISION), FLOOR, TRAINS_DIFFERENTLY] | None
    ) = None
    """Data type of computation. FSDP2 gathers parameters in it, DDP uses autocast; fp16 scales the loss. null: bf16, on
    a CPU none."""
    learning_rate: Annotated[float, Meta(ge=0.0, le=100.0), TRAINS_DIFFERENTLY] = 1e-4
    """Learning rate of AdamW after warm-up."""
    warmup_steps: Annotated[int, Meta(ge=0, le=10**6), TRAINS_DIFFERENTLY] = 5
    """Steps over which the learning rate rises linearly."""
    weight_decay: Annotated[float, Meta(ge=0.0, le=100.0), TRAINS_DIFFERENTLY] = 0.01
    """Weight decay of AdamW."""
    grad_clip_norm: Annotated[float, Meta(ge=0.0, le=10**6), FLOOR, TRAINS_DIFFERENTLY] = 1.0
    """Gradients are clipped to this norm. 0: not clipped, only their norm is recorded."""
    num_workers: Annotated[int, Meta(ge=0, le=64), FLOOR] = 0
    """Worker processes of each rank's DataLoader, which draw micro batches during training. 0: they are drawn before
    the first step and kept on the device."""
    output_dir: Annotated[str, NOTHING] | None = None
    """Directory for the run or sweep, instead of `multirun/<date>/<time>`."""


@dataclass
class Distributed:
    """Strategy and ranks, and how collectives are issued."""

    strategy: Annotated[str, one_of("fsdp2", "ddp"), FLOOR] = "fsdp2"
    """`fsdp2`: `fully_shard` on each layer; `ddp`: DistributedDataParallel."""
    dp_size: Annotated[int, Meta(ge=1, le=1024), CASE] | None = None
    """Data-parallel ranks: the world size of the torchrun group. null: all visible GPUs, on a CPU 2."""
    enable_overlap: Annotated[bool, SCHEDULES] = False
    """Issue the collectives on separate streams with the priorities of `streams`, through DDP's communication hook or
    FSDP2's custom collectives. false: on the library's own streams."""
    overlap_reduce_scatter: Annotated[bool, SCHEDULES] = False
    """DDP with enable_overlap: also reduce-scatter every bucket, as additional load."""
    overlap_clone_for_reduce_scatter: Annotated[bool, SCHEDULES] = True
    """DDP with overlap_reduce_scatter: reduce-scatter a copy, so that the two collectives don't share memory."""
    bucket_cap_mb: Annotated[float, Meta(ge=0.001, le=10**5), FLOOR] = 25.0
    """Size of DDP's gradient buckets, in MiB."""
    gradient_as_bucket_view: Annotated[bool, FLOOR] = True
    """DDP: gradients are views of the buckets."""
    env: Annotated[dict[str, Any], FLOOR] = field(default_factory=dict)
    """Environment variables of the workers for NCCL, RCCL and their transports; null: not set. Each environment needs
    its own torchrun group."""


@dataclass
class Streams:
    """Priorities of the streams that `distributed.enable_overlap` creates on a GPU."""

    compute: Annotated[str, one_of("normal", "high"), SCHEDULES] = "normal"
    """Priority of the computation's stream."""
    all_reduce: Annotated[str, one_of("normal", "high"), SCHEDULES] = "high"
    """Priority of the all-reduces' stream."""
    reduce_scatter: Annotated[str, one_of("normal", "high"), SCHEDULES] = "high"
    """Priority of the stream for reduce-scatters of gradients."""
    auxiliary: Annotated[str, one_of("normal", "high"), SCHEDULES] = "high"
    """Priority of the stream for all-gathers of parameters."""


@dataclass
class Compile:
    """torch.compile of every layer. If it fails, the layers run uncompiled, and the reason is recorded."""

    enabled: Annotated[bool, FLOOR] = False
    """Compile the layers."""
    backend: Annotated[str, FLOOR] = "inductor"
    """torch.compile's backend. On ROCm, inductor is replaced by aot_eager."""
    mode: Annotated[str, FLOOR] | None = None
    """torch.compile's mode, such as max-autotune."""
    fullgraph: Annotated[bool, FLOOR] = False
    """Fail if the layer has a graph break."""
    dynamic: Annotated[bool, FLOOR] | None = None
    """Compile for dynamic shapes. null: torch decides."""
    options: Annotated[dict[str, Any], FLOOR] = field(default_factory=dict)
    """torch.compile's options; not together with `mode`."""


@dataclass
class Profiling(Profiler):
    """torch.profiler over additional steps, whose telemetry is marked; or a profiler that starts the workers."""

    enabled: bool | None = None
    """Run the profiler. null: yes, unless `profile=none`."""
    wait: Annotated[int, Meta(ge=0, le=10**4)] = 1
    """Steps without the profiler at the start of each cycle."""
    warmup: Annotated[int, Meta(ge=0, le=10**4)] = 1
    """Profiled steps that are discarded."""
    active: Annotated[int, Meta(ge=1, le=10**4)] = 2
    """Profiled steps that are kept."""
    repeat: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Number of cycles, each with its own trace."""
    tensorboard: bool = False
    """Also write `torch_profiler/rank<r>/` for TensorBoard."""
    chrome_trace: bool = True
    """Write the traces that analyze.py reads. Not on ROCm, where exporting them is known to crash."""
    record_shapes: bool = False
    """Record the operators' input shapes in the trace."""
    profile_memory: bool = False
    """Record allocations in the trace."""
    with_stack: bool = False
    """Record Python stacks in the trace."""


@dataclass
class Telemetry:
    """Telemetry of the GPUs."""

    sample_interval_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.1
    """Seconds between samples of clocks, power and temperature, by NVML or rocm-smi. 0: no samples."""


@dataclass
class WorkloadOptions:
    """Training steps of a ranking model under FSDP2 or DDP, compared with the same steps with no overlap (`none`) and
    without communication (`floor`); see `fsdp`, `training`, `distributed`."""

    name: str = "fsdp"
    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Tokens per step, over all ranks and micro batches; set by `training` and `ranking`."""
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 1
    """Untimed rounds of every variant before the timed ones, after the run that telemetry records."""
    repeats: Annotated[int, Meta(ge=3, le=1000)] = 7
    """Timed rounds of every variant."""
    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Consecutive steps in each round, after an untimed one; the round's time is their mean. null: 3, on a CPU 1."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Random seed of parameters and data."""


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

    @property
    def world_size(self) -> int:
        assert self.distributed.dp_size
        return self.distributed.dp_size


OF_COLLECTIVES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "FI_", "OFI_", "UCX_", "GLOO_")
"""Prefixes of the variables of `distributed.env` that only schedule; others may affect computation, too."""


@resolved
class AskedFsdp(Fsdp):
    """Options of `fsdp` as the user gives them: they may refer to nodes."""

    forward_prefetch: bool | int = False
    reshard_after_forward: bool | int | Literal["node"] = True
    replicas: Annotated[int, Meta(ge=1, le=1024)] | Literal["nodes"] = 1


@resolved
class AskedDistributed(Distributed):
    env: Annotated[dict[Name, Name | int | float | bool | None], Meta(max_length=_MOST_KNOBS)] = field(
        default_factory=dict
    )


@resolved
class AskedCompile(Compile):
    backend: Name = "inductor"
    mode: Name | None = None
    options: Annotated[dict[Name, Any], Meta(max_length=_MOST_KNOBS)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(json.dumps(self.options)) > _LONGEST_OPTIONS:
            raise ValueError("very long options of torch.compile")


@resolved
class Asked(Config, ResolvedPoint):
    model: ResolvedModel = field()
    backend: str = field()
    fsdp: AskedFsdp = field()
    distributed: AskedDistributed = field()
    compile: AskedCompile = field()
    streams: Streams = field()


@resolved
class ResolvedOptions(WorkloadOptions):
    tokens: Count = field()


@resolved
class ResolvedRanking(Ranking):
    num_layers: Count = field()
    sequence_length: Count = field()
    num_sparse_features: Count = field()
    num_dense_features: Count = field()


@resolved
class ResolvedFsdp(AskedFsdp):
    reshard_after_forward: bool | int = True
    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1


@resolved
class ResolvedTraining(Training):
    batch_size: Count = field()
    gradient_accumulation: Count = field()
    mixed_precision: Annotated[str, one_of("bf16", "fp16", "none")] = field()

    @property
    def samples_per_rank(self) -> int:
        """Returns the samples of a rank's step, over all micro batches."""
        return self.batch_size * self.gradient_accumulation


@resolved
class ResolvedDistributed(AskedDistributed):
    dp_size: Count = field()


@resolved
class Resolved(Asked):
    workload: ResolvedOptions = field()
    precision: str = field()
    tp_size: Count = field()
    ranking: ResolvedRanking = field()
    fsdp: ResolvedFsdp = field()
    training: ResolvedTraining = field()
    distributed: ResolvedDistributed = field()

    @property
    def samples_per_step(self) -> int:
        """Returns the samples of a step, over all ranks and micro batches."""
        return self.training.samples_per_rank * self.world_size


HOST_LIMITS = 0.95
"""A step is launch-bound if the host needs at least this share of its time to enqueue it."""

TRAINING_ON: dict[str, dict[str, int | str]] = {
    "cuda": {"max_steps": 30, "batch_size": 64, "mixed_precision": "bf16"},
    "cpu": {"max_steps": 8, "batch_size": 4, "mixed_precision": "none"},
}
"""Values for null in `training`, by device."""
RANKING_ON: dict[str, dict[str, int]] = {
    "cuda": {"num_layers": 8, "sequence_length": 128},
    "cpu": {"num_layers": 2, "sequence_length": 16},
}
"""Values for null in `ranking`, by device."""
STEPS_ON = {"cuda": 3, "cpu": 1}
"""`workload.steps` where it is null, by device."""
