"""Settings to try where communication itself is late, slow, or has nothing next to it."""

from __future__ import annotations

from typing import NamedTuple


class Advice(NamedTuple):
    causes: frozenset[str]
    needs: frozenset[str]
    """Signs that must hold (roles, collectives, libraries, others of `basis.signs_of`); `!sign` must not hold."""
    sentence: str
    """`{sign}` stands for the sign's value."""


def advice_on(causes: str, needs: str, sentence: str) -> Advice:
    """Returns the advice for causes with such needs, names with blanks between."""
    return Advice(frozenset(causes.split()), frozenset(needs.split()), sentence)


_TP_OVERLAP = (
    "sequence_parallel=True and tp_comm_overlap=True with a tp_comm_overlap_cfg that was tuned on this machine "
    "(overlap-sweep tune)."
)
_ACTIVATIONS = (
    advice_on(
        *("dependency", "userbuffers"),
        "It overlaps already, but not all of it: overlap-sweep tune finds the method and num_sm in "
        "tp_comm_overlap_cfg that leave the least exposed on this machine.",
    ),
    advice_on(
        *("dependency bandwidth", "activation torchrec bwd !low_precision"),
        "Fewer bytes of the embeddings' gradients: torchrec's QCommsConfig(backward_precision=CommType.BF16).",
    ),
    advice_on(
        *("dependency", "activation torchrec sparse_pipeline low_precision"),
        "torchrec's TrainPipelineSemiSync exchanges embeddings during the batch before, which trains on parameters of "
        "one update earlier.",
    ),
    advice_on(
        *("dependency", "activation torchrec sparse_pipeline"),
        "Fewer bytes: torchrec's QCommsConfig(forward_precision=CommType.FP16). TrainPipelineSemiSync hides the "
        "exchange, but trains on parameters of one update earlier.",
    ),
    advice_on(
        *("dependency", "activation torchrec"),
        "Exchange the next batch's input during this one: torchrec's TrainPipelineSparseDist; fewer bytes of "
        "embeddings: QCommsConfig(forward_precision=CommType.FP16).",
    ),
    advice_on(
        *("dependency", "all_to_all megatron"),
        "overlap_moe_expert_parallel_comm=True, which computes another microbatch meanwhile, or "
        "moe_shared_expert_overlap=True; a faster exchange: moe_flex_dispatcher_backend='deepep'.",
    ),
    advice_on(
        *("dependency", "all_to_all"),
        "Compute what does not need these tokens meanwhile, such as shared experts or another microbatch: "
        "async_op=True, and wait() right before the experts.",
    ),
    advice_on("dependency", "activation megatron", _TP_OVERLAP),
    advice_on("dependency", "activation transformer_engine", _TP_OVERLAP),
    advice_on(
        *("dependency", "activation deepspeed"),
        "tp_overlap_comm=true under tensor_parallel hides the backward pass's all-reduces behind weight gradients; "
        "AutoTP leaves those of the forward pass exposed.",
    ),
    advice_on(
        *("dependency", "activation dtensor"),
        "Async TP: SequenceParallel in the plan, torch.compile and torch._inductor.config._micro_pipeline_tp=True "
        "(torchtitan: enable_async_tensor_parallel).",
    ),
    advice_on(
        *("dependency", "activation"),
        "Overlap it with its GEMM in pieces: async TP (torch._inductor.config._micro_pipeline_tp=True) or "
        "Megatron-Core's tp_comm_overlap=True; async_op=True where the next kernel does not need it.",
    ),
)

