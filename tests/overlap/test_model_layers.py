"""What is said of models whose layers are not all dense."""

from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest
from transformers import AutoConfig

from overlap_sweep.config import Model, ModelLayers, ResolvedModel
from overlap_sweep.overlap import model_forms, models
from overlap_sweep.overlap.model_forms import sizes_of
from overlap_sweep.overlap.models import applies_to, kind_to_prove, layers_with, not_overlapped
from overlap_sweep.overlap.space import OPERATORS


def model_of(model_type: str, **fields: Any) -> ResolvedModel:
    return sizes_of(AutoConfig.for_model(model_type, num_hidden_layers=8, **fields), "it")


def overlapped(model: ResolvedModel) -> list[str]:
    return [operator for operator in OPERATORS if not not_overlapped(model, operator)]


DENSE = [*OPERATORS]
ALL = dict.fromkeys(OPERATORS, 1)


@pytest.mark.parametrize(
    ("model", "tuned", "layers", "kind"),
    [
        (model_of("llama"), DENSE, ALL, "transformer_layer"),
        (model_of("mixtral"), ["qkv", "proj"], {"qkv": 8, "proj": 8}, "multihead_attention"),
        (model_of("glm4_moe"), DENSE, {"qkv": 8, "proj": 8, "fc1": 1, "fc2": 1}, "multihead_attention"),
        (
            model_of("llama4_text", interleave_moe_layer_step=2),
            DENSE,
            {"qkv": 8, "proj": 8, "fc1": 4, "fc2": 4},
            "transformer_layer",
        ),
        (model_of("olmo_hybrid"), ["fc1", "fc2"], {"fc1": 8, "fc2": 8}, "layernorm_mlp"),
        # It runs the proj of the first layer with overlap, and nothing after it.
        (model_of("deepseek_v3"), [], {"proj": 8, "fc1": 3, "fc2": 3}, None),
        (model_of("qwen3_next"), [], {}, None),
    ],
    ids=lambda value: "",
)
def test_what_of_a_model_is_tuned_and_where_it_is_proven(
    model: ResolvedModel, tuned: list[str], layers: dict[str, int], kind: str | None
) -> None:
    assert (overlapped(model), layers_with(model), kind_to_prove(model)) == (tuned, layers, kind)


def test_every_operator_of_latent_attention_has_its_reason_and_its_sizes() -> None:
    reasons = {operator: not_overlapped(model_of("deepseek_v3"), operator) for operator in OPERATORS}
    sizes = {"qkv": "q_up_proj 1536 -> 24576", "proj": "16384 -> 7168", "fc1": "7168 -> 36864", "fc2": "18432 -> 7168"}
    for operator, reason in reasons.items():
        assert str(reason).startswith(f"{operator}: ")
        assert sizes[operator] in str(reason)
    assert "first layer of each pipeline stage" in str(reasons["proj"])


def test_the_layers_that_a_file_applies_to() -> None:
    assert applies_to(model_of("llama"), OPERATORS) == []
    attention, dense, experts, shared = applies_to(model_of("glm4_moe"), OPERATORS)
    assert (attention, dense) == (
        "Applies to the attention (qkv, proj) of all 8 layers.",
        "Applies to the dense MLP (fc1, fc2) of 1 of 8 layers.",
    )
    assert ("experts" in experts, "1408" in shared) == (True, True)
    # Only what was tuned; without shared experts no more is said.
    assert len(applies_to(model_of("mixtral"), ["qkv"])) == 2
    experts = Model(name="it", hidden_size=64, num_attention_heads=4, num_experts=4)
    assert applies_to(model_forms.resolve(experts), ["proj"])[0] == "Applies to the attention (proj) of all layers."


def test_how_many_layers_a_model_by_sizes_has_may_be_unknown() -> None:
    latent = Model(name="it", hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, gated_mlp=True)
    ranks = {"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    model = model_forms.resolve(replace(latent, **ranks))
    assert model.layers == ModelLayers(None, None)
    assert msgspec.convert(asdict(model), ResolvedModel) == model
    assert (models.mixed(model), layers_with(model)) == (None, {"proj": 1, "fc1": 1, "fc2": 1})
