"""The typed configuration of `workload=tp_training`. The field docstrings are the manual.

The names are those of usual benchmark scripts. The implementation is `impl`, the ranks are `tp_size` and `dp_size`, the
model is `model`, with its number of layers `model.num_layers`.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from overlap_sweep.config import (
    OF_LANGUAGE_MODELS,
    OF_OPERATORS,
    TORCHS,
    ResolvedModel,
    ResolvedPoint,
    TensorParallelConfig,
)
from overlap_sweep.declared import NOTHING, TRAINS_DIFFERENTLY, Count, Name, Text, one_of, resolved, roles_of
from overlap_sweep.errors import UserError
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads.tp_training.language_model import LanguageModel

IMPLEMENTATIONS = ("autotp", "fsdp_dtensor", "async_tp", "megatron")

IMPLEMENTATIONS_GROUP = "overlap_sweep.tp_implementations"
"""Entry point group for implementations of other packages: a name is a value of `impl`."""


@cache
def registered_implementations() -> dict[str, EntryPoint]:
    """Returns the entry points of other packages' implementations, by name."""
    return {
        entry.name: entry for entry in entry_points(group=IMPLEMENTATIONS_GROUP) if entry.name not in IMPLEMENTATIONS
    }


DEFAULT_IMPL = "fsdp_dtensor"

SEQUENCE_PARALLEL = ("async_tp", "megatron")
"""Implementations that use sequence parallelism by default, since they overlap nothing without it."""

PRECISION_OF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Precision by `tp_training.dtype`."""
BYTES_OF = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number, by precision."""


@dataclass
class TpTraining:
    """Training of a causal language model. Options of one implementation are ignored by the others (null in their
    points), so that one command can sweep all."""

    attn_impl: Annotated[str, one_of("sdpa", "flash_attention_2", "eager")] | None = "sdpa"
    """Hugging Face's attention implementation. Not for megatron, which uses Transformer Engine's."""
    zero_stage: Annotated[int, Meta(ge=0, le=2)] | None = 1
    """autotp: DeepSpeed's ZeRO stage, sharding over the data-parallel ranks. 0: none; 1: optimizer states; 2: also
    gradients."""
    vocab_parallel: bool = True
    """Shard embedding and output projection over the tensor-parallel ranks by vocabulary, and compute the loss without
    gathering logits. false: every rank holds all rows; not for megatron."""
    sequence_parallel: bool | None = None
    """Shard activations between the parallel linears by sequence. null: true for async_tp and megatron, which overlap
    nothing without it, else false. Not for autotp."""
    compile: bool = False
    """torch.compile every layer; async_tp always does. Not for megatron."""
    tp_comm_overlap: bool | None = True
    """megatron, on a GPU with sequence_parallel: overlap by Transformer Engine's userbuffers."""
    tp_comm_overlap_cfg: str | None = None
    """megatron: tuned YAML file, as written by the tuner or `analyze.py`, with the switches in its comments. null:
    Transformer Engine's defaults."""
    use_distributed_optimizer: bool | None = True
    """megatron: shard optimizer states over the data-parallel ranks, which reduce-scatter gradients and all-gather
    parameters. false: every rank has all states, and gradients are all-reduced."""
    overlap_grad_reduce: bool | None = True
    """megatron: reduce the gradients of a bucket during the backward pass, as soon as all of them are ready."""
    overlap_param_gather: bool | None = None
    """megatron: all-gather updated parameters during the next forward pass, bucket by bucket. Requires
    use_distributed_optimizer and overlap_grad_reduce. null: true where they are."""
    ddp_bucket_size: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    """megatron, with overlap_grad_reduce: number of parameters in a bucket. null: 40 million, or with more than
    40 data-parallel ranks a million per rank."""
    env: dict[str, Any] | None = field(default_factory=dict)
    """Environment variables of the workers for NCCL, RCCL and their transports. Each environment needs its own torchrun
    group."""
    overlap_comm: bool | None = False
    """autotp, with ZeRO: reduce gradients during the backward pass."""
    reduce_bucket_size: Annotated[int, Meta(ge=1, le=10**12)] | None = 500_000_000
    """autotp, with ZeRO: number of gradients that are reduced at a time."""
    allgather_bucket_size: Annotated[int, Meta(ge=2, le=10**12)] | None = 500_000_000
    """autotp, with ZeRO: number of parameters that are all-gathered at a time, must be even."""
    reshard_after_forward: bool | None = True
    """fsdp_dtensor and async_tp: free the other data-parallel ranks' parameters of a layer after its forward pass and
    gather them again for its backward. false: keep them until then."""
    forward_prefetch: Annotated[int, Meta(ge=0, le=64)] | None = 0
    """fsdp_dtensor and async_tp: number of layers whose parameters are gathered when a layer's forward pass begins. 0:
    each gathers its own."""
    backward_prefetch: Annotated[int, Meta(ge=0, le=64)] | None = 1
    """fsdp_dtensor and async_tp, with reshard_after_forward: the same in the backward pass."""
    batch_size: Annotated[int, Meta(ge=1, le=2**20), TRAINS_DIFFERENTLY] = 1
    """Sequences in each data-parallel rank's micro batch."""
    seq_length: Annotated[int, Meta(ge=2, le=2**24), TRAINS_DIFFERENTLY] | None = None
    """Tokens per sequence. null: 2048, on a CPU 64."""
    num_training_steps: Annotated[int, Meta(ge=2, le=10**6), TRAINS_DIFFERENTLY] | None = None
    """Number of training steps. null: 100, on a CPU 8."""
    warmup_steps: Annotated[int, Meta(ge=0, le=10**6), TRAINS_DIFFERENTLY] | None = None
    """First steps, which don't count for times and memory. null: 5, on a CPU 2."""
    gradient_accumulation_steps: Annotated[int, Meta(ge=1, le=4096), TRAINS_DIFFERENTLY] = 1
    """Micro batches per step."""
    learning_rate: Annotated[float, Meta(ge=0.0, le=100.0), TRAINS_DIFFERENTLY] = 1e-5
    """Learning rate of AdamW, constant."""
    weight_decay: Annotated[float, Meta(ge=0.0, le=100.0), TRAINS_DIFFERENTLY] = 0.01
    """Weight decay of AdamW, for all parameters."""
    max_grad_norm: Annotated[float, Meta(ge=0.0, le=10**6), TRAINS_DIFFERENTLY] = 1.0
    """Gradients are clipped to this norm over all ranks. 0: not clipped, only their norm is recorded."""
    dtype: Annotated[str, one_of(*PRECISION_OF, also=TORCHS), TRAINS_DIFFERENTLY] | None = None
    """Data type of computation and communication. Weights and optimizer states are float32 in all implementations;
    float16 scales the loss. null: bfloat16, on a CPU float32."""
    autocast: bool = False
    """Use torch.autocast to `dtype` with float32 parameters, instead of parameters in `dtype`. Not for megatron."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs and recompute the rest in the backward pass."""
    log_interval: Annotated[int, Meta(ge=1, le=10**6), NOTHING] = 10
    """Steps between lines in worker.log. The host waits for the device at each."""
    output_dir: str | None = None
    """Directory for the run directories, instead of `multirun/<date>/<time>`. Several runs may share it."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1), TRAINS_DIFFERENTLY] = 42
    """Random seed of initial weights and data, which are the same for all implementations."""
    peak_tflops: Annotated[float, Meta(ge=0.001, le=10**6), NOTHING] | None = None
    """Dense peak of one GPU in `dtype`, in TFLOP/s, for model FLOP utilisation. null: from the GPU's name, if known."""


