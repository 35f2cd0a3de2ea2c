"""What record_effects.py records: by name the program, its options, and the environment. Those of one environment run
in one process group."""

from typing import Any

BULK = {"method": "bulk", "num_sm": 16, "set_sm_margin": False}
RECORDINGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    **{f"ddp_{i}": ("ddp", {}, {}) for i in (1, 2, 3)},
    "ddp_bucket_25_said": ("ddp", {"bucket_cap_mb": 25}, {}),
    "ddp_bucket_4": ("ddp", {"bucket_cap_mb": 4}, {}),
    "ddp_bucket_200": ("ddp", {"bucket_cap_mb": 200}, {}),
    "ddp_static_graph": ("ddp", {"static_graph": True}, {}),
    "ddp_bucket_view": ("ddp", {"gradient_as_bucket_view": True}, {}),
    "ddp_find_unused": ("ddp", {"find_unused_parameters": True}, {}),
    "ddp_compressed": ("ddp", {"compressed": True}, {}),
    "ddp_each_micro_batch": ("ddp", {"no_sync": False}, {}),
    "ddp_no_sync": ("ddp", {"no_sync": True}, {}),
    "ddp_foreach": ("ddp", {"optimizer": {"foreach": True}}, {}),
    "ddp_fused": ("ddp", {"optimizer": {"fused": True}}, {}),
    "ddp_group": ("ddp", {"group": {}}, {}),
    "ddp_group_4_ctas": ("ddp", {"group": {"max_ctas": 4}}, {}),
    "ddp_group_32_ctas": ("ddp", {"group": {"max_ctas": 32}}, {}),
    "ddp_group_cga_2": ("ddp", {"group": {"cga_cluster_size": 2}}, {}),
    "ddp_high_priority": ("ddp", {"high_priority": True}, {}),
    "ddp_compiled": ("ddp", {"compiled": True}, {}),
    **{f"fsdp2_{i}": ("fsdp2", {}, {}) for i in (1, 2, 3)},
    "fsdp2_no_reshard": ("fsdp2", {"reshard": False}, {}),
    "fsdp2_forward_prefetch_1": ("fsdp2", {"forward_prefetch": 1}, {}),
    "fsdp2_forward_prefetch_2": ("fsdp2", {"forward_prefetch": 2}, {}),
    "fsdp2_backward_prefetch_1": ("fsdp2", {"backward_prefetch": 1}, {}),
    "fsdp2_backward_prefetch_2": ("fsdp2", {"backward_prefetch": 2}, {}),
    "fsdp2_reduce_fp32": ("fsdp2", {"reduce_dtype": "float32"}, {}),
    "fsdp2_accumulated": ("fsdp2", {"accumulate": True}, {}),
    "fsdp2_each_micro_batch": ("fsdp2", {"accumulate": False}, {}),
    "fsdp2_root_only": ("fsdp2", {"root_only": True}, {}),
    "fsdp2_own_reduce_scatter": ("fsdp2", {"own_reduce_scatter": True}, {}),
    "fsdp2_unshard_async": ("fsdp2", {"unshard_async": True}, {}),
}
for program in ("ddp", "fsdp2"):
    for label, environment in {
        "max_ctas_4": {"NCCL_MAX_CTAS": "4"},
        "max_ctas_1": {"NCCL_MAX_CTAS": "1"},
        "max_ctas_64": {"NCCL_MAX_CTAS": "64"},
        "min_ctas_32": {"NCCL_MIN_CTAS": "32"},
        "algo_ring": {"NCCL_ALGO": "Ring"},
        "algo_tree": {"NCCL_ALGO": "allreduce:Tree"},
        "proto_simple": {"NCCL_PROTO": "Simple"},
        "proto_ll": {"NCCL_PROTO": "LL"},
        "connections_1": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        "connections_8": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        "cta_policy_zero": {"NCCL_CTA_POLICY": "2"},
        "buffer_8m": {"NCCL_BUFFSIZE": "8388608"},
        "misspelt": {"NCCL_MAXCTAS": "4"},
    }.items():
        RECORDINGS[f"{program}_{label}"] = (program, {}, environment)
