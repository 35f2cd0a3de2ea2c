"""Stacks on real GPUs train alike, fuse and overlap what they say, and DeepSpeed compiles nothing of its own."""

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from overlap_sweep.backends import installed
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig, text
from overlap_sweep.workloads.tp_training.config import Resolved
from tests.composed import tp_point
from tests.processes import run_ranks
from tests.workloads.tp_training.stacks import Trained, train_points, train_whole

pytestmark = pytest.mark.gpu(count=2)
of_pytorch_once, of_autotp_once, of_megatron_once = (
    pytest.mark.xdist_group(name) for name in ("of_pytorch", "of_autotp", "of_megatron")
)
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
needs_megatron = pytest.mark.skipif(
    any(installed.missing(package) for package in ("transformer_engine", "megatron.core")),
    reason="needs transformer_engine and megatron.core",
)

SMALL = (
    *("model.hidden_size=1024", "model.ffn_hidden_size=2816", "model.num_attention_heads=8", "model.num_kv_heads=4"),
    *("model.vocab_size=32003", "tp_training.seq_length=512", "tp_training.learning_rate=0.0001", "tp_size=2"),
)
"""Two layers; the vocabulary is padded."""
IN_SEQUENCE = "tp_training.sequence_parallel=true"
EXACT = {
    "plain": ("impl=fsdp_dtensor",),
    "in sequence": ("impl=fsdp_dtensor", IN_SEQUENCE),
    "compiled": ("impl=fsdp_dtensor", IN_SEQUENCE, "tp_training.compile=true"),
    "checkpointed": ("impl=fsdp_dtensor", IN_SEQUENCE, "tp_training.activation_checkpointing=true"),
    "data parallel": ("impl=fsdp_dtensor", "tp_size=1", "dp_size=2"),
    "async_tp": ("impl=async_tp",),
    "async_tp checkpointed": ("impl=async_tp", "tp_training.activation_checkpointing=true"),
    "async_tp, one sequence": ("impl=async_tp", "tp_training.batch_size=1"),
    "one sequence": ("impl=fsdp_dtensor", "tp_training.batch_size=1"),
}
LOWER = {
    **{f"{name} bf16": (*EXACT[name], "tp_training.dtype=bfloat16") for name in ("plain", "in sequence", "async_tp")},
    "autocast": (*EXACT["plain"], "tp_training.dtype=bfloat16", "tp_training.autocast=true"),
    "async_tp autocast": (*EXACT["async_tp"], "tp_training.dtype=bfloat16", "tp_training.autocast=true"),
    "fp16": (*EXACT["in sequence"], "tp_training.dtype=float16"),
}
OF_PYTORCH = {**EXACT, **LOWER}


@cache
def of_pytorch() -> list[dict[str, Trained]]:
    points = {name: tp_point(*SMALL, "tp_training.dtype=float32", *asked) for name, asked in OF_PYTORCH.items()}
    return run_ranks(2, train_points, points, device="cuda")


@of_pytorch_once
@pytest.mark.parametrize("name", [name for name in OF_PYTORCH if name not in ("one sequence", "data parallel")])
def test_all_train_alike(name: str) -> None:
    exact = name in EXACT
    for of_rank in of_pytorch():
        reference = of_rank["one sequence" if "one sequence" in name else "plain"]
        assert of_rank[name].losses == pytest.approx(reference.losses, rel=1e-4 if exact else 5e-3)
        assert all(math.isfinite(norm) for norm in of_rank[name].norms)
        assert not exact or of_rank[name].norms == pytest.approx(reference.norms, rel=2e-3)


@of_pytorch_once
def test_replicas_begin_where_the_parts_do() -> None:
    """The first replica has the same weights and the same batch."""
    first, second = (of_rank["data parallel"] for of_rank in of_pytorch())
    assert first.losses[0] == pytest.approx(of_pytorch()[0]["plain"].losses[0], rel=1e-5)
    assert second.losses[0] != pytest.approx(first.losses[0], rel=1e-5)
    assert first.norms == second.norms


@of_pytorch_once
@pytest.mark.parametrize("name", [name for name in OF_PYTORCH if name.startswith("async_tp")])
def test_async_tp_fuses(name: str) -> None:
    for of_rank in of_pytorch():
        details = of_rank[name].details
        # Forward autocast gathers the float32 output of a norm, and casts it between that and the GEMM.
        assert details["fused_all_gather_matmul"] >= (2 if "autocast" in name else 4)
        assert details["fused_matmul_reduce_scatter"] >= 2
        assert of_rank[name].warnings == []


