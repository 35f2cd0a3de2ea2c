"""Recordings of one training with and without a setting (`benchmarks/record_effects.py`), some of which do
nothing: what changed is found, and no more."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from overlap_sweep.effects.comparison import Effect, effect
from overlap_sweep.effects.fingerprint import Fingerprint
from overlap_sweep.effects.runs import read_prints
from tests.effects.recordings import unpack

NOTHING: set[str] = set()


class Pair(NamedTuple):
    archive: str
    before: str
    after: str
    aspects: set[str]
    """What must differ; nothing else may."""
    setting: str = ""
    verdict: str = ""


H200X2 = [
    # The same program in another process group, or with what is the default anyway.
    *(Pair("h200x2", "ddp_1", other, NOTHING) for other in ("ddp_2", "ddp_3", "ddp_group", "ddp_misspelt")),
    *(Pair("h200x2", "fsdp2_1", other, NOTHING) for other in ("fsdp2_2", "fsdp2_3", "fsdp2_misspelt")),
    Pair("h200x2", "ub_default", "ub_again", NOTHING),
    # DDP
    Pair("h200x2", "ddp_1", "ddp_bucket_25_said", {"calls"}, "bucket_cap_mb=25", "in force"),
    Pair("h200x2", "ddp_1", "ddp_bucket_4", {"calls", "blocks", "threads"}, "bucket_cap_mb=4", "in force"),
    Pair("h200x2", "ddp_1", "ddp_bucket_200", {"calls"}, "bucket_cap_mb=200", "in force"),
    Pair("h200x2", "ddp_1", "ddp_static_graph", NOTHING, "static_graph=True", "cannot be seen"),
    Pair("h200x2", "ddp_1", "ddp_bucket_view", {"copies"}, "gradient_as_bucket_view=True", "in force"),
    Pair(
        "h200x2",
        "ddp_1",
        "ddp_find_unused",
        {"calls", "type", "kernel", "blocks", "threads", "copies"},
        "find_unused_parameters=True",
        "in force",
    ),
    Pair("h200x2", "ddp_1", "ddp_compressed", {"type", "kernel", "computation", "copies"}),
    Pair("h200x2", "ddp_each_micro_batch", "ddp_no_sync", {"calls", "computation", "copies"}, "no_sync=1", "in force"),
    Pair("h200x2", "ddp_1", "ddp_foreach", NOTHING),
    Pair("h200x2", "ddp_foreach", "ddp_fused", {"computation"}, "optimizer.fused=True", "in force"),
    Pair("h200x2", "ddp_1", "ddp_compiled", {"gemms", "computation", "copies"}, "compile=True", "in force"),
    Pair("h200x2", "ddp_1", "ddp_high_priority", NOTHING, "high_priority=True", "cannot be seen"),
    # NCCL
    Pair("h200x2", "ddp_1", "ddp_max_ctas_4", {"blocks"}, "job.env.NCCL_MAX_CTAS=4", "in force"),
    Pair("h200x2", "ddp_1", "ddp_max_ctas_64", NOTHING, "NCCL_MAX_CTAS=64", "in force"),
    Pair("h200x2", "ddp_1", "ddp_misspelt", NOTHING, "NCCL_MAXCTAS=4", "not in force"),
    Pair("h200x2", "ddp_1", "ddp_min_ctas_32", {"blocks"}, "NCCL_MIN_CTAS=32", "in force"),
    Pair("h200x2", "ddp_group", "ddp_group_4_ctas", {"blocks"}, "max_ctas=4", "in force"),
    Pair("h200x2", "ddp_group", "ddp_group_cga_2", NOTHING, "cga_cluster_size=2", "cannot be seen"),
    Pair("h200x2", "ddp_1", "ddp_algo_ring", NOTHING, "NCCL_ALGO=Ring", "in force"),
    Pair("h200x2", "ddp_1", "ddp_algo_tree", {"kernel", "threads"}, "NCCL_ALGO=allreduce:Tree", "in force"),
    Pair("h200x2", "fsdp2_1", "fsdp2_algo_tree", NOTHING, "NCCL_ALGO=allreduce:Tree", "fell back"),
    Pair("h200x2", "ddp_1", "ddp_proto_ll", {"threads"}, "NCCL_PROTO=LL", "in force"),
    Pair("h200x2", "ddp_1", "ddp_proto_simple", NOTHING, "NCCL_PROTO=Simple", "cannot be seen"),
    Pair("h200x2", "ddp_1", "ddp_cta_policy_zero", NOTHING, "NCCL_CTA_POLICY=2", "not in force"),
    Pair("h200x2", "ddp_1", "ddp_buffer_8m", NOTHING, "NCCL_BUFFSIZE=8388608", "cannot be seen"),
    # FSDP2
    Pair("h200x2", "fsdp2_1", "fsdp2_no_reshard", {"calls", "computation", "copies"}, "reshard=False", "in force"),
    Pair("h200x2", "fsdp2_1", "fsdp2_forward_prefetch_2", {"position"}, "fsdp.forward_prefetch=2", "in force"),
    Pair("h200x2", "fsdp2_1", "fsdp2_backward_prefetch_1", NOTHING, "backward_prefetch=1", "cannot be seen"),
    Pair("h200x2", "fsdp2_1", "fsdp2_backward_prefetch_2", {"position"}, "backward_prefetch=2", "in force"),
    Pair("h200x2", "fsdp2_1", "fsdp2_reduce_fp32", {"calls", "type", "kernel", "computation"}),
    Pair(
        "h200x2",
        "fsdp2_each_micro_batch",
        "fsdp2_accumulated",
        {"calls", "computation", "grid", "copies"},
        "requires_gradient_sync=False",
        "in force",
    ),
    Pair("h200x2", "fsdp2_1", "fsdp2_root_only", {"calls", "computation", "copies"}),
    Pair("h200x2", "fsdp2_1", "fsdp2_own_reduce_scatter", NOTHING, "separate_reduce_scatter_group=1", "not in force"),
    Pair("h200x2", "fsdp2_1", "fsdp2_max_ctas_4", {"blocks"}, "NCCL_MAX_CTAS=4", "in force"),
    Pair("h200x2", "fsdp2_1", "fsdp2_connections_1", {"overtaking"}, "CUDA_DEVICE_MAX_CONNECTIONS=1", "in force"),
    Pair("h200x2", "fsdp2_1", "fsdp2_connections_8", NOTHING, "CUDA_DEVICE_MAX_CONNECTIONS=8", "cannot be seen"),
    # Userbuffers
    Pair("h200x2", "ub_none", "ub_default", {"calls", "gemms", "grid", "copies"}, "tp_comm_overlap=True", "in force"),
    Pair("h200x2", "ub_default", "ub_none", {"calls", "gemms", "grid", "copies"}, "tp_comm_overlap=False", "in force"),
    Pair("h200x2", "ub_default", "ub_no_bulk_wgrad", {"calls", "gemms", "copies"}),
    Pair("h200x2", "ub_default", "ub_pipeline_fc2", NOTHING),
    Pair("h200x2", "ub_default", "ub_bulk_16_sm", {"gemms"}),
]

FRAMEWORKS = [
    *(
        Pair("h200x2_frameworks", before, after, NOTHING)
        for before, after in (
            ("ddp_unmarked", "ddp_unmarked_again"),
            ("graph_1", "graph_2"),
            ("mc_1", "mc_2"),
            ("ds_zero2", "ds_zero2_again"),
            ("tp_plain", "tp_plain_again"),
            # What Megatron-LM chooses by itself.
            ("mc_overlap_grad_reduce", "mc_bucket_40m"),
        )
    ),
    # Without ProfilerStep, and in CUDA graphs.
    Pair(
        "h200x2_frameworks",
        "ddp_unmarked",
        "ddp_unmarked_bucket_4",
        {"calls", "blocks", "threads"},
        "bucket_cap_mb=4",
        "in force",
    ),
    Pair("h200x2_frameworks", "graph_1", "graph_4_chunks", {"calls"}),
    Pair("h200x2_frameworks", "graph_unmarked", "graph_unmarked_4_chunks", {"calls"}),
    # Of published recipes.
    *(
        Pair("h200x2_frameworks", f"{one}_1", f"{one}_avoid_record_streams", NOTHING, setting, "cannot be seen")
        for one in ("ddp", "fsdp2")
        for setting in ("TORCH_NCCL_AVOID_RECORD_STREAMS=1",)
    ),
    Pair(
        "h200x2_frameworks",
        "fsdp2_1",
        "fsdp2_net_chunk",
        NOTHING,
        "NCCL_P2P_NET_CHUNKSIZE=2097152",
        "cannot be seen",
    ),
    Pair(
        "h200x2_frameworks",
        "ub_default",
        "ub_layernorm_margin",
        {"grid"},
        "NVTE_FWD_LAYERNORM_SM_MARGIN=16",
        "in force",
    ),
    *(
        Pair("h200x2_frameworks", "ub_default", f"ub_preset_{slot}", NOTHING)
        for slot in ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_fprop", "fc2_dgrad")
    ),
    *(
        Pair("h200x2_frameworks", "ub_default", f"ub_preset_{slot}", {"blocks", "gemms"})
        for slot in ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
    ),
    Pair("h200x2_frameworks", "ub_default", "ub_preset_proj_fprop", {"blocks", "grid"}),
    # Symmetric memory: of a pool that is registered as symmetric, and of one that is not.
    Pair(
        "h200x2_frameworks",
        "fsdp2_1",
        "fsdp2_symmetric",
        {"kernel", "blocks", "threads", "computation"},
        "symm_mem=1",
        "in force",
    ),
    Pair(
        "h200x2_frameworks",
        "fsdp2_1",
        "fsdp2_copy_engines",
        {"kernel", "blocks", "threads", "computation"},
        "NCCL_CTA_POLICY=2",
        "in force",
    ),
    Pair("h200x2_frameworks", "fsdp2_1", "fsdp2_group_buffers", {"blocks"}, "symm_mem=1", "fell back"),
    # Megatron-Core
    Pair(
        "h200x2_frameworks",
        "mc_1",
        "mc_overlap_grad_reduce",
        {"calls", "blocks", "threads", "computation", "grid"},
        "overlap_grad_reduce=True",
        "in force",
    ),
    Pair(
        "h200x2_frameworks",
        "mc_overlap_grad_reduce",
        "mc_overlap_both",
        {"calls"},
        "overlap_param_gather=True",
        "in force",
    ),
    Pair(
        "h200x2_frameworks",
        "mc_overlap_grad_reduce",
        "mc_bucket_8m",
        {"calls", "computation", "grid"},
        "ddp_bucket_size=8000000",
        "in force",
    ),
    Pair(
        "h200x2_frameworks",
        "mc_plain",
        "mc_plain_overlap",
        {"calls", "computation"},
        "overlap_grad_reduce=True",
        "in force",
    ),
    # DeepSpeed: with its default, one bucket has all gradients of a small model.
    Pair("h200x2_frameworks", "ds_zero2", "ds_zero2_overlap", NOTHING, "overlap_comm=True", "cannot be seen"),
    Pair(
        "h200x2_frameworks",
        "ds_zero2_bucket",
        "ds_zero2_bucket_overlap",
        {"stream"},
        "overlap_comm=True",
        "in force",
    ),
    Pair(
        "h200x2_frameworks",
        "ds_zero2",
        "ds_zero2_bucket",
        {"calls", "blocks", "threads", "computation"},
        "reduce_bucket_size=8000000",
        "in force",
    ),
    Pair("h200x2_frameworks", "ds_zero2", "ds_zero2_gather", NOTHING, "allgather_bucket_size=8000000", "not in force"),
    Pair("h200x2_frameworks", "ds_zero3", "ds_zero3_overlap", NOTHING, "overlap_comm=True", "cannot be seen"),
    Pair("h200x2_frameworks", "ds_zero3", "ds_zero3_no_overlap", {"stream"}, "overlap_comm=False", "in force"),
    Pair(
        "h200x2_frameworks",
        "ds_zero3",
        "ds_zero3_no_prefetch",
        {"calls", "computation"},
        "stage3_prefetch_bucket_size=0",
        "in force",
    ),
    # Tensor parallelism: async of torch.compile, and userbuffers by kind.
    Pair(
        "h200x2_frameworks",
        "tp_plain",
        "tp_async",
        {"calls", "gemms", "computation", "grid", "copies"},
        "_micro_pipeline_tp=True",
        "in force",
    ),
    Pair("h200x2_frameworks", "tp_all_reduce", "tp_all_reduce_async", NOTHING, "async_tp=True", "not in force"),
    Pair(
        "h200x2_frameworks",
        "ub_none",
        "ub_default",
        {"calls", "gemms", "grid", "copies"},
        "tp_comm_overlap=True",
        "in force",
    ),
    Pair(
        "h200x2_frameworks",
        "ub_default",
        "ub_no_bulk_dgrad",
        {"calls", "gemms", "copies"},
        "tp_comm_bulk_dgrad=False",
        "in force",
    ),
    Pair(
        "h200x2_frameworks",
        "ub_default",
        "ub_no_all_gather",
        {"calls", "kernel", "blocks", "threads", "gemms", "copies"},
        "tp_comm_overlap_ag=False",
        "in force",
    ),
]


CPU_GLOO = [
    *(Pair("cpu_gloo", "ddp_1", other, NOTHING) for other in ("ddp_2", "ddp_misspelt")),
    Pair("cpu_gloo", "fsdp2_1", "fsdp2_2", NOTHING),
    Pair("cpu_gloo", "ddp_1", "ddp_bucket_25_said", {"calls"}, "bucket_cap_mb=25", "in force"),
    Pair("cpu_gloo", "ddp_1", "ddp_bucket_4", {"calls"}, "bucket=4", "in force"),
    Pair("cpu_gloo", "ddp_bucket_25_said", "ddp_bucket_200", NOTHING, "bucket=200", "cannot be seen"),
    Pair("cpu_gloo", "ddp_1", "ddp_static_graph", NOTHING, "static_graph=True", "cannot be seen"),
    Pair("cpu_gloo", "ddp_1", "ddp_bucket_view", {"copies"}, "gradient_as_bucket_view=True", "in force"),
    Pair("cpu_gloo", "ddp_1", "ddp_find_unused", {"calls", "type", "copies"}, "find_unused_parameters=1", "in force"),
    Pair(
        "cpu_gloo", "ddp_each_micro_batch", "ddp_no_sync", {"calls", "computation", "copies"}, "no_sync=1", "in force"
    ),
    # On a CPU the default is a loop over the parameters.
    Pair("cpu_gloo", "ddp_1", "ddp_foreach", {"computation"}),
    Pair("cpu_gloo", "ddp_foreach", "ddp_fused", {"computation"}, "fused=True", "in force"),
    Pair("cpu_gloo", "ddp_1", "ddp_misspelt", NOTHING, "NCCL_MAXCTAS=4", "cannot be seen"),
    Pair("cpu_gloo", "fsdp2_1", "fsdp2_no_reshard", {"calls", "computation", "copies"}, "reshard=False", "in force"),
    Pair("cpu_gloo", "fsdp2_1", "fsdp2_forward_prefetch_1", {"position"}, "forward_prefetch=1", "in force"),
    Pair("cpu_gloo", "fsdp2_1", "fsdp2_backward_prefetch_1", NOTHING, "backward_prefetch=1", "cannot be seen"),
    Pair("cpu_gloo", "fsdp2_1", "fsdp2_backward_prefetch_2", {"position"}, "backward_prefetch=2", "in force"),
    Pair("cpu_gloo", "fsdp2_each_micro_batch", "fsdp2_accumulated", {"calls", "computation", "copies"}),
    Pair("cpu_gloo", "fsdp2_1", "fsdp2_root_only", {"calls", "computation", "copies"}),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked recordings, by archive and name."""
    return unpack(tmp_path_factory.mktemp("effects"))


