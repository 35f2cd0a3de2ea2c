"""Settings to try where most of the time is lost in communication between nodes.

The network between nodes has a fraction of the bandwidth of the links within one, and more latency. So what helps is
less communication between nodes, and larger messages; how many SMs take part matters little.
"""

from __future__ import annotations

PARAMETERS = "parameters_between_nodes"
ACTIVATIONS = "activations_between_nodes"
NODES = "between_nodes"
"""Signs of `basis.signs_of`. PARAMETERS: gathered within the passes; ACTIVATIONS: not messages between stages of a
pipeline, nor the norm of gradients; NODES: anything between nodes, these included."""

BETWEEN_NODES = (
    (
        *("dependency bandwidth", f"{PARAMETERS} fsdp2"),
        "Gather within a node: fully_shard with a two-dimensional mesh, nodes x GPUs of a node (workload=fsdp: "
        "fsdp.replicas=nodes), if the model's shards fit a node's memory.",
    ),
    (
        *("dependency bandwidth", f"{PARAMETERS} fsdp1"),
        "Gather within a node: ShardingStrategy.HYBRID_SHARD, if the model's shards fit a node's memory.",
    ),
    (
        *("dependency bandwidth", f"{PARAMETERS} deepspeed"),
        "Gather within a node: zero_hpz_partition_size=<GPUs of a node>, or ZeRO stage 2 instead of 3.",
    ),
    (
        *("dependency bandwidth", f"{PARAMETERS} megatron"),
        "Gather within a node: num_distributed_optimizer_instances=<nodes>, if its shards fit a node's memory.",
    ),
    (
        *("dependency bandwidth", PARAMETERS),
        "Gather within a node: shard over its GPUs and replicate over nodes (HSDP: fully_shard with a two-dimensional "
        "mesh), if the shards fit a node's memory.",
    ),
    (
        *("dependency bandwidth", f"{ACTIVATIONS} all_to_all megatron"),
        "Keep experts within a node: expert_model_parallel_size up to its GPUs; else "
        "moe_flex_dispatcher_backend='deepep', which sends a token to each node once.",
    ),
    (
        *("dependency bandwidth", f"{ACTIVATIONS} torchrec"),
        "Keep most of it within a node: torchrec's ShardingType.TABLE_ROW_WISE, which sums a table's rows within one.",
    ),
    (
        *("dependency bandwidth", f"{ACTIVATIONS} all_to_all"),
        "Keep experts within a node: an expert-parallel group of at most its GPUs; else DeepEP, which sends a token to "
        "each node once.",
    ),
    (
        *("dependency bandwidth", f"{ACTIVATIONS} megatron"),
        "Keep it within a node: tensor_model_parallel_size of at most its GPUs; between nodes use pipeline or data "
        "parallelism, which communicates less.",
    ),
    (
        *("dependency bandwidth", ACTIVATIONS),
        "Keep it within a node: a tensor-parallel group of at most its GPUs; between nodes use pipeline or data "
        "parallelism, which communicates less.",
    ),
    (
        *("bandwidth", f"{NODES} gradient fsdp2"),
        "Reduce within a node first: a two-dimensional mesh (fsdp.replicas=nodes), and between nodes only with the "
        "last microbatch: set_requires_all_reduce(False) before.",
    ),
    (
        *("bandwidth", f"{NODES} gradient ddp larger"),
        "Fewer and larger messages: DistributedDataParallel(bucket_cap_mb={larger}), no_sync() but for the last "
        "microbatch; bf16_compress_hook halves fp32 gradients.",
    ),
    (
        *("bandwidth", f"{NODES} gradient deepspeed"),
        "Fewer and larger messages: a larger reduce_bucket_size, gradient_accumulation_steps; "
        "communication_data_type='bf16' halves fp32 gradients.",
    ),
    (
        *("bandwidth", f"{NODES} gradient megatron"),
        "Fewer and larger messages: a larger bucket_size (--ddp-bucket-size), more microbatches per step; "
        "grad_reduce_in_fp32=False halves the bytes.",
    ),
    (
        *("bandwidth", f"{NODES} nccl"),
        "Compare its bus bandwidth (--by group) with nccl-tests between these nodes. If that is faster, see with "
        "NCCL_DEBUG=INFO which network it uses: NCCL_IB_HCA, NCCL_SOCKET_IFNAME.",
    ),
    (
        *("contention", f"{NODES} nccl fewer"),
        "Fewer SMs for NCCL: few are enough for the network between nodes. NCCL_MAX_CTAS={fewer}, while it stays "
        "hidden.",
    ),
)
"""Causes, signs and sentence, as `advice.Advice` has them."""
