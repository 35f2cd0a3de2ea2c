"""Megatron-Core, cut over ranks in every way, computes what the whole Hugging Face model does in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import megatron_refusal
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.groups import groups_of
from tests.processes import run_ranks
from tests.tp_training.points import tp_point
from tests.tp_training.whole_model import Trained, train_points, train_whole

WITHOUT_SEQUENCE = "tp_training.sequence_parallel=false"
ACCUMULATED = "tp_training.gradient_accumulation_steps=2"
NOT_CLIPPED = "tp_training.max_grad_norm=0"
CLIPPED = "tp_training.max_grad_norm=0.3"
"""Less than the norm at each step."""
DECAY = "tp_training.weight_decay=0.5"
CHECKPOINTED = "tp_training.activation_checkpointing=true"
TIED = "model.tie_word_embeddings=true"
TWO_REPLICAS = ("tp_size=1", "dp_size=2")


def architecture(name: str) -> str:
    return f"model.architecture={name}"


def megatron_point(*overrides: str) -> dict[str, Any]:
    return tp_point("impl=megatron", *overrides)


def of_ranks(world_size: int, cases: dict[str, tuple[str, ...]]) -> list[dict[str, Trained]]:
    """By rank, of all cases one after the other in the same processes."""
    points = {name: megatron_point(*overrides) for name, overrides in cases.items()}
    trained: list[dict[str, Trained]] = run_ranks(world_size, train_points, points)
    return trained


def assert_as_whole(trained: list[dict[str, Trained]], name: str, overrides: tuple[str, ...]) -> None:
    point = megatron_point(*overrides)
    whole = train_whole(point)
    for rank, of_rank in enumerate(trained):
        expected = whole[rank // point["tp_size"]]
        assert of_rank[name].losses == pytest.approx(expected.losses, rel=1e-4)
        assert of_rank[name].norms == pytest.approx(expected.norms, rel=1e-4)


QUICK = {
    "qwen3": (CLIPPED, ACCUMULATED, DECAY),
    "qwen2, tied": (architecture("qwen2"), TIED, WITHOUT_SEQUENCE, CHECKPOINTED),
    "replicas": (*TWO_REPLICAS, CLIPPED, ACCUMULATED),
}


@cache
def quick() -> list[dict[str, Trained]]:
    return of_ranks(2, QUICK)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", QUICK)
def test_losses_and_norms_are_those_of_one_process(name: str) -> None:
    assert_as_whole(quick(), name, QUICK[name])


def test_the_facts_say_what_was_run() -> None:
    alone, replicated = quick()[0]["qwen3"].details, quick()[0]["replicas"].details
    assert alone["tp_comm_overlap"] == replicated["tp_comm_overlap"] == "off"
    assert (alone["sequence_parallel"], replicated["sequence_parallel"]) == (True, False)
    assert (alone["optimizer"], replicated["optimizer"]) == ("not distributed", "distributed")
    assert (alone["overlap_grad_reduce"], replicated["overlap_grad_reduce"]) == (False, True)


MORE = {
    **{
        f"{name} {what}": (architecture(name), *overrides)
        for name in ("llama", "mistral", "qwen2", "qwen3")
        for what, overrides in {
            "in sequence": (CLIPPED, DECAY),
            "tied": (WITHOUT_SEQUENCE, TIED, NOT_CLIPPED, ACCUMULATED),
        }.items()
    },
    "even vocabulary": ("model.vocab_size=1024", CHECKPOINTED, TIED),
    "rank of padding": ("model.vocab_size=9",),
    "wide heads": ("model.head_dim=32", "model.num_kv_heads=4"),
    "replicas, checkpointed": (*TWO_REPLICAS, CHECKPOINTED, TIED, NOT_CLIPPED),
}


@cache
def more() -> list[dict[str, Trained]]:
    return of_ranks(2, MORE)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_compute_as_one(name: str) -> None:
    assert_as_whole(more(), name, MORE[name])


TP2_DP2 = ("tp_size=2", "dp_size=2")
FOUR = {
    "in sequence": (*TP2_DP2, CLIPPED, ACCUMULATED, DECAY),
    "tied": (*TP2_DP2, WITHOUT_SEQUENCE, TIED, CHECKPOINTED, NOT_CLIPPED),
    "qwen2": (*TP2_DP2, architecture("qwen2")),
    "four cuts": ("tp_size=4", "model.num_kv_heads=4", CLIPPED),
    "four replicas": ("tp_size=1", "dp_size=4", ACCUMULATED),
}


@cache
def four() -> list[dict[str, Trained]]:
    return of_ranks(4, FOUR)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_compute_as_one(name: str) -> None:
    assert_as_whole(four(), name, FOUR[name])


HALF = {
    f"{dtype} {what}": (f"tp_training.dtype={dtype}", *overrides)
    for dtype in ("bfloat16", "float16")
    for what, overrides in {"cut": (), "replicas": TWO_REPLICAS}.items()
}


@cache
def half() -> list[dict[str, Trained]]:
    return of_ranks(2, HALF)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", HALF)
def test_half_precision_trains_alike(name: str) -> None:
    point = megatron_point(*HALF[name])
    whole = train_whole(point)
    for rank, of_rank in enumerate(half()):
        expected = whole[rank // point["tp_size"]]
        assert of_rank[name].losses == pytest.approx(expected.losses, rel=2e-3)
        assert of_rank[name].norms == pytest.approx(expected.norms, rel=5e-2)


def _masters(ranks: Ranks, point: dict[str, Any]) -> dict[str, Any]:
    """Of a model in bfloat16, what this rank's optimizer keeps of the embedding, and how many process groups there are
    after one model and after two."""
    from overlap_sweep.tp_training import megatron

    groups = groups_of(ranks, point["tp_size"], point["dp_size"])
    built = megatron.build(point, ranks, groups)
    parameters = dict(built._model.module.module.named_parameters())
    embedding = parameters["embedding.word_embeddings.weight"]
    # A data-parallel rank may own nothing of it.
    kept = [] if embedding.main_param is None else embedding.main_param.detach().flatten().tolist()
    built.close()
    made = len(dist.distributed_c10d._world.pg_map)
    megatron.build(point, ranks, groups).close()
    return {"kept": kept, "made": made, "made_again": len(dist.distributed_c10d._world.pg_map)}


@pytest.mark.end_to_end
@pytest.mark.parametrize("sizes", [("tp_size=2",), TWO_REPLICAS])
def test_master_weights_are_drawn_in_float32_and_groups_are_made_once(sizes: tuple[str, ...]) -> None:
    from overlap_sweep.tp_training.initial_weights import initial_weights

    point = megatron_point("tp_training.dtype=bfloat16", *sizes)
    whole = initial_weights(point, Ranks(0, 1, torch.device("cpu")))("model.embed_tokens.weight", (1024, 64))
    found = run_ranks(2, _masters, point)
    assert [value for of_rank in found for value in of_rank["kept"]] == whole.flatten().tolist()
    assert all(of_rank["made"] == of_rank["made_again"] for of_rank in found)


def _scales(ranks: Ranks, point: dict[str, Any]) -> list[list[float]]:
    """The loss scale after each step and the norm that it reports: the second step's gradients are infinite."""
    from overlap_sweep.tp_training import megatron

    groups = groups_of(ranks, point["tp_size"], point["dp_size"])
    built = megatron.build(point, ranks, groups)
    batch = TokenBatches(point, ranks, groups.dp_rank)[0]
    found = []
    for step in range(3):
        loss = built.forward(*batch, True)
        built.backward(loss * (torch.inf if step == 1 else 1.0), True)
        norm = built.update().item()
        found.append([loss.item(), norm, built._optimizer.get_loss_scale().item()])
    built.close()
    return found