PRESET = "bf16_h100_h8192_tp4_mbs1_seqlen8192.yaml"
for environment, by_name in (
    (
        {},
        {
            "ddp_unmarked": ("ddp", {"unmarked": True}),
            "ddp_unmarked_again": ("ddp", {"unmarked": True}),
            "ddp_unmarked_bucket_4": ("ddp", {"unmarked": True, "bucket_cap_mb": 4}),
            "graph_1": ("captured", {}),
            "graph_2": ("captured", {}),
            "graph_4_chunks": ("captured", {"chunks": 4}),
            "graph_unmarked": ("captured", {"unmarked": True}),
            "graph_unmarked_4_chunks": ("captured", {"unmarked": True, "chunks": 4}),
        },
    ),
    # What recipes of Megatron-LM, NeMo and Megatron-Bridge set for every job.
    ({"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}, {f"{one}_avoid_record_streams": (one, {}) for one in ("ddp", "fsdp2")}),
    ({"NCCL_P2P_NET_CHUNKSIZE": "2097152"}, {f"{one}_net_chunk": (one, {}) for one in ("ddp", "fsdp2")}),
    (
        {"RECORDING": "symmetric"},
        {
            # Memory that NCCL allocates, and does not register as symmetric.
            "fsdp2_group_buffers": ("fsdp2", {"allocate_from_group": True}),
            "fsdp2_symmetric": ("fsdp2", {"symm_mem": True}),
        },
    ),
    ({"RECORDING": "symmetric", "NCCL_CTA_POLICY": "2"}, {"fsdp2_copy_engines": ("fsdp2", {"symm_mem": True})}),
    (
        {"RECORDING": "megatron"},
        {
            "mc_1": ("megatron", {}),
            "mc_2": ("megatron", {}),
            "mc_overlap_grad_reduce": ("megatron", {"overlap_grad_reduce": True}),
            "mc_overlap_both": ("megatron", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
            "mc_bucket_8m": ("megatron", {"overlap_grad_reduce": True, "bucket_size": 8_000_000}),
            # What Megatron-LM chooses for two ranks if nothing is said.
            "mc_bucket_40m": ("megatron", {"overlap_grad_reduce": True, "bucket_size": 40_000_000}),
            "mc_bucket_40m_no_overlap": ("megatron", {"bucket_size": 40_000_000}),
            "mc_grad_fp32": ("megatron", {"grad_reduce_in_fp32": True}),
            "mc_average": ("megatron", {"average_in_collective": True}),
            "mc_plain": ("megatron", {"distributed": False}),
            "mc_plain_overlap": ("megatron", {"distributed": False, "overlap_grad_reduce": True}),
            "mc_micro_batches": ("megatron", {"micro_batches": 2}),
            "mc_micro_batches_overlap": ("megatron", {"micro_batches": 2, "overlap_grad_reduce": True}),
        },
    ),
    (
        {"RECORDING": "megatron", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {
            "mc_one_queue": ("megatron", {}),
            "mc_one_queue_overlap": ("megatron", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        },
    ),
    (
        {"RECORDING": "deepspeed"},
        {
            "ds_zero1": ("deepspeed", {"stage": 1}),
            "ds_zero1_overlap": ("deepspeed", {"stage": 1, "overlap_comm": True}),
            "ds_zero2": ("deepspeed", {"stage": 2, "overlap_comm": False}),
            "ds_zero2_again": ("deepspeed", {"stage": 2, "overlap_comm": False}),
            "ds_zero2_overlap": ("deepspeed", {"stage": 2, "overlap_comm": True}),
            "ds_zero2_bucket": ("deepspeed", {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 0.1}),
            "ds_zero2_bucket_overlap": ("deepspeed", {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 0.1}),
            "ds_zero2_gather": ("deepspeed", {"stage": 2, "overlap_comm": False, "allgather_bucket_size": 0.1}),
            "ds_zero2_contiguous": ("deepspeed", {"stage": 2, "overlap_comm": False, "contiguous_gradients": True}),
            "ds_zero3": ("deepspeed", {"stage": 3}),
            "ds_zero3_again": ("deepspeed", {"stage": 3}),
            "ds_zero3_overlap": ("deepspeed", {"stage": 3, "overlap_comm": True}),
            "ds_zero3_no_overlap": ("deepspeed", {"stage": 3, "overlap_comm": False}),
            "ds_zero3_bucket": ("deepspeed", {"stage": 3, "reduce_bucket_size": 0.1}),
            "ds_zero3_no_prefetch": ("deepspeed", {"stage": 3, "stage3_prefetch_bucket_size": 0.0}),
        },
    ),
    (
        {"RECORDING": "compiled"},
        {
            "tp_plain": ("tensor_parallel", {}),
            "tp_plain_again": ("tensor_parallel", {}),
            "tp_async": ("tensor_parallel", {"micro_pipeline": True}),
            "tp_all_reduce": ("tensor_parallel", {"sequence_parallel": False}),
            "tp_all_reduce_async": ("tensor_parallel", {"sequence_parallel": False, "micro_pipeline": True}),
        },
    ),
    (
        {"RECORDING": "userbuffers", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {
            "ub_none": ("userbuffers", {"overlap": False}),
            "ub_default": ("userbuffers", {}),
            "ub_again": ("userbuffers", {}),
            "ub_no_bulk_wgrad": ("userbuffers", {"ub_bulk_wgrad": False}),
            "ub_no_bulk_dgrad": ("userbuffers", {"ub_bulk_dgrad": False}),
            "ub_no_all_gather": ("userbuffers", {"ub_overlap_ag": False}),
            "ub_no_reduce_scatter": ("userbuffers", {"ub_overlap_rs": False}),
            "ub_rs_dgrad": ("userbuffers", {"ub_overlap_rs_dgrad": True}),
            "ub_pipeline_fc2": (
                "userbuffers",
                {
                    "settings": {
                        "fc2_fprop": {
                            "method": "pipeline",
                            "num_sm": 16,
                            "cga_size": 2,
                            "num_splits": 4,
                            "set_sm_margin": True,
                        }
                    }
                },
            ),
            "ub_bulk_16_sm": (
                "userbuffers",
                {"settings": dict.fromkeys(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), BULK)},
            ),
            "ub_preset": ("userbuffers", {"preset": PRESET}),
            **{
                f"ub_preset_{slot}": ("userbuffers", {"preset": PRESET, "slots": (slot,)})
                for slot in (
                    *("qkv_fprop", "qkv_dgrad", "qkv_wgrad", "proj_fprop", "proj_dgrad"),
                    *("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop", "fc2_dgrad"),
                )
            },
        },
    ),
    (
        {
            "RECORDING": "userbuffers",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",
            "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",
        },
        {"ub_layernorm_margin": ("userbuffers", {}), "ub_none_layernorm_margin": ("userbuffers", {"overlap": False})},
    ),
):
    RECORDINGS |= {name: (program, options, environment) for name, (program, options) in by_name.items()}
