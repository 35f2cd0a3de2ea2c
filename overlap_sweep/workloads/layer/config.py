"""The typed configuration of `workload=layer`. The field docstrings are the manual."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from msgspec import Meta

from overlap_sweep.config import MOST_SMS, ResolvedModel, ResolvedPoint, TensorParallelConfig
from overlap_sweep.declared import Count, one_of, resolved
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.space import HIGHEST_PRIORITY, LAYER_KINDS, MOE_KIND, MOST_OF


@dataclass
class WorkloadOptions:
    """A transformer layer or a part of it, under several overlap configurations in turns; see `layer`."""

    name: str = "layer"
    tokens: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    """Tokens in the batch: sequence length x `layer.micro_batch_size`. null: 8192 on a GPU, 128 on a CPU."""
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 2
    """Untimed iterations of every variant before the first timed one."""
    repeats: Annotated[int, Meta(ge=3, le=1000)] | None = None
    """Timed iterations of every variant. null: 21 on a GPU, 7 on a CPU."""
    noise_goal: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Stop repeating once the noise of each variant's ratio to `none` is at most this fraction. null: always
    `repeats`."""
    profiled: Annotated[int, Meta(ge=1, le=100)] = 2
    """Iterations recorded with the profiler, for the variants that `profile` selects."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Random seed of weights and inputs."""
    tolerance: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Largest allowed relative error of output and gradients against `none`. null: 1e-4 for fp32, 5e-2 for fp16 and
    bf16, 0.2 for FP8 and FP4."""


DEFAULT_EP_SIZE = 2


@dataclass
class Moe:
    """`layer=moe`: Megatron-Core's transformer layer with a mixture of experts, which are spread over the ranks."""

    ep_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Ranks, one GPU or CPU process each, that the experts are spread over, equally many on each. Each has its own
    tokens, as many as `workload.tokens`. With tp_size (1, unless it is set), as many neighbouring ranks share their
    tokens, attention and shared experts. null: 2."""
    routing: Annotated[str, one_of("balanced", "random")] | None = None
    """Experts that tokens are sent to. `balanced`: each expert gets as many tokens as any other; `random`: each token
    draws its experts, so that some get more. null: balanced."""
    micro_batches: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Micro batches of an iteration, each of `workload.tokens`. Between the first forward and the last
    backward are pairs of a backward and the next forward, in which `micro_batches` overlaps. null: 2."""
    num_sm: Annotated[int, Meta(ge=1, le=MOST_SMS)] | None = None
    """SMs of the communication of the variants other than `none`: of DeepEP's kernels, and CTAs of the NCCL
    communicator. null: the libraries' defaults, 20 for DeepEP."""
    grouped_gemm: bool | None = None
    """Whether a rank's experts are multiplied by one grouped GEMM, as Transformer Engine can. null: true on a GPU."""