_PREFETCH = (
    advice_on(
        *("dependency bandwidth issued_late", "parameter after_step"),
        "Gather during the next forward pass, not after the optimizer: Megatron-Core overlap_param_gather=True with "
        "overlap_grad_reduce=True; or FSDP2's fully_shard instead of ZeRO-1.",
    ),
    advice_on(
        *("dependency issued_late", "parameter one_unit fsdp2"),
        "All parameters are one unit: there is nothing to gather ahead. fully_shard each layer, or some together, "
        "before the model. Between microbatches set_reshard_after_backward(False) keeps them gathered.",
    ),
    advice_on(
        *("dependency issued_late", "parameter one_unit fsdp1"),
        "All parameters are one unit, so there is nothing to gather ahead: an auto_wrap_policy that makes each layer a "
        "unit.",
    ),
    advice_on(
        *("dependency issued_late", "parameter one_unit !megatron !deepspeed"),
        "All parameters are gathered at once, so there is nothing to gather ahead: gather them by layer, the next "
        "layer's while one computes.",
    ),
    advice_on(
        *("dependency", "parameter bwd"),
        "Keep it gathered: the backward pass begins with what the forward pass ended with "
        "(reshard_after_forward=False for the last unit).",
    ),
    advice_on(
        *("dependency", "parameter"),
        "Nothing runs before it that could hide it: make the unit that is gathered first smaller (FSDP2: fully_shard "
        "the embedding by itself).",
    ),
    advice_on(
        *("issued_late", "parameter fsdp2"),
        "Prefetch further ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch with the next "
        "one or two layers.",
    ),
    advice_on(
        *("issued_late", "parameter fsdp1"),
        "Prefetch where it is off: FullyShardedDataParallel(forward_prefetch=True), and "
        "backward_prefetch=BackwardPrefetch.BACKWARD_PRE; limit_all_gathers=False if memory allows.",
    ),
    advice_on(
        *("issued_late", "parameter deepspeed"),
        "Larger stage3_prefetch_bucket_size and stage3_max_live_parameters; overlap_comm=true if it is false.",
    ),
    advice_on(
        *("issued_late", "parameter megatron"),
        "It is gathered in the pass already: a smaller bucket_size (--ddp-bucket-size) gathers the first layers "
        "sooner; under Megatron-FSDP a larger suggested_communication_unit_size prefetches further.",
    ),
    advice_on(
        *("issued_late", "parameter"),
        "Gather the next layer while this one computes: all_gather_into_tensor(..., async_op=True) one layer ahead, "
        "and wait() where it is used; FSDP2's fully_shard does so by itself.",
    ),
)

_REDUCTION = (
    advice_on(
        *("issued_late", "before_gather fsdp2"),
        "Gather earlier: set_modules_to_backward_prefetch with the next one or two layers; "
        "set_separate_reduce_scatter_group() (PyTorch 2.13) lets gathers overtake reductions.",
    ),
    advice_on(
        *("issued_late", "before_gather fsdp1"),
        "Gather earlier: FullyShardedDataParallel(backward_prefetch=BackwardPrefetch.BACKWARD_PRE), if it is another.",
    ),
    advice_on(
        *("issued_late", "before_gather"),
        "Gather the next layer's parameters while this one computes, so that its gather does not wait for this "
        "reduction and the pass for both.",
    ),
    advice_on(
        *("dependency issued_late", "blocks fsdp2"),
        "set_reduce_scatter_max_input_buffers(2) (PyTorch 2.13): else the pass waits for the last reduce-scatter "
        "before it fills the next one's buffer.",
    ),
    advice_on(
        *("dependency issued_late", "blocks"),
        "Don't wait for it in the backward pass: async_op=True, on a stream of its own, and wait() before the "
        "optimizer.",
    ),
    advice_on(
        *("dependency issued_late", "gradient fsdp2"),
        "Leave less for the end: fully_shard each layer, and the embedding by itself, instead of groups of layers.",
    ),
    advice_on(
        *("dependency issued_late", "gradient fsdp1"),
        "Leave less for the end: smaller units (auto_wrap_policy).",
    ),
    advice_on(
        *("dependency issued_late", "gradient ddp smaller"),
        "Smaller buckets: DistributedDataParallel(bucket_cap_mb={smaller}). Reducing starts with the first full "
        "bucket, and the last one is small.",
    ),
    advice_on(
        *("dependency issued_late", "gradient ddp"),
        "A smaller bucket_cap_mb of DistributedDataParallel: reducing starts with the first full bucket, and the last "
        "one is small.",
    ),
    advice_on(
        *("dependency issued_late", "gradient deepspeed"),
        "A smaller reduce_bucket_size; overlap_comm=true if it is false.",
    ),
    advice_on(
        *("dependency issued_late", "gradient megatron bwd"),
        "It overlaps with the backward pass, but starts late: a smaller bucket_size (--ddp-bucket-size, in "
        "parameters).",
    ),
    advice_on(
        *("dependency issued_late", "gradient megatron"),
        "overlap_grad_reduce=True: it is reduced only after the backward pass.",
    ),
    advice_on(
        *("dependency issued_late", "gradient"),
        "Reduce each gradient as soon as it is ready: DistributedDataParallel, or all_reduce(..., async_op=True) in "
        "register_post_accumulate_grad_hook, and wait() before the optimizer.",
    ),
    advice_on(
        *("dependency issued_late", ""),
        "Launch it as soon as its input is ready, with async_op=True, and wait() where the result is needed.",
    ),
)

