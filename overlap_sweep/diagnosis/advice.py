"""Chooses the setting to try, by cause, by what the collective carries, and by the libraries that the trace shows.

Causes are decided without names; only the words here depend on them. `docs/diagnosis.md` lists all options by cause,
those that are named here among them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from overlap_sweep.diagnosis import Cause
from overlap_sweep.diagnosis.advice_between_nodes import BETWEEN_NODES


class Advice(NamedTuple):
    causes: frozenset[str]
    needs: frozenset[str]
    """What must hold: roles, collectives, libraries, and other signs of `basis.signs_of`."""
    sentence: str


def _advice(causes: str, needs: str, sentence: str) -> Advice:
    return Advice(frozenset(causes.split()), frozenset(needs.split()), sentence)


_TP_OVERLAP = (
    "sequence_parallel=True and tp_comm_overlap=True with a tp_comm_overlap_cfg that was tuned on this machine "
    "(overlap-sweep tune)."
)
_ACTIVATIONS = (
    _advice(
        *("dependency", "norm"),
        "It moves next to nothing: what it costs is the wait for the last rank. Clip gradients or sum losses less "
        "often, or without a norm over all ranks.",
    ),
    _advice(
        *("dependency", "userbuffers"),
        "It overlaps already, but not all of it: overlap-sweep tune finds the method and num_sm in "
        "tp_comm_overlap_cfg that leave the least exposed on this machine.",
    ),
    _advice(
        *("dependency", "all_to_all megatron"),
        "overlap_moe_expert_parallel_comm=True, which computes another microbatch meanwhile, or "
        "moe_shared_expert_overlap=True; a faster exchange: moe_flex_dispatcher_backend='deepep'.",
    ),
    _advice(
        *("dependency", "all_to_all"),
        "Compute what does not need these tokens meanwhile, such as shared experts or another microbatch: "
        "async_op=True, and wait() right before the experts.",
    ),
    _advice(
        *("dependency", "point_to_point megatron"),
        "More microbatches per step, or interleaved stages: virtual_pipeline_model_parallel_size with "
        "overlap_p2p_comm=True.",
    ),
    _advice(
        *("dependency", "point_to_point"),
        "More microbatches per step, or a schedule with a smaller bubble: ScheduleInterleaved1F1B, "
        "ScheduleZBVZeroBubble (torchtitan: pipeline_parallel_schedule).",
    ),
    _advice("dependency", "activation megatron", _TP_OVERLAP),
    _advice("dependency", "activation transformer_engine", _TP_OVERLAP),
    _advice(
        *("dependency", "activation deepspeed"),
        "tp_overlap_comm=true under tensor_parallel hides the backward pass's all-reduces behind weight gradients; "
        "AutoTP leaves those of the forward pass exposed.",
    ),
    _advice(
        *("dependency", "activation dtensor"),
        "Async TP: SequenceParallel in the plan, torch.compile and torch._inductor.config._micro_pipeline_tp=True "
        "(torchtitan: enable_async_tensor_parallel).",
    ),
    _advice(
        *("dependency", "activation"),
        "Overlap it with its GEMM in pieces: async TP (torch._inductor.config._micro_pipeline_tp=True) or "
        "Megatron-Core's tp_comm_overlap=True; async_op=True where the next kernel does not need it.",
    ),
)

_PREFETCH = (
    _advice(
        *("dependency bandwidth issued_late", "parameter after_step"),
        "Gather during the next forward pass, not after the optimizer: Megatron-Core overlap_param_gather=True with "
        "overlap_grad_reduce=True; or FSDP2's fully_shard instead of ZeRO-1.",
    ),
    _advice(
        *("dependency", "parameter bwd"),
        "Keep it gathered: the backward pass begins with what the forward pass ended with "
        "(reshard_after_forward=False for the last unit).",
    ),
    _advice(
        *("dependency", "parameter"),
        "Nothing runs before it that could hide it: make the unit that is gathered first smaller (FSDP2: fully_shard "
        "the embedding by itself).",
    ),
    _advice(
        *("issued_late", "parameter fsdp2"),
        "Prefetch further ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch with the next "
        "one or two layers.",
    ),
    _advice(
        *("issued_late", "parameter fsdp1"),
        "FullyShardedDataParallel(backward_prefetch=BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True); "
        "limit_all_gathers=False if memory allows.",
    ),
    _advice(
        *("issued_late", "parameter deepspeed"),
        "Larger stage3_prefetch_bucket_size and stage3_max_live_parameters, with overlap_comm=true.",
    ),
    _advice(
        *("issued_late", "parameter megatron"),
        "overlap_param_gather=True with overlap_grad_reduce=True; under Megatron-FSDP a larger "
        "suggested_communication_unit_size prefetches further.",
    ),
    _advice(
        *("issued_late", "parameter"),
        "Gather the next layer while this one computes: all_gather_into_tensor(..., async_op=True) one layer ahead, "
        "and wait() where it is used; FSDP2's fully_shard does so by itself.",
    ),
)

_REDUCTION = (
    _advice(
        *("issued_late", "before_gather fsdp2"),
        "Gather earlier: set_modules_to_backward_prefetch with the next one or two layers; "
        "set_separate_reduce_scatter_group() (PyTorch 2.13) lets gathers overtake reductions.",
    ),
    _advice(
        *("issued_late", "before_gather fsdp1"),
        "Gather earlier: FullyShardedDataParallel(backward_prefetch=BackwardPrefetch.BACKWARD_PRE).",
    ),
    _advice(
        *("issued_late", "before_gather"),
        "Gather the next layer's parameters while this one computes, so that its gather does not wait for this "
        "reduction and the pass for both.",
    ),
    _advice(
        *("dependency", "gradient fsdp2 cpu"),
        "More tokens per step: on a CPU FSDP2 waits for each reduce-scatter before the pass goes on, on GPUs it does "
        "not.",
    ),
    _advice(
        *("dependency issued_late", "blocks fsdp2"),
        "set_reduce_scatter_max_input_buffers(2) (PyTorch 2.13): else the pass waits for the last reduce-scatter "
        "before it fills the next one's buffer.",
    ),
    _advice(
        *("dependency issued_late", "blocks"),
        "Don't wait for it in the backward pass: async_op=True, on a stream of its own, and wait() before the "
        "optimizer.",
    ),
    _advice(
        *("dependency issued_late", "gradient fsdp2"),
        "Leave less for the end: fully_shard each layer, and the embedding by itself, instead of groups of layers.",
    ),
    _advice(
        *("dependency issued_late", "gradient fsdp1"),
        "Leave less for the end: smaller units (auto_wrap_policy).",
    ),
    _advice(
        *("dependency issued_late", "gradient ddp"),
        "DistributedDataParallel(bucket_cap_mb=25), PyTorch's default, or less: reducing starts with the first full "
        "bucket, and the last one is small.",
    ),
    _advice(
        *("dependency issued_late", "gradient deepspeed"),
        "overlap_comm=true, with a smaller reduce_bucket_size.",
    ),
    _advice(
        *("dependency issued_late", "gradient megatron"),
        "overlap_grad_reduce=True, with a smaller bucket_size (--ddp-bucket-size, in parameters).",
    ),
    _advice(
        *("dependency issued_late", "gradient"),
        "Reduce each gradient when it is there: DistributedDataParallel, or all_reduce(..., async_op=True) in "
        "register_post_accumulate_grad_hook, and wait() before the optimizer.",
    ),
    _advice(
        *("dependency issued_late", ""),
        "Launch it as soon as its input is there, with async_op=True, and wait() where the result is needed.",
    ),
)

_QUEUES = (
    _advice(
        *("queue_order", "megatron"),
        "CUDA_DEVICE_MAX_CONNECTIONS=32 instead of 1 where Megatron-LM allows it (up to Hopper it asserts 1 with "
        "tensor or context parallelism); high_priority_stream_groups for this group.",
    ),
    _advice(
        *("queue_order", "occupied transformer_engine"),
        "NVTE_EXT_MARGIN_SM=16 keeps Transformer Engine's GEMMs off as many SMs, so that NCCL can start next to them.",
    ),
    _advice(
        *("queue_order", "occupied"),
        "Leave SMs free for it: torch._C._set_sm_carveout_experimental(16) keeps cuBLASLt's GEMMs off as many; or "
        "launch it before the kernel that occupies all; or TORCH_NCCL_HIGH_PRIORITY=1.",
    ),
    _advice(
        *("queue_order", ""),
        "CUDA_DEVICE_MAX_CONNECTIONS=8 (CUDA's default) or 32 instead of 1: with one connection kernels of all "
        "streams start in the order of their launches.",
    ),
)

_BANDWIDTH = (
    _advice(
        *("bandwidth", "activation"),
        "More computation next to it, fewer bytes (bf16 instead of fp32, FP8), or a smaller process group (tensor or "
        "expert parallel size): activations cannot start earlier.",
    ),
    _advice(
        *("bandwidth", "parameter fsdp2"),
        "More tokens per GPU and step, or reshard_after_forward=False (one gather instead of two); over several nodes "
        "a two-dimensional mesh, which gathers within a node.",
    ),
    _advice(
        *("bandwidth", "gradient fsdp2"),
        "More tokens per GPU and step: a larger batch, or set_requires_gradient_sync(False) but for the last "
        "microbatch; MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) halves fp32.",
    ),
    _advice(
        *("bandwidth", "parameter deepspeed"),
        "More tokens per GPU and step, ZeRO stage 2 instead of 3, or zero_hpz_partition_size=GPUs per node, which "
        "gathers within a node.",
    ),
    _advice(
        *("bandwidth", "gradient ddp"),
        "More tokens per GPU and step: a larger batch, or no_sync() but for the last microbatch; bf16_compress_hook "
        "halves fp32 gradients.",
    ),
    _advice(
        *("bandwidth", "gradient deepspeed"),
        "More tokens per GPU and step: gradient_accumulation_steps; communication_data_type='bf16' halves fp32 "
        "gradients.",
    ),
    _advice(
        *("bandwidth", "gradient megatron"),
        "More microbatches per step (global_batch_size); grad_reduce_in_fp32=False halves the bytes.",
    ),
    _advice(
        *("bandwidth", ""),
        "More tokens per GPU and step (a larger batch, accumulation without reducing in between), fewer bytes (bf16 "
        "instead of fp32), or less sharding (ZeRO-2 instead of ZeRO-3).",
    ),
)

_LATENCY = (
    _advice(
        *("latency", "gradient ddp"),
        "Fewer and larger buckets: a larger bucket_cap_mb of DistributedDataParallel.",
    ),
    _advice(
        *("latency", "fsdp2"),
        "Fewer and larger units: fully_shard groups of layers, each with one gather and one reduction, instead of each "
        "small module.",
    ),
    _advice(*("latency", "fsdp1"), "Fewer and larger units: an auto_wrap_policy with a larger min_num_params."),
    _advice(
        *("latency", "gradient deepspeed"),
        "Fewer and larger messages: a larger reduce_bucket_size.",
    ),
    _advice(
        *("latency", "parameter deepspeed"),
        "Fewer and larger messages: a larger allgather_bucket_size, under ZeRO-3 stage3_prefetch_bucket_size.",
    ),
    _advice(
        *("latency", "gradient megatron"),
        "Fewer and larger buckets: a larger bucket_size (--ddp-bucket-size, in parameters).",
    ),
    _advice(
        *("latency", "norm"),
        "One call for all of these numbers: torch.stack them, and reduce the tensor once.",
    ),
    _advice(
        *("latency", "all_gather"),
        "Gather them at once: one flat buffer (torch.cat), and all_gather_into_tensor of it.",
    ),
    _advice(
        *("latency", ""),
        "One call for many: concatenate them in a flat buffer (torch.cat) and copy the result back; "
        "DistributedDataParallel does so with gradients.",
    ),
)

_STRAGGLERS = (
    _advice(
        *("straggler", "unknown_rank"),
        "Give the traces of all ranks: only they tell which one is late, and why.",
    ),
    _advice(
        *("straggler", "loads_longer"),
        "See why that rank's data take longer (longer samples, its disk or share of the cores), and load ahead: "
        "DataLoader(num_workers=4, persistent_workers=True), or a larger prefetch_factor.",
    ),
    _advice(
        *("straggler", "host_late"),
        "See what that rank's host does meanwhile: data loading, logging, checkpoints, garbage collection "
        "(gc.freeze(), Megatron-Core manual_gc=True), or a .item() on one rank alone.",
    ),
    _advice(
        *("straggler", "more_work all_to_all"),
        "Balance the tokens over the experts: Megatron-Core moe_router_load_balancing_type, "
        "moe_expert_capacity_factor.",
    ),
    _advice(
        *("straggler", "more_work"),
        "Balance the work: sequence lengths (packing), layers per pipeline stage, and what one rank alone computes, "
        "such as logging or a loss.",
    ),
    _advice(
        *("straggler", "cpu"),
        "Its work is that of the others: see what else runs on its cores, and whether they are its own (taskset, "
        "OMP_NUM_THREADS).",
    ),
    _advice(
        *("straggler", ""),
        "Its work is that of the others: compare its clocks, power and temperature with theirs (nvidia-smi -q -d "
        "CLOCK,POWER,TEMPERATURE), and what else runs on its host.",
    ),
)

_HOST = (
    _advice(
        *("host_bound", "loading"),
        "Load ahead: DataLoader(num_workers=4, persistent_workers=True), with workers already more of them or a larger "
        "prefetch_factor; or make less of each batch while training, such as by tokenizing before.",
    ),
    _advice(
        *("host_bound", "cpu"),
        "It is Python's time between operators: torch.compile, or fewer and larger operators, such as optimizers with "
        "fused=True.",
    ),
    _advice(
        *("host_bound", "megatron"),
        "cuda_graph_impl='transformer_engine' or 'local', larger microbatches; manual_gc=True if there are pauses of "
        "milliseconds.",
    ),
    _advice(
        *("host_bound", "fsdp2"),
        "torch.compile each layer before fully_shard, a larger microbatch, optimizers with fused=True: FSDP2 itself "
        "takes some milliseconds of the host per layer and step.",
    ),
    _advice(
        *("host_bound", ""),
        "Launch less: CUDA graphs (torch.compile(mode='reduce-overhead')), optimizers with fused=True, larger "
        "microbatches; gc.freeze() or a fixed interval if Python's garbage collection pauses it.",
    ),
    _advice(
        *("host_sync", "end_of_step"),
        "Nothing, if it is only there for profiling. Else take times with torch.cuda.Event(enable_timing=True), and "
        "read them and the loss a step later.",
    ),
    _advice(
        *("host_sync", "item"),
        "Don't read values from the GPU in mid-step: keep losses and norms as tensors and read them every N steps, or "
        "copy them with non_blocking=True into pinned memory.",
    ),
    _advice(
        *("host_sync", "copy"),
        "Copy with non_blocking=True, from and into pinned memory (DataLoader(pin_memory=True)); a copy from pageable "
        "memory makes the host wait.",
    ),
    _advice(
        *("host_sync", "device_sync megatron"),
        "Megatron-Core synchronises after each batched send and receive: overlap_p2p_comm=True, or "
        "batch_p2p_sync=False; its timers do, too: timing_log_level=0.",
    ),
    _advice(
        *("host_sync", ""),
        "Take what makes the host wait out of the step: torch.cuda.synchronize(), .item(), nonzero(), histc() and "
        "such; torch.cuda.set_sync_debug_mode('warn') shows most of the places.",
    ),
)

_CONTENTION = (
    _advice(
        *("contention", "cpu"),
        "gloo computes on the cores that GEMMs use: fewer threads for GEMMs (OMP_NUM_THREADS), or a core for "
        "communication.",
    ),
    _advice(
        *("contention", "userbuffers"),
        "num_sm, set_sm_margin and use_ce of this operator in the tp_comm_overlap_cfg: overlap-sweep tune measures "
        "them.",
    ),
    _advice(
        *("contention", "deep_ep megatron"),
        "A smaller moe_flex_dispatcher_num_sms gives DeepEP fewer SMs.",
    ),
    _advice(
        *("contention", "all_gather fsdp2"),
        "Fewer SMs for NCCL, while it stays hidden: NCCL_MAX_CTAS=16 or 8; or none, within a node: "
        "set_symm_mem_for_comm() with NCCL_CTA_POLICY=2 gathers by copy engines (NCCL 2.28).",
    ),
    _advice(
        *("contention", "transformer_engine"),
        "Fewer SMs for NCCL, while it stays hidden: NCCL_MAX_CTAS=16 or 8; NVTE_EXT_MARGIN_SM=<as many> keeps "
        "Transformer Engine's GEMMs off them.",
    ),
    _advice(
        *("contention", ""),
        "Fewer SMs for communication, while it stays hidden: NCCL_MAX_CTAS=16 or 8 (for one group: "
        "ProcessGroupNCCL.Options().config.max_ctas). It takes longer then, so compare step times.",
    ),
)

ADVICE: Sequence[Advice] = (
    _advice("none", "", "Nothing: overlap has less than 2% of the step to gain."),
    *(_advice(*one) for one in BETWEEN_NODES),
    *(_ACTIVATIONS + _PREFETCH + _REDUCTION + _QUEUES + _BANDWIDTH + _LATENCY + _STRAGGLERS + _HOST + _CONTENTION),
)
"""The first whose needs are met is given."""


def advice_for(cause: Cause, signs: Collection[str]) -> str:
    """Returns the sentence for a cause; `signs`: roles, collectives, libraries and others of `basis.signs_of`."""
    has = set(signs)
    return next(advice.sentence for advice in ADVICE if cause in advice.causes and advice.needs <= has)