@dataclass
class WorkloadOptions:
    """Training steps of a language model by one of several tensor-parallel stacks, timed step by step; see `impl` and
    `tp_training`."""

    name: str = "tp_training"
    tokens: Annotated[int, Meta(ge=1, le=2**40)] | None = None
    """Tokens per step, over all data-parallel ranks and micro batches; set by `tp_training`."""
    repeats: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """Timed steps; set by `tp_training`."""
    profiled: Annotated[int, Meta(ge=1, le=100)] = 2
    """Profiled steps after the timed ones, unless `profile=none`."""


@dataclass
class Config(TensorParallelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    tp_size: Annotated[int, Meta(ge=1, le=8)] | None = None
    """Tensor-parallel ranks, one GPU or CPU process each. null: `ranks` (all visible GPUs, on a CPU 2) / dp_size, at
    most 8."""
    impl: Annotated[str, one_of(*IMPLEMENTATIONS, *sorted(registered_implementations()))] | None = None
    """Training stack. `autotp`: DeepSpeed's AutoTP and ZeRO; `fsdp_dtensor`: FSDP2 over the data-parallel ranks and
    DTensor over the tensor-parallel ones; `async_tp`: the same with PyTorch's asynchronous TP; `megatron`:
    Megatron-Core. null: fsdp_dtensor. Other packages can add some (docs/tp_training.md)."""
    dp_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Number of data-parallel ranks; the total is tp_size x dp_size. null: `ranks` / tp_size, without `ranks` 1."""
    ranks: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """Number of all ranks, used where dp_size is null: ranks=8 tp_size=2,4,8 are three grids of eight ranks."""
    tp_training: TpTraining = field(default_factory=TpTraining)

    reads_of_model: ClassVar[tuple[str, ...]] = (
        *(name for name in OF_OPERATORS if name != "gated_mlp"),
        *OF_LANGUAGE_MODELS,
    )
    precision_option: ClassVar[str | None] = "tp_training.dtype"

    @property
    def world_size(self) -> int:
        return super().world_size * dp_size_of(self)


@resolved
class ResolvedOptions(WorkloadOptions):
    tokens: Count = field()


@resolved
class Asked(Config, ResolvedPoint):
    model: ResolvedModel = field()
    backend: str = field()
    impl: Name | None = None
    """Also another package's."""


@resolved
class ResolvedTraining(TpTraining):
    seq_length: Count = field()
    num_training_steps: Count = field()
    warmup_steps: Annotated[int, Meta(ge=0)] = field()
    dtype: Annotated[str, one_of(*PRECISION_OF)] = field()
    tp_comm_overlap_cfg: Text | None = None
    # Null at its default, so that a point is the one that it was before there was the option.
    attn_impl: Annotated[str, one_of("sdpa", "flash_attention_2", "eager")] | None = None
    zero_stage: Annotated[int, Meta(ge=0, le=2)] | None = None
    use_distributed_optimizer: bool | None = None
    overlap_grad_reduce: bool | None = None
    env: dict[str, Any] | None = None
    overlap_comm: bool | None = None
    reduce_bucket_size: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    allgather_bucket_size: Annotated[int, Meta(ge=2, le=10**12)] | None = None
    reshard_after_forward: bool | None = None
    forward_prefetch: Annotated[int, Meta(ge=0, le=64)] | None = None
    backward_prefetch: Annotated[int, Meta(ge=0, le=64)] | None = None


Training = TypeVar("Training", bound=TpTraining)


class _Layers(msgspec.Struct):
    num_hidden_layers: Count


@resolved
class Resolved(Asked):
    workload: ResolvedOptions = field()
    precision: str = field()
    tp_size: Count = field()
    impl: Name = field()
    dp_size: Count = field()
    tp_training: ResolvedTraining = field()
    language_model: dict[str, Any] = field()
    """Fields of the model's Hugging Face config."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions of the implementation's libraries."""
    overlap_cfg: OverlapConfig | None = None
    """Content of `tp_comm_overlap_cfg`."""

    def __post_init__(self) -> None:
        # Reading a result needs no more of it.
        msgspec.convert(self.language_model, _Layers)

    @property
    def num_layers(self) -> int:
        return int(self.language_model["num_hidden_layers"])

    @property
    def trained(self) -> LanguageModel:
        """Returns the fields that the model is built by."""
        return msgspec.convert(self.language_model, LanguageModel)


OF_DATA_PARALLEL = {
    "megatron": ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"),
    "autotp": ("overlap_comm", "reduce_bucket_size", "allgather_bucket_size"),
    "fsdp_dtensor": ("reshard_after_forward", "forward_prefetch", "backward_prefetch"),
    "async_tp": ("reshard_after_forward", "forward_prefetch", "backward_prefetch"),
}
"""Options of each implementation's data parallelism. In a completed point they are null at their defaults, and where
they have no effect, so that it is the point that it was before there was the option."""
DATA_PARALLEL_OPTIONS = tuple(dict.fromkeys(name for names in OF_DATA_PARALLEL.values() for name in names))
TRAINED = tuple(name for name, roles in roles_of(TpTraining).items() if TRAINS_DIFFERENTLY in roles)
"""Options of `tp_training` that change what is trained."""
REPORTED = tuple(name for name, roles in roles_of(TpTraining).items() if NOTHING in roles)
"""Options of `tp_training` that affect the log and the report only."""


def dp_size_of(config: Config) -> int:
    """Returns the number of data-parallel ranks of a point as composed or completed. UserError if its ranks don't make
    a grid."""
    tp_size, ranks = config.tp_size, config.ranks
    if config.dp_size is not None or ranks is None:
        return config.dp_size or 1
    assert tp_size
    if ranks % tp_size:
        raise UserError(f"ranks={ranks} is not divisible by tp_size={tp_size}; give a multiple.")
    return ranks // tp_size


def data_parallel(training: Training, impl: str) -> Training:
    """Returns the options with the defaults of a point's data parallelism in place of null; those of all for another
    package's implementation."""
    names = OF_DATA_PARALLEL.get(impl, DATA_PARALLEL_OPTIONS)
    unset = [name for name in names if getattr(training, name) is None]
    found = replace(training, **{name: getattr(TpTraining(), name) for name in unset})
    if impl == "megatron" and found.overlap_param_gather is None:
        found.overlap_param_gather = found.use_distributed_optimizer and found.overlap_grad_reduce
    return found


TP_TRAINING_ON: dict[str, dict[str, int | str]] = {
    "cuda": {"seq_length": 2048, "num_training_steps": 100, "warmup_steps": 5, "dtype": "bfloat16"},
    "cpu": {"seq_length": 64, "num_training_steps": 8, "warmup_steps": 2, "dtype": "float32"},
}
"""Values for null, by device."""
