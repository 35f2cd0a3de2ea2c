"""The model that every stack trains: its architecture, initial weights and batches; and what a stack refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.workloads import tp_training
from overlap_sweep.workloads.tp_training import fsdp_dtensor, hugging_face, run
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.hugging_face import vocab_parallel_cross_entropy
from overlap_sweep.workloads.tp_training.language_model import ARCHITECTURES, Architecture, architecture
from overlap_sweep.workloads.tp_training.run import initial_weights, token_batches
from tests.composed import tp_point
from tests.workloads.tp_training.stacks import FUSED, config_point, whole_model

ALONE = Ranks(0, 1, torch.device("cpu"))
QUERY = "model.layers.0.self_attn.q_proj.weight"


def from_meta(point: Resolved) -> Any:
    """The whole model as implementations build it."""
    of = architecture(point.language_model["model_type"])
    model = hugging_face.build_on_meta(point)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    hugging_face.tie_weights(model, of, point.trained)
    hugging_face.restore_buffers(model, of, ALONE.device)
    draw = initial_weights(point, ALONE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape))
    return model


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in ARCHITECTURES), ("qwen3", "eager")])
def test_from_meta_it_is_the_model_that_hugging_face_makes_in_parts_that_can_be_cut(name: str, attention: str) -> None:
    tied = f"model.tie_word_embeddings={str(attention == 'eager').lower()}"
    point = tp_point(f"model.architecture={name}", f"tp_training.attn_impl={attention}", tied)
    tokens = token_batches(point, ALONE, 0)[0][0]
    theirs: Any = whole_model(point)
    mine, of = from_meta(point), architecture(name)
    assert torch.allclose(mine(tokens).logits, theirs(tokens).logits, atol=1e-6)
    assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == (attention == "eager")
    names = [each for each, _ in theirs.named_parameters(remove_duplicate=False)]
    of_layer = [each.removeprefix(f"{of.layers}.0.") for each in names if each.startswith(f"{of.layers}.0.")]
    parts = (*of.column_parallel, *of.row_parallel, *of.layer_norms, *of.head_norms)
    assert {each.rpartition(".")[0] for each in of_layer} == set(parts)
    assert ("self_attn.q_proj.bias" in of_layer) == of.qkv_bias
    outside = {each for each in names if not each.startswith(of.layers)}
    assert outside == {f"{part}.weight" for part in (of.embedding, of.final_norm, of.output)}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_is_kept(attention: str) -> None:
    point = tp_point("model.architecture=mistral", f"tp_training.attn_impl={attention}")
    narrow = replace(point, language_model={**point.language_model, "sliding_window": 4})
    tokens = token_batches(point, ALONE, 0)[0][0]
    theirs: Any = whole_model(narrow)
    assert torch.allclose(from_meta(narrow)(tokens).logits, theirs(tokens).logits, atol=1e-6)
    assert not torch.allclose(from_meta(point)(tokens).logits, theirs(tokens).logits, atol=1e-3)


def test_nothing_of_a_config_is_lost_but_dropout(tmp_path: Path) -> None:
    # Not at once: it takes more than a second.
    from transformers import AutoConfig

    point = config_point(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    trained = AutoConfig.for_model(**point.language_model).to_dict()
    assert theirs["mlp_bias"]
    differing = {name for name in theirs if trained[name] != theirs[name]}
    assert differing == {"attention_dropout", "architectures", "dtype", "pad_token_id", "_name_or_path"}
    assert trained["attention_dropout"] == 0.0


def drawn(name: str, *shape: int, of_rank: Ranks = ALONE, point: Resolved | None = None) -> Tensor:
    return initial_weights(point or tp_point(), of_rank)(name, shape)


def test_weights_are_those_of_a_language_model_and_all_ranks_draw_the_same_of_each_name() -> None:
    weight = drawn(QUERY, 512, 512)
    assert weight.dtype == torch.float32
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(weight.mean().item()) < 1e-3
    assert torch.equal(drawn("model.norm.weight", 64), torch.ones(64))
    assert not drawn("model.layers.0.self_attn.q_proj.bias", 64).any()
    assert torch.equal(weight, drawn(QUERY, 512, 512, of_rank=Ranks(1, 2, torch.device("cpu"))))
    assert not torch.equal(weight, drawn(QUERY.replace("0", "1"), 512, 512))
    assert not torch.equal(weight, drawn(QUERY, 512, 512, point=tp_point("tp_training.seed=43")))


def test_the_padding_is_zero_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an architecture calls its vocabulary."""
    monkeypatch.setitem(ARCHITECTURES, "renamed", Architecture(embedding="model.wte", output="head"))
    point = tp_point()
    point.language_model["model_type"] = "renamed"
    for name in ("model.wte.weight", "head.weight"):
        whole, padded, more = (drawn(name, rows, 8, point=point) for rows in (1019, 1024, 1056))
        assert whole.all(dim=1).any()
        assert not padded[1019:].any()
        assert torch.equal(padded[:1019], whole)
        assert torch.equal(more[:1019], whole)


