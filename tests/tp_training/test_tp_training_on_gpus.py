"""PyTorch's own stacks on real GPUs: losses agree, and asynchronous TP fuses."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest

from overlap_sweep.ranks import Ranks
from tests.processes import run_ranks
from tests.tp_training.points import tp_point
from tests.tp_training.whole_model import Trained, train_points

SMALL = (
    *("model.hidden_size=1024", "model.ffn_hidden_size=2816", "model.num_attention_heads=8", "model.num_kv_heads=4"),
    *("model.vocab_size=32003", "tp_training.seq_length=512", "tp_training.learning_rate=0.0001", "tp_size=2"),
)
"""Two layers; the vocabulary is padded."""
IN_SEQUENCE = "tp_training.sequence_parallel=true"
ASKED = {
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
    **{f"{name} bf16": (*ASKED[name], "tp_training.dtype=bfloat16") for name in ("plain", "in sequence", "async_tp")},
    "autocast": (*ASKED["plain"], "tp_training.dtype=bfloat16", "tp_training.autocast=true"),
    "async_tp autocast": (*ASKED["async_tp"], "tp_training.dtype=bfloat16", "tp_training.autocast=true"),
    "fp16": (*ASKED["in sequence"], "tp_training.dtype=float16"),
}
POINTS = {**ASKED, **LOWER}


def _train(ranks: Ranks, points: dict[str, dict[str, Any]]) -> dict[str, Trained]:
    return train_points(ranks, points)


@cache
def runs() -> list[dict[str, Trained]]:
    points = {name: tp_point(*SMALL, "tp_training.dtype=float32", *asked) for name, asked in ASKED.items()}
    points |= {name: tp_point(*SMALL, *asked) for name, asked in LOWER.items()}
    return run_ranks(2, _train, points, device="cuda")


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", [name for name in ASKED if "one sequence" not in name and name != "data parallel"])
def test_float32_losses_agree(name: str) -> None:
    for of_rank in runs():
        assert of_rank[name].losses == pytest.approx(of_rank["plain"].losses, rel=1e-4)
        assert of_rank[name].norms == pytest.approx(of_rank["plain"].norms, rel=2e-3)


@pytest.mark.gpu(count=2)
def test_one_sequence_trains_the_same_fused() -> None:
    for of_rank in runs():
        fused, apart = of_rank["async_tp, one sequence"], of_rank["one sequence"]
        assert fused.losses == pytest.approx(apart.losses, rel=1e-4)


@pytest.mark.gpu(count=2)
def test_replicas_begin_where_the_parts_do() -> None:
    """The first replica has the same weights and the same batch."""
    first, second = (of_rank["data parallel"] for of_rank in runs())
    assert first.losses[0] == pytest.approx(runs()[0]["plain"].losses[0], rel=1e-5)
    assert second.losses[0] != pytest.approx(first.losses[0], rel=1e-5)
    assert first.norms == second.norms


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", LOWER)
def test_lower_precisions_come_near(name: str) -> None:
    for of_rank in runs():
        assert of_rank[name].losses == pytest.approx(of_rank["plain"].losses, rel=5e-3)
        assert all(math.isfinite(norm) for norm in of_rank[name].norms)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", [name for name in POINTS if name.startswith("async_tp")])
def test_async_tp_fuses(name: str) -> None:
    for of_rank in runs():
        details = of_rank[name].details
        # Forward autocast gathers the float32 output of a norm, and casts it between that and the GEMM.
        assert details["fused_all_gather_matmul"] >= (2 if "autocast" in name else 4)
        assert details["fused_matmul_reduce_scatter"] >= 2
        assert of_rank[name].warnings == []
