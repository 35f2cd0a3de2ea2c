"""Every architecture names the parts of the model that Hugging Face builds, and trains as Hugging Face says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig

from overlap_sweep.errors import UserError
from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import hugging_face
from overlap_sweep.tp_training.architectures import architecture, known
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.initial_weights import initial_weights
from tests.tp_training.stacks import config_point
from tests.tp_training.whole_model import whole_model
from tests.training.points import tp_point

ALONE = Ranks(0, 1, torch.device("cpu"))


def from_meta(point: dict[str, Any]) -> Any:
    """The whole model as implementations build it."""
    of = architecture(point["language_model"]["model_type"])
    model = hugging_face.build_on_meta(point, of)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    hugging_face.tie_weights(model, of)
    hugging_face.restore_buffers(model, of, ALONE.device)
    draw = initial_weights(point, ALONE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape))
    return model


@pytest.mark.parametrize("name", known())
def test_parts_are_those_of_the_model(name: str) -> None:
    point, of = tp_point(f"model.architecture={name}"), architecture(name)
    model = hugging_face.build_on_meta(point, of)
    assert of.model_type == name == point["language_model"]["model_type"]
    assert type(of.part(model, of.embedding)) is nn.Embedding
    assert type(of.part(model, of.output)) is nn.Linear
    layers = hugging_face.decoder_layers(model, of)
    assert len(layers) == point["language_model"]["num_hidden_layers"]
    # Every parameter of a layer belongs to a part that the architecture knows how to cut.
    parts = (*of.column_parallel, *of.row_parallel, *of.layer_norms, *of.head_norms)
    assert {name.rpartition(".")[0] for name, _ in layers[0].named_parameters()} == set(parts)
    assert any(name.endswith("q_proj.bias") for name, _ in layers[0].named_parameters()) == of.qkv_bias
    outside = {name for name, _ in model.named_parameters() if not name.startswith(of.layers)}
    assert outside == {f"{part}.weight" for part in (of.embedding, of.final_norm, of.output)}


def test_adding_one_is_adding_its_file() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(known())
    with pytest.raises(UserError, match=r"model.architecture=gpt5 cannot be trained; choose one of llama, "):
        architecture("gpt5")


@pytest.mark.parametrize("name", known())
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_from_meta_it_is_the_model_that_hugging_face_makes(name: str, attention: str) -> None:
    tied = f"model.tie_word_embeddings={str(attention == 'eager').lower()}"
    point = tp_point(f"model.architecture={name}", f"tp_training.attn_impl={attention}", tied)
    tokens = TokenBatches(point, ALONE, 0)[0].tokens
    theirs: Any = whole_model(point)
    mine = from_meta(point)
    assert torch.allclose(mine(tokens).logits, theirs(tokens).logits, atol=1e-6)
    assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == (attention == "eager")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_is_kept(attention: str) -> None:
    point = tp_point("model.architecture=mistral", f"tp_training.attn_impl={attention}")
    narrow = {**point, "language_model": {**point["language_model"], "sliding_window": 4}}
    tokens = TokenBatches(point, ALONE, 0)[0].tokens
    theirs: Any = whole_model(narrow)
    assert torch.allclose(from_meta(narrow)(tokens).logits, theirs(tokens).logits, atol=1e-6)
    assert not torch.allclose(from_meta(point)(tokens).logits, theirs(tokens).logits, atol=1e-3)


def test_the_loss_is_hugging_faces() -> None:
    """Who shifts the labels itself."""
    model, batch = whole_model(tp_point()), TokenBatches(tp_point(), ALONE, 0)[0]
    whole_text = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)
    theirs = model(whole_text, labels=whole_text).loss
    mine = functional.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_nothing_of_a_config_is_lost_but_dropout(tmp_path: Path) -> None:
    point = config_point(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    trained = AutoConfig.for_model(**point["language_model"]).to_dict()
    assert theirs["mlp_bias"]
    differing = {name for name in theirs if trained[name] != theirs[name]}
    assert differing == {"attention_dropout", "architectures", "dtype", "pad_token_id", "_name_or_path"}
    assert trained["attention_dropout"] == 0.0