def test_batches_are_of_the_data_parallel_rank() -> None:
    mine, same, other = (token_batches(tp_point(), ALONE, dp_rank) for dp_rank in (0, 0, 1))
    of_other_seed = token_batches(tp_point("tp_training.seed=43"), ALONE, 0)
    assert torch.equal(mine[3][0], same[3][0])
    assert not torch.equal(mine[3][0], other[3][0])
    assert not torch.equal(mine[3][0], of_other_seed[3][0])
    assert not torch.equal(mine[3][0], mine[4][0])
    assert torch.equal(mine[3][0][:, 1:], mine[3][1][:, :-1])
    assert mine[3][0].min() >= 0
    assert mine[3][1].max() < 1019


def test_the_loss_leaves_logits_as_they_are() -> None:
    logits = torch.randn(4, 24)
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), 20, None)
    assert torch.equal(logits, before)


def test_async_tp_needs_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(Refused, match="requires PyTorch with NCCL"):
        run.load("async_tp")(tp_point("impl=async_tp"), ALONE, None)


def test_async_tp_warns_where_nothing_was_fused() -> None:
    found = fsdp_dtensor.Collectives()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "0"))
    gathered = graph.call_function(
        torch.ops.symm_mem.fused_all_gather_matmul.default, (x, [x], 0, "0"), {"return_A": False}
    )
    found.count(graph)
    facts = found.facts()
    assert facts.details == {
        **{FUSED[0]: 1, FUSED[1]: 0, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 0, "compiled_graphs": 1}
    }
    assert facts.warnings == [
        "async_tp found no fused_matmul_reduce_scatter in the layers' graphs, so that communication is not overlapped."
    ]
    # Or it might be gathered by multicast.
    assert gathered.kwargs["return_A"]


NO_GPU = "impl=megatron requires GPUs"
"""What is said where nothing else is wrong."""
ROPE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0}


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("qwen3", {}, NO_GPU),
        ("qwen3", {"rope_parameters": ROPE}, "rotary embedding"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("mistral", {"sliding_window": 8}, "sliding_window=8 is shorter"),
        ("mistral", {"sliding_window": 16}, NO_GPU),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": False}, NO_GPU),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, "sliding_window=8"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types=linear_attention"),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "default"}}, "factor=8.0"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"num_local_experts": 8}, "does not compute num_local_experts=8"),
        ("llama", {"kv_lora_rank": 512}, "does not compute kv_lora_rank=512"),
        ("llama", {"use_parallel_residual": True}, "does not compute use_parallel_residual=True"),
        ("llama", {"use_qk_norm": False, "final_logit_softcapping": None}, NO_GPU),
    ],
)
def test_megatron_refuses_what_it_would_compute_differently(
    architecture: str, fields: dict[str, Any], reason: str
) -> None:
    point = tp_point("impl=megatron", f"model.architecture={architecture}")
    point.language_model.update(fields)
    assert reason in (tp_training.refusal(point) or "")


SETTING = {"method": "ring_exchange"}


@pytest.mark.parametrize(
    ("slots", "switches", "changes", "reason"),
    [
        ({"fc2_fprop": SETTING}, {}, {}, ""),
        ({"fc2_fprop": SETTING}, {}, {"tp_size": 3}, ""),
        ({"fc1_dgrad": SETTING}, {"tp_comm_overlap_rs_dgrad": True}, {}, "qkv_dgrad is not set to"),
        ({"fc2_fprop": SETTING}, {}, {"sequence_parallel": False}, "requires tp_training.sequence_parallel=true"),
        # Nothing is overlapped.
        ({}, {"tp_comm_overlap": False}, {"precision": "fp16"}, ""),
    ],
)
def test_megatron_refuses_a_tuned_file_that_userbuffers_cannot_do(
    slots: dict[str, Any],
    switches: dict[str, bool],
    changes: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tp_training, "unusable", lambda *_: None)
    # Divisible by two and three ranks.
    point = tp_point("impl=megatron", *(f"model.{name}=6" for name in ("num_attention_heads", "num_kv_heads")))
    point.tp_training.seq_length, point.runtime.device, point.precision = 48, "cuda", "bf16"
    for name, value in changes.items():
        setattr(point.tp_training if hasattr(point.tp_training, name) else point, name, value)
    refused = tp_training.refusal(replace(point, overlap_cfg=OverlapConfig(slots, SWITCH_DEFAULTS | switches))) or ""
    assert reason in refused if reason else not refused