_QUEUES = (
    advice_on(
        *("queue_order", "megatron !occupied"),
        "CUDA_DEVICE_MAX_CONNECTIONS=32 instead of 1 where Megatron-LM allows it (up to Hopper it asserts 1 with "
        "tensor or context parallelism); high_priority_stream_groups for this group.",
    ),
    advice_on(
        *("queue_order", "occupied transformer_engine"),
        "A larger NVTE_EXT_MARGIN_SM (16 if it is unset) keeps Transformer Engine's GEMMs off as many SMs, so that "
        "NCCL can start next to them.",
    ),
    advice_on(
        *("queue_order", "occupied"),
        "Leave SMs free for it: torch._C._set_sm_carveout_experimental(16) keeps cuBLASLt's GEMMs off as many; or "
        "launch it before the kernel that occupies all; or TORCH_NCCL_HIGH_PRIORITY=1.",
    ),
    advice_on(
        *("queue_order", ""),
        "CUDA_DEVICE_MAX_CONNECTIONS=8 (CUDA's default) or 32 instead of 1: with one connection kernels of all "
        "streams start in the order of their launches.",
    ),
)

_BANDWIDTH = (
    advice_on(
        *("bandwidth", "activation torchrec !low_precision"),
        "Fewer bytes of embeddings: torchrec's QCommsConfig(forward_precision=CommType.FP16).",
    ),
    advice_on(
        *("bandwidth", "activation"),
        "More computation next to it, fewer bytes (a smaller type), or a smaller process group (tensor or expert "
        "parallel size): activations cannot start earlier.",
    ),
    advice_on(
        *("bandwidth", "parameter fsdp2 gathered_twice"),
        "More tokens per GPU and step, or reshard_after_forward=False (one gather instead of two); over several nodes "
        "a two-dimensional mesh, which gathers within a node.",
    ),
    advice_on(
        *("bandwidth", "parameter fsdp2"),
        "More tokens per GPU and step; over several nodes a two-dimensional mesh, which gathers within a node.",
    ),
    advice_on(
        *("bandwidth", "gradient fsdp2 low_precision"),
        "More tokens per GPU and step: a larger batch, or set_requires_gradient_sync(False) but for the last "
        "microbatch.",
    ),
    advice_on(
        *("bandwidth", "gradient fsdp2"),
        "More tokens per GPU and step: a larger batch, or set_requires_gradient_sync(False) but for the last "
        "microbatch; MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) halves fp32.",
    ),
    advice_on(
        *("bandwidth", "parameter deepspeed"),
        "More tokens per GPU and step, ZeRO stage 2 instead of 3, or zero_hpz_partition_size=GPUs per node, which "
        "gathers within a node.",
    ),
    advice_on(
        *("bandwidth", "gradient ddp low_precision"),
        "More tokens per GPU and step: a larger batch, or no_sync() but for the last microbatch.",
    ),
    advice_on(
        *("bandwidth", "gradient ddp"),
        "More tokens per GPU and step: a larger batch, or no_sync() but for the last microbatch; bf16_compress_hook "
        "halves fp32 gradients.",
    ),
    advice_on(
        *("bandwidth", "gradient deepspeed low_precision"),
        "More tokens per GPU and step: gradient_accumulation_steps.",
    ),
    advice_on(
        *("bandwidth", "gradient deepspeed"),
        "More tokens per GPU and step: gradient_accumulation_steps; communication_data_type='bf16' halves fp32 "
        "gradients.",
    ),
    advice_on(
        *("bandwidth", "gradient megatron low_precision"),
        "More microbatches per step (global_batch_size).",
    ),
    advice_on(
        *("bandwidth", "gradient megatron"),
        "More microbatches per step (global_batch_size); grad_reduce_in_fp32=False halves the bytes.",
    ),
    advice_on(
        *("bandwidth", "low_precision"),
        "More tokens per GPU and step (a larger batch, accumulation without reducing in between), or less sharding "
        "(ZeRO-2 instead of ZeRO-3).",
    ),
    advice_on(
        *("bandwidth", ""),
        "More tokens per GPU and step (a larger batch, accumulation without reducing in between), fewer bytes (bf16 "
        "instead of fp32), or less sharding (ZeRO-2 instead of ZeRO-3).",
    ),
)

