"""Chooses the setting to try, by cause, by what the collective carries, and by the libraries that the trace shows.

Causes are decided without names; only the words here depend on them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from overlap_sweep.diagnosis import Cause


class Advice(NamedTuple):
    cause: Cause
    needs: frozenset[str]
    """Roles, collectives and libraries that must all hold."""
    sentence: str


def _advice(cause: Cause, needs: str, sentence: str) -> Advice:
    return Advice(cause, frozenset(needs.split()), sentence)


ADVICE: Sequence[Advice] = (
    _advice(
        "dependency",
        "activation all_to_all",
        "Run other computation meanwhile: Megatron-Core overlap_moe_expert_parallel_comm or moe_shared_expert_overlap, and "
        "DeepEP (moe_token_dispatcher_type=flex, moe_enable_deepep) for a faster exchange.",
    ),
    _advice(
        "dependency",
        "activation point_to_point",
        "Shorten the pipeline's bubble: more microbatches per step, or an interleaved schedule "
        "(Megatron-Core virtual_pipeline_model_parallel_size, overlap_p2p_comm; torch ScheduleInterleaved1F1B).",
    ),
    _advice(
        "dependency",
        "activation transformer_engine",
        "Overlap it with the GEMM next to it: Megatron-Core tp_comm_overlap=True with a tp_comm_overlap_cfg tuned for this "
        "machine (overlap-sweep tune), Transformer Engine ub_overlap_ag, ub_overlap_rs, ub_bulk_dgrad, ub_bulk_wgrad.",
    ),
    _advice(
        "dependency",
        "activation dtensor",
        "Overlap it with the GEMM next to it: sequence parallelism (SequenceParallel in the plan) and async TP, "
        "torch._inductor.config._micro_pipeline_tp=True under torch.compile; or Transformer Engine's userbuffers.",
    ),
    _advice(
        "dependency",
        "activation",
        "Overlap it with the GEMM next to it by a decomposed or fused collective: Megatron-Core sequence_parallel=True and "
        "tp_comm_overlap=True with a tuned tp_comm_overlap_cfg (overlap-sweep tune), or torch's async TP "
        "(torch._inductor.config._micro_pipeline_tp=True). In code of your own: async_op=True where the next kernel does "
        "not need the result.",
    ),
    _advice(
        "dependency",
        "gradient",
        "Nothing was left to hide it behind: make the unit whose gradients come last smaller (DDP bucket_cap_mb, FSDP2 "
        "fully_shard on smaller modules), or, if your own code waits for it, pass async_op=True.",
    ),
    _advice(
        "dependency",
        "parameter",
        "Nothing ran that could hide it: make the unit that is gathered first smaller (FSDP2: fully_shard embeddings "
        "apart), or keep it gathered (reshard_after_forward=False).",
    ),
    _advice(
        "issued_late",
        "parameter fsdp2",
        "Prefetch further ahead: FSDPModule.set_modules_to_forward_prefetch and set_modules_to_backward_prefetch with the "
        "next one or two layers.",
    ),
    _advice(
        "issued_late",
        "parameter fsdp1",
        "FullyShardedDataParallel(forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE), and "
        "limit_all_gathers=False if memory allows.",
    ),
    _advice(
        "issued_late",
        "parameter deepspeed",
        "Raise stage3_prefetch_bucket_size and stage3_max_live_parameters, with overlap_comm=true.",
    ),
    _advice(
        "issued_late",
        "parameter",
        "Gather the next layer's parameters while this one computes: prefetch on a stream of its own with async_op=True; "
        "FSDP2 set_modules_to_forward_prefetch and set_modules_to_backward_prefetch; Megatron-Core overlap_param_gather; "
        "DeepSpeed stage3_prefetch_bucket_size.",
    ),
    _advice(
        "issued_late",
        "gradient fsdp2",
        "Reduce in smaller pieces: fully_shard each layer instead of groups of layers, so that less is left after the last "
        "kernel.",
    ),
    _advice(
        "issued_late",
        "gradient ddp",
        "Smaller buckets: DistributedDataParallel(bucket_cap_mb=25) or less, so that reducing starts while the backward "
        "pass still computes.",
    ),
    _advice(
        "issued_late",
        "gradient deepspeed",
        "overlap_comm=true with a smaller reduce_bucket_size.",
    ),
    _advice(
        "issued_late",
        "gradient",
        "Reduce each gradient when it is ready instead of after the backward pass: DistributedDataParallel, Megatron-Core "
        "overlap_grad_reduce with a smaller ddp_bucket_size, DeepSpeed overlap_comm; in code of your own "
        "register_post_accumulate_grad_hook with async_op=True.",
    ),
    _advice(
        "queue_order",
        "",
        "CUDA_DEVICE_MAX_CONNECTIONS=8 or 32 instead of 1; and streams of high priority for communication: "
        "TORCH_NCCL_HIGH_PRIORITY=1, or ProcessGroupNCCL.Options(is_high_priority_stream=True).",
    ),
    _advice(
        "bandwidth",
        "parameter fsdp2",
        "More tokens per GPU and step; reshard_after_forward=False gathers once instead of twice; a two-dimensional mesh "
        "(hybrid sharding) keeps gathering within a node; gradient accumulation with set_requires_gradient_sync(False).",
    ),
    _advice(
        "bandwidth",
        "gradient ddp",
        "More tokens per GPU and step, or gradient accumulation with no_sync(); gradients in bf16 "
        "(bf16_compress_hook) halve the bytes.",
    ),
    _advice(
        "bandwidth",
        "",
        "More tokens per GPU and step (a larger batch, gradient accumulation without reducing in between), fewer bytes "
        "(bf16 instead of fp32), or less sharding (hybrid sharding, ZeRO-2 instead of ZeRO-3).",
    ),
    _advice(
        "straggler",
        "",
        "Give that rank the work of the others: balance sequence lengths and layers per rank, keep logging, checkpoints and "
        "data loading off its critical path; if its GPU is slower with equal work, look at its clocks and its host.",
    ),
    _advice(
        "host_bound",
        "cpu",
        "The time is Python's, between operators: torch.compile, fewer and larger operators, optimizers with fused=True.",
    ),
    _advice(
        "host_bound",
        "",
        "Launch less: torch.compile(mode='reduce-overhead') or CUDA graphs (Megatron-Core enable_cuda_graph), optimizers "
        "with fused=True, larger microbatches; and keep the host's cores free (OMP_NUM_THREADS, CPU affinity).",
    ),
    _advice(
        "host_sync",
        "item",
        "Don't read values from the GPU in mid-step: keep losses and norms as tensors, read them every N steps, or copy "
        "them with non_blocking=True to pinned memory.",
    ),
    _advice(
        "host_sync",
        "end_of_step",
        "Nothing if it is only there to profile or to take times. In training take times from CUDA events "
        "(torch.cuda.Event(enable_timing=True)) and read them a step later.",
    ),
    _advice(
        "host_sync",
        "",
        "Take the synchronisation out of the step: no torch.cuda.synchronize() or timing by it, no .item(), .cpu() or "
        "nonzero(); copies from pinned memory with non_blocking=True. torch.cuda.set_sync_debug_mode('warn') shows where.",
    ),
    _advice(
        "contention",
        "transformer_engine",
        "Give communication fewer SMs: num_sm, set_sm_margin and use_ce in the tp_comm_overlap_cfg (overlap-sweep tune "
        "measures them), NVTE_EXT_MARGIN_SM.",
    ),
    _advice(
        "contention",
        "cpu",
        "gloo computes on the cores that GEMMs use: fewer threads for GEMMs (OMP_NUM_THREADS), or a core for communication.",
    ),
    _advice(
        "contention",
        "",
        "Give communication fewer SMs: NCCL_MAX_CTAS (or ProcessGroupNCCL.Options().config.max_ctas), copy engines "
        "(NCCL_CTA_POLICY=2 with symmetric memory) where the bandwidth allows.",
    ),
)
"""The first whose needs are met is given."""


def advice_for(cause: Cause, has: Collection[str]) -> str:
    """Returns the sentence for a cause; `has`: roles, collectives and libraries."""
    return next(advice.sentence for advice in ADVICE if advice.cause == cause and advice.needs <= set(has))