SCHEDULES = {
    "fsdp_dtensor": (
        ("tp_training.reshard_after_forward=false", "tp_training.forward_prefetch=1"),
        ("tp_training.forward_prefetch=2", "tp_training.backward_prefetch=2"),
        ("tp_training.backward_prefetch=0",),
    ),
    "autotp": (
        ("tp_training.overlap_comm=true", "tp_training.reduce_bucket_size=100000"),
        ("tp_training.overlap_comm=true", "tp_training.zero_stage=2", "tp_training.allgather_bucket_size=100000"),
    ),
    "megatron": (
        ("tp_training.use_distributed_optimizer=false", "tp_training.ddp_bucket_size=100000"),
        ("tp_training.overlap_grad_reduce=false",),
        ("tp_training.overlap_param_gather=false", "tp_training.ddp_bucket_size=100000"),
    ),
}


@pytest.mark.parametrize(
    "stack",
    [
        "fsdp_dtensor",
        pytest.param("autotp", marks=needs_deepspeed),
        pytest.param("megatron", marks=needs_megatron),
    ],
)
def test_no_schedule_of_data_parallelism_changes_what_is_trained(stack: str) -> None:
    """On streams of their own, which a CPU doesn't have."""
    plain = (*SMALL, f"impl={stack}", "tp_size=1", "dp_size=2", "tp_training.gradient_accumulation_steps=2")
    points = {str(own): tp_point(*plain, "tp_training.dtype=bfloat16", *own) for own in ((), *SCHEDULES[stack])}
    for of_rank in run_ranks(2, train_points, points, device="cuda"):
        usual = of_rank.pop("()")
        for name, found in of_rank.items():
            assert found.losses == pytest.approx(usual.losses, rel=2e-3), name
            assert found.norms == pytest.approx(usual.norms, rel=2e-2), name


AUTOTP = {
    **{
        f"{dtype} zero{stage}": (f"tp_training.dtype={dtype}", f"tp_training.zero_stage={stage}")
        for dtype in ("float32", "bfloat16", "float16")
        for stage in ((1, 2) if dtype == "float16" else (0, 1, 2))
    },
    "autocast": ("tp_training.autocast=true", "tp_training.dtype=bfloat16"),
    "float32 checkpointed": ("tp_training.activation_checkpointing=true",),
    "bfloat16 compiled": ("tp_training.compile=true", "tp_training.dtype=bfloat16"),
}


def _train_autotp(ranks: Ranks, points: dict[str, Resolved]) -> tuple[dict[str, Trained], list[str]]:
    """And the operators that DeepSpeed compiled or loaded meanwhile."""
    trained = train_points(ranks, points)
    from deepspeed.ops.op_builder.builder import OpBuilder

    return trained, sorted(OpBuilder._loaded_ops)


@cache
def of_autotp() -> list[tuple[dict[str, Trained], list[str]]]:
    points = {name: tp_point("impl=autotp", *SMALL, *asked) for name, asked in AUTOTP.items()}
    return run_ranks(2, _train_autotp, points, device="cuda")


@of_autotp_once
@needs_deepspeed
@pytest.mark.parametrize("name", AUTOTP)
def test_autotp_trains_what_one_gpu_does(name: str) -> None:
    (whole,) = train_whole(tp_point("impl=autotp", *SMALL), "cuda:0")
    exact = "float16" not in name and "autocast" not in name
    for trained, _ in of_autotp():
        assert trained[name].losses == pytest.approx(whole.losses, rel=1e-3 if exact else 5e-3)
        assert trained[name].norms == pytest.approx(whole.norms, rel=1e-3 if exact else 5e-2)


@of_autotp_once
@needs_deepspeed
def test_deepspeed_compiles_nothing() -> None:
    assert [operators for _, operators in of_autotp()] == [[], []]


