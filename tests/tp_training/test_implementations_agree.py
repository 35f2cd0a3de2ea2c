"""All implementations train the same, also an architecture that is one new file, and what a config.json says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import architectures
from tests.processes import run_ranks
from tests.tp_training.points import TINY, composed, tp_point
from tests.tp_training.whole_model import Trained, train_points, train_whole

ON_A_CPU = ("autotp", "fsdp_dtensor", "megatron")
HUGGING_FACE = ("autotp", "fsdp_dtensor")

GRANITE = '''
"""Llama with factors of its own."""

from overlap_sweep.tp_training.architectures.architecture import Architecture

ARCHITECTURE = Architecture("granite", more={"embedding_multiplier": 3.0, "logits_scaling": 0.5})
'''

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 333},
    **{"rms_norm_eps": 1e-2, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "gelu"},
    **{"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.5, "initializer_range": 0.1},
    **{"rope_theta": 100.0, "pad_token_id": 0, "max_position_embeddings": 64},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    },
}
"""Nothing in it is the default."""


def agrees(mine: Trained, whole: Trained) -> bool:
    assert len(mine.losses) == 5
    assert len({round(loss, 3) for loss in whole.losses}) == 5
    of_losses = max(abs(a - b) for a, b in zip(mine.losses, whole.losses, strict=True))
    of_norms = max(abs(a / b - 1) for a, b in zip(mine.norms, whole.norms, strict=True))
    return of_losses < 1e-4 and of_norms < 1e-3


@pytest.mark.end_to_end
def test_four_ranks_of_every_implementation_train_the_same() -> None:
    more = ("tp_training.gradient_accumulation_steps=2", "tp_training.max_grad_norm=0.3", "tp_training.weight_decay=1")
    points = {impl: tp_point(f"impl={impl}", "dp_size=2", "tp_size=2", *more) for impl in ON_A_CPU}
    whole = train_whole(points["megatron"])
    for impl, point in points.items():
        trained = [of_rank[impl] for of_rank in run_ranks(4, train_points, {impl: point})]
        for rank, of_rank in enumerate(trained):
            assert agrees(of_rank, whole[rank // 2]), (impl, rank)


def _train_with(ranks: Ranks, directory: Path, points: Mapping[str, dict[str, Any]]) -> dict[str, Trained]:
    """Where `directory` has architectures, too."""
    architectures.__path__.append(str(directory))
    return train_points(ranks, points)


@pytest.mark.end_to_end
@pytest.mark.parametrize("impl", HUGGING_FACE)
def test_a_new_architecture_is_a_new_file(impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "granite.py").write_text(GRANITE)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    point = tp_point(f"impl={impl}", "model.architecture=granite")
    assert point["language_model"]["embedding_multiplier"] == 3.0
    (whole,) = train_whole(point)
    assert not agrees(whole, train_whole(tp_point("model.architecture=llama"))[0])
    for of_rank in run_ranks(2, _train_with, tmp_path, {impl: point}):
        assert agrees(of_rank[impl], whole)


@pytest.mark.end_to_end
@pytest.mark.parametrize("impl", HUGGING_FACE)
def test_a_config_is_trained_with_all_that_it_says(impl: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sizes = ("model.hidden_size=", "model.ffn_hidden_size=", "model.num_attention_heads=", "model.num_kv_heads=")
    options = [option for option in TINY if not option.startswith(sizes)]
    point = composed(*options, "model=hf", f"model.name={tmp_path}", f"impl={impl}", "tp_training.learning_rate=0.01")
    (whole,) = train_whole(point)
    for of_rank in run_ranks(2, train_points, {impl: point}):
        assert agrees(of_rank[impl], whole)


def test_nothing_of_a_config_is_lost_but_dropout(tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    unset = (f"model.{name}=null" for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_kv_heads"))
    point = tp_point("model=hf", f"model.name={tmp_path}", *unset)
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    trained = AutoConfig.for_model(**point["language_model"]).to_dict()
    assert theirs["mlp_bias"]
    differing = {name for name in theirs if trained[name] != theirs[name]}
    assert differing == {"attention_dropout", "architectures", "dtype", "pad_token_id", "_name_or_path"}
    assert trained["attention_dropout"] == 0.0
