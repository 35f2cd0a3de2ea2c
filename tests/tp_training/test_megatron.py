"""What Megatron-Core alone has to show; that it trains what the whole model does is in test_stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import megatron_refusal
from overlap_sweep.tp_training.groups import groups_of
from overlap_sweep.tp_training.initial_weights import initial_weights
from tests.processes import run_ranks
from tests.tp_training.stacks import MESHES
from tests.training.points import tp_point


def megatron_point(*overrides: str) -> dict[str, Any]:
    return tp_point("impl=megatron", *overrides)


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
@pytest.mark.parametrize("sizes", [MESHES["tp2"], MESHES["dp2"]])
def test_master_weights_are_drawn_in_float32_and_groups_are_made_once(sizes: tuple[str, ...]) -> None:
    point = megatron_point("tp_training.dtype=bfloat16", *sizes)
    whole = initial_weights(point, Ranks(0, 1, torch.device("cpu")))("model.embed_tokens.weight", (1024, 64))
    found = run_ranks(2, _masters, point, keep="megatron")
    assert [value for of_rank in found for value in of_rank["kept"]] == whole.flatten().tolist()
    assert all(of_rank["made"] == of_rank["made_again"] for of_rank in found)


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
    mistral, qwen3 = megatron_point("model.architecture=mistral"), megatron_point()
    assert "sliding_window=8 is shorter" in reason(mistral, sliding_window=8)
    assert reason(mistral, sliding_window=16) == ""
    assert reason(qwen3, sliding_window=8, use_sliding_window=False) == ""
    assert "sliding_window=8" in reason(qwen3, sliding_window=8, use_sliding_window=True)