_LATENCY = (
    advice_on(
        *("latency", "gradient ddp larger"),
        "Fewer and larger buckets: DistributedDataParallel(bucket_cap_mb={larger}).",
    ),
    advice_on(
        *("latency", "gradient ddp"),
        "Fewer and larger buckets: a larger bucket_cap_mb of DistributedDataParallel.",
    ),
    advice_on(
        *("latency", "fsdp2"),
        "Fewer and larger units: fully_shard groups of layers, each with one gather and one reduction, instead of each "
        "small module.",
    ),
    advice_on(*("latency", "fsdp1"), "Fewer and larger units: an auto_wrap_policy with a larger min_num_params."),
    advice_on(
        *("latency", "gradient deepspeed"),
        "Fewer and larger messages: a larger reduce_bucket_size.",
    ),
    advice_on(
        *("latency", "parameter deepspeed"),
        "Fewer and larger messages: a larger allgather_bucket_size, under ZeRO-3 stage3_prefetch_bucket_size.",
    ),
    advice_on(
        *("latency", "gradient megatron"),
        "Fewer and larger buckets: a larger bucket_size (--ddp-bucket-size, in parameters).",
    ),
    advice_on(
        *("latency", "norm"),
        "One call for all of these numbers: torch.stack them, and reduce the tensor once.",
    ),
    advice_on(
        *("latency", "all_gather"),
        "Gather them at once: one flat buffer (torch.cat), and all_gather_into_tensor of it.",
    ),
    advice_on(
        *("latency", ""),
        "One call for many: concatenate them in a flat buffer (torch.cat), and copy the result back.",
    ),
)

_REPEATED = (
    advice_on(
        *("repeated_reduction", "fsdp2"),
        "Reduce once: set_requires_gradient_sync(False) but for the last microbatch. It takes memory: until then each "
        "rank keeps the gradients of the whole model.",
    ),
    advice_on(
        *("repeated_reduction", "fsdp1"),
        "Reduce once: no_sync() but for the last microbatch. It takes memory: until then each rank keeps the gradients "
        "of the whole model.",
    ),
    advice_on(
        *("repeated_reduction", "deepspeed"),
        "ZeRO stage 1 reduces once; stages 2 and 3 with each microbatch, to keep only a part of the gradients. Stage 1 "
        "if memory allows, else fewer and larger microbatches (train_micro_batch_size_per_gpu).",
    ),
    advice_on(
        *("repeated_reduction", "megatron"),
        "Reduce once: no_sync_func=model.no_sync in the config of the schedule, as Megatron-LM's training sets it with "
        "overlap_grad_reduce=True.",
    ),
    advice_on(
        *("repeated_reduction", "ddp"),
        "Reduce once: forward and backward under DistributedDataParallel's no_sync() but for the last microbatch "
        "(accelerate: with accelerator.accumulate(model)).",
    ),
    advice_on(
        *("repeated_reduction", ""),
        "Reduce once: accumulate the gradients, and reduce them only after the last microbatch's backward pass.",
    ),
)

_NO_OVERLAP = (
    advice_on(
        *("dependency", "norm"),
        "It moves next to nothing: what it costs is the wait for the last rank. Clip gradients or sum losses less "
        "often, or without a norm over all ranks.",
    ),
    advice_on(
        *("dependency", "point_to_point megatron"),
        "More microbatches per step, or interleaved stages: virtual_pipeline_model_parallel_size with "
        "overlap_p2p_comm=True.",
    ),
    advice_on(
        *("dependency", "point_to_point"),
        "More microbatches per step, or a schedule with a smaller bubble: ScheduleInterleaved1F1B, "
        "ScheduleZBVZeroBubble (torchtitan: pipeline_parallel_schedule).",
    ),
    advice_on(
        *("dependency", "gradient fsdp2 cpu"),
        "More tokens per step: on a CPU FSDP2 waits for each reduce-scatter before the pass goes on, on GPUs it does "
        "not.",
    ),
    advice_on(
        *("dependency issued_late", "cpu busy_cores"),
        "Overlap gains little on these cores: next to communication GEMMs lose {busy_cores} of what is hidden. Leave "
        "cores to gloo (fewer OMP_NUM_THREADS), or communicate less (more tokens a step).",
    ),
)

OVERLAP = _ACTIVATIONS + _PREFETCH + _REDUCTION
"""What gains time by more computation next to communication."""

COMMUNICATION = _NO_OVERLAP + _REPEATED + OVERLAP + _QUEUES + _BANDWIDTH + _LATENCY