@pytest.mark.end_to_end
def test_float16_leaves_out_a_step_with_infinite_gradients() -> None:
    for first, second, third in run_ranks(2, _scales, megatron_point("tp_training.dtype=float16")):
        assert [first[2], second[2], third[2]] == [2.0**16, 2.0**15, 2.0**15]
        assert second[1] == np.inf
        # No step was taken between them.
        assert second[0] == third[0] < first[0]
        assert np.isfinite(third[1])


def reason(point: dict[str, Any], **fields: Any) -> str:
    """The refusal of the point with other fields of its model, empty where there is none."""
    changed = {**point, "language_model": {**point["language_model"], **fields}}
    return megatron_refusal.refusal(changed) or ""


def test_refuses_what_it_would_compute_differently() -> None:
    point = megatron_point()
    assert reason(point) == ""
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0}
    assert "rotary embedding" in reason(point, rope_parameters=rope)
    assert "hidden_act is gelu" in reason(point, hidden_act="gelu")
    assert "attention_bias=True" in reason(point, attention_bias=True)


SETTING = {"method": "ring_exchange"}


def on_gpu(slots: dict[str, Any] | None = None, switches: dict[str, bool] | None = None, **changes: Any) -> str:
    """The refusal of what is to be overlapped on a GPU."""
    point = megatron_point()
    point |= {"runtime": {**point["runtime"], "device": "cuda"}, "precision": "bf16", **changes}
    if slots is not None:
        point["overlap_cfg"] = {"slots": slots, "switches": {**SWITCH_DEFAULTS, **(switches or {})}}
    return megatron_refusal.refusal(point) or ""


def test_refuses_overlap_that_userbuffers_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_refusal, "missing", lambda: None)
    alone = {**megatron_point()["tp_training"], "sequence_parallel": False}
    assert on_gpu() == on_gpu({"fc2_fprop": SETTING}) == ""
    assert "set up for bfloat16" in on_gpu(precision="fp16")
    assert "no kernels for tp_size=3" in on_gpu(tp_size=3)
    assert on_gpu({"fc2_fprop": SETTING}, tp_size=3) == ""
    assert "qkv_dgrad is not set to" in on_gpu({"fc1_dgrad": SETTING}, {"tp_comm_overlap_rs_dgrad": True})
    assert "without tp_training.sequence_parallel" in on_gpu({"fc2_fprop": SETTING}, tp_training=alone)
    # Nothing is overlapped.
    assert on_gpu({}, {"tp_comm_overlap": False}, precision="fp16") == ""
    assert on_gpu(precision="fp16", tp_training=alone) == ""


def test_refuses_a_window_that_hides_something() -> None:
    mistral, qwen3 = megatron_point(architecture("mistral")), megatron_point()
    assert "sliding_window=8 is shorter" in reason(mistral, sliding_window=8)
    assert reason(mistral, sliding_window=16) == ""
    assert reason(qwen3, sliding_window=8, use_sliding_window=False) == ""
    assert "sliding_window=8" in reason(qwen3, sliding_window=8, use_sliding_window=True)