OF_MEGATRON = (
    *("impl=megatron", "runtime.device=cuda", "tp_training.dtype=bfloat16", "model.hidden_size=1024"),
    *("model.ffn_hidden_size=2048", "model.num_attention_heads=8", "model.num_kv_heads=4", "model.head_dim=128"),
    *("model.num_layers=2", "tp_training.seq_length=512", "tp_training.learning_rate=0.0001"),
)
WITHOUT_SEQUENCE = "tp_training.sequence_parallel=false"
TUNED = OverlapConfig(
    {
        "proj_fprop": {"method": "pipeline", "num_sm": 16, "cga_size": 2, "num_splits": 4, "set_sm_margin": True},
        "fc1_dgrad": {"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": False},
        "fc2_dgrad": {"method": "ring_exchange", "aggregate": False},
    },
    {**SWITCH_DEFAULTS, "tp_comm_overlap_disable_qkv": True},
)
MEGATRON = {
    "default": (),
    "off": ("tp_training.tp_comm_overlap=false",),
    "whole sequence": (WITHOUT_SEQUENCE,),
    "checkpointed": ("tp_training.activation_checkpointing=true",),
    "accumulated": ("tp_training.gradient_accumulation_steps=2",),
    "accumulated, whole sequence": ("tp_training.gradient_accumulation_steps=2", WITHOUT_SEQUENCE),
    "frozen": ("tp_training.learning_rate=0",),
    "fsdp_dtensor": ("impl=fsdp_dtensor",),
    "float32": ("tp_training.dtype=float32", "tp_training.tp_comm_overlap=false"),
    "float16": ("tp_training.dtype=float16", "tp_training.tp_comm_overlap=false"),
}
DTYPES = ("bfloat16", "float32", "float16")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "tp_comm_overlap_cfg.yaml"
    path.write_text(text(TUNED))
    return path


@cache
def of_megatron(tuned: Path) -> list[dict[str, Trained]]:
    """One after the other in the same processes, with other userbuffers or none."""
    cases = {**MEGATRON, "tuned": (f"tp_training.tp_comm_overlap_cfg={tuned}",), "default again": ()}
    cases |= {f"replicated {dtype}": ("tp_size=1", "dp_size=2", f"tp_training.dtype={dtype}") for dtype in DTYPES}
    points = {name: tp_point(*OF_MEGATRON, *overrides) for name, overrides in cases.items()}
    return run_ranks(2, train_points, points, device="cuda", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


@of_megatron_once
@needs_megatron
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        *((name, "whole sequence") for name in ("default", "off", "checkpointed", "tuned", "default again")),
        *((name, "fsdp_dtensor") for name in ("default", "float32", "float16")),
        ("accumulated", "accumulated, whole sequence"),
    ],
)
def test_losses_of_megatron_agree(name: str, reference: str, tuned: Path) -> None:
    first, second = of_megatron(tuned)
    assert first[name].losses == pytest.approx(first[reference].losses, rel=1e-2)
    assert first[name].norms == pytest.approx(first[reference].norms, rel=5e-2)
    assert first[name].losses == second[name].losses


@of_megatron_once
@needs_megatron
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_replicas_of_megatron_train_as_in_float32(name: str, tuned: Path) -> None:
    first, second = ({dtype: of_rank[f"replicated {dtype}"] for dtype in DTYPES} for of_rank in of_megatron(tuned))
    for of_rank in (first, second):
        assert of_rank[name].losses == pytest.approx(of_rank["float32"].losses, rel=1e-2)
        assert of_rank[name].norms == pytest.approx(of_rank["float32"].norms, rel=5e-2)
    assert first[name].details["optimizer"] == "distributed"
    assert first[name].losses != second[name].losses


@of_megatron_once
@needs_megatron
def test_megatron_takes_steps_and_says_who_overlaps_and_who_attends(tuned: Path) -> None:
    found = of_megatron(tuned)[0]
    pairs = list(zip(found["default"].losses, found["frozen"].losses, strict=True))
    assert pairs[0][0] == pairs[0][1]
    assert all(loss < frozen - 1e-3 for loss, frozen in pairs[1:])
    overlaps = {name: found[name].details["tp_comm_overlap"] for name in ("default", "off", "whole sequence", "tuned")}
    assert overlaps == {
        "default": "Transformer Engine's defaults",
        "off": "off",
        "whole sequence": "off",
        "tuned": str(tuned),
    }
    assert found["default"].details["attention_backend"].startswith(("flash", "fused"))
    assert found["default"].warnings == []