@dataclass
class Layer:
    """The layer: a transformer layer, or a part of one with `layer=<kind>`. Transformer Engine's own, or with
    backend=torch an equivalent one on plain torch.distributed."""

    kind: Annotated[str, one_of(*LAYER_KINDS, MOE_KIND)] = "transformer_layer"
    """Kind of layer; `layer=<kind>` sets it."""
    variants: list[str] | None = None
    """Overlap configurations to measure in turns: `none`; `default` (Transformer Engine's; torch has none);
    `file:<path>` (a tp_comm_overlap_cfg); a method (for every slot that takes it, with `num_sm` and the other knobs;
    the other slots are not overlapped); `split` (all-gathers by ring exchange, reduce-scatters by pipeline);
    `rs_dgrad` (the default, but with dgrad's own reduce-scatter by ring exchange instead of the bulk overlaps);
    `atomic` (ring exchange with one atomic GEMM). `floor`, the same layer without communication, is always measured.
    Switches may follow a name other than a file's: `bulk ub_bulk_wgrad=false`.
    null: `none`, and the configuration that the next options choose; without any `default`, `rs_dgrad`, `ring_exchange`
    and `bulk`, with a backend that has no default `bulk`, `ring_exchange` and `pipeline`, as far as they can run. With
    layer=moe: `none` (all-to-alls with nothing that hides them), `allgather`, `shared_experts` (computed during the
    dispatch), `micro_batches` (one's communication during another's computation), `deepep`, `deepep_micro_batches`;
    null: all but `allgather` that can run."""
    comm_overlap: bool = True
    """false: only `none` and `floor`, whatever the other options."""
    tp_comm_overlap_cfg: str | None = None
    """A tp_comm_overlap_cfg to use instead of the default; in `variants` it is `file:<path>`."""
    ub_overlap_rs_dgrad: bool = False
    """Use `rs_dgrad` instead of the default."""
    ub_overlap_ag: bool | None = None
    """Whether the default, or `rs_dgrad`, overlaps all-gathers with their GEMMs: forward of qkv and fc1, dgrad of proj
    and fc2. null: as it does by itself. This and the next three are arguments of te.TransformerLayer."""
    ub_overlap_rs: bool | None = None
    """Whether it overlaps the reduce-scatters of proj and fc2 in forward. null: as it does by itself."""
    ub_bulk_wgrad: bool | None = None
    """Whether it overlaps wgrad of qkv and fc1 with the reduce-scatter of dgrad's output. null: as it does by
    itself."""
    ub_bulk_dgrad: bool | None = None
    """Whether it overlaps dgrad of qkv and fc1 with the all-gather of wgrad's input. null: as it does by itself."""
    num_replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Data-parallel replicas (DDP): the layer runs on tp_size x num_replicas GPUs."""
    micro_batch_size: Annotated[int, Meta(ge=1, le=2**20)] = 1
    """Sequences in the batch."""
    training: bool = False
    """Whether to run training steps: an Adam step after each backward pass, and with delayed scaling new FP8 scales in
    each step."""
    moe: Moe = field(default_factory=Moe)


@dataclass
class KnobsConfig(TensorParallelConfig):
    """Knobs of the overlap of operators and layers, and the options of the layer."""

    num_sm: Annotated[int, Meta(ge=1, le=MOST_SMS)] = 4
    """SMs for communication: CTAs of the userbuffers kernel or the NCCL communicator; with gloo the concurrent chunks
    and worker threads."""
    aggregate: bool | None = None
    """ring_exchange of an all-gather: multiply two chunks at a time (half as many GEMMs of twice the size)."""
    num_splits: Annotated[int, Meta(ge=1, le=MOST_OF["num_splits"])] | None = None
    """pipeline: number of chunks of the GEMM and its reduce-scatter."""
    cga_size: Annotated[int, Meta(ge=1, le=MOST_OF["cga_size"])] | None = None
    """CTAs per cluster of the communication kernel."""
    set_sm_margin: bool | None = None
    """Transformer Engine: whether the GEMM leaves the SMs of the communication kernel free."""
    use_ce: bool | None = None
    """Transformer Engine: whether ring exchange uses copy engines instead of SMs."""
    atomic_gemm: bool | None = None
    """Transformer Engine: whether one GEMM signals its finished chunks (FP8, CUDA 12 only)."""
    fp8_buf: bool | None = None
    """Transformer Engine: whether to communicate in FP8."""
    comm_priority: Annotated[int, Meta(ge=HIGHEST_PRIORITY, le=0)] | None = None
    """Transformer Engine: priority of the streams that communicate; lower numbers come first. null: the GPU's
    highest."""
    gemm_priority: Annotated[int, Meta(ge=HIGHEST_PRIORITY, le=0)] | None = None
    """Transformer Engine: priority of the streams of the GEMMs. null: 0, the lowest."""
    pipeline_rs_overlap_first_gemm: bool | None = None
    """Transformer Engine: whether a pipeline enqueues each chunk's GEMM before the reduce-scatter of the chunk before
    it, not after."""
    with_cublasmp: bool | None = None
    """Transformer Engine: whether cuBLASMp overlaps instead of userbuffers, where the library was built with it. It has
    only the knob `num_sm`, and no `bulk`. Megatron-LM cannot turn it on."""
    layer: Layer = field(default_factory=Layer)

    groups: ClassVar[Mapping[str, Mapping[str, Mapping[str, object]]]] = {
        "layer": {
            **{kind: {"layer": {"kind": kind}} for kind in LAYER_KINDS},
            MOE_KIND: {"defaults": [{"override /tp_size": "1"}], "layer": {"kind": MOE_KIND}},
        }
    }


@dataclass
class Config(KnobsConfig):
    tp_size: Annotated[int, Meta(ge=1, le=8)] | None = None
    """Tensor-parallel ranks, one GPU or CPU process each. null: all visible GPUs, at most 8, over
    `layer.num_replicas`; on a CPU 2 of them."""
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)

    @property
    def world_size(self) -> int:
        if self.layer.kind == MOE_KIND:
            return self.layer.moe.ep_size or DEFAULT_EP_SIZE
        return super().world_size * self.layer.num_replicas


@resolved
class ResolvedOptions(WorkloadOptions):
    tokens: Count = field()


@resolved
class ResolvedMoe(Moe):
    arguments: dict[str, dict[str, bool | int | str]] = field(default_factory=dict)
    """Megatron-Core's arguments, by variant."""


@resolved
class ResolvedLayer(Layer):
    kind: Annotated[str, one_of(*LAYER_KINDS, MOE_KIND)] = field()
    num_replicas: Annotated[int, Meta(ge=1, le=1024)] = field()
    moe: ResolvedMoe = field(default_factory=ResolvedMoe)
    configurations: dict[str, OverlapConfig] = field(default_factory=dict)
    """The overlap of each variant."""


@resolved
class Asked(Config, ResolvedPoint):
    model: ResolvedModel = field()
    backend: str = field()


@resolved
class Resolved(Asked):
    workload: ResolvedOptions = field()
    precision: str = field()
    tp_size: Count = field()
    num_sm: Count | None = None  # type: ignore[assignment]
    """null: an unused knob, which no longer has its default."""
    layer: ResolvedLayer = field()