@cache
def prints(directory: Path) -> list[Fingerprint]:
    read = read_prints(sorted(directory.glob("trace_rank*.json")))
    found = [one.print for one in read.values() if one.print]
    assert found
    return found


def effect_of(folder: Path, pair: Pair) -> Effect:
    name, _, value = pair.setting.partition("=")
    before, after = (prints(folder / pair.archive / name) for name in (pair.before, pair.after))
    return effect(pair.after, after, pair.before, before, {name: ("", value)} if name else {})


@pytest.mark.parametrize(
    "pair",
    [*H200X2, *FRAMEWORKS, *CPU_GLOO],
    ids=lambda pair: f"{pair.archive}-{pair.before}-{pair.after}-{pair.setting}",
)
def test_planted_changes_and_no_others_are_found(folder: Path, pair: Pair) -> None:
    found = effect_of(folder, pair)

    assert {one.aspect for one in found.differences} == pair.aspects
    assert found.changed == bool(pair.aspects)
    assert [one.verdict for one in found.settings] == ([pair.verdict] if pair.verdict else [])


def test_differences_are_told_in_words(folder: Path) -> None:
    pairs = {pair.after: pair for pair in H200X2}
    told = {name: effect_of(folder, pairs[name]).sentences for name in ("ddp_bucket_200", "fsdp2_forward_prefetch_2")}

    assert told == {
        "ddp_bucket_200": [
            "4 all_reduce of 8.4 MB to 33.6 MB, 83.9 MB in all became 1 all_reduce of 83.9 MB (bwd, 2 ranks)",
            "nothing else changed",
        ],
        "fsdp2_forward_prefetch_2": [
            "4 of 5 all_gather launched 2 to 4 GEMMs earlier (fwd, 2 ranks)",
            "nothing else changed",
        ],
    }


def test_one_trace_says_which_ranks_are_missing(folder: Path) -> None:
    before, after = (prints(folder / "h200x2" / name)[:1] for name in ("ddp_1", "ddp_bucket_4"))

    found = effect("after", after, "before", before, {})

    assert found.changed
    assert found.notes == ["Compared rank 0 of 2: what changes on others is unknown."]
