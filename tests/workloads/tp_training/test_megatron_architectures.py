"""Megatron-Core's model computes what Hugging Face's does, for every architecture that it is said to, and is trained
for no other."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.workloads import tp_training
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.language_model import ARCHITECTURES, Architecture
from tests.composed import TINY_OPTIONS, composed, tp_point
from tests.processes import run_ranks
from tests.workloads.tp_training.stacks import Trained, differences, train_points

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")

SAME = [name for name, known in sorted(ARCHITECTURES.items()) if known.megatron]
PLAIN: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2},
    **{"vocab_size": 333, "rms_norm_eps": 1e-3, "initializer_range": 0.05},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": {"num_key_value_heads": 2, "rope_theta": 500.0},
    "wide heads, tied": {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    "as many keys as queries": {"num_key_value_heads": 4, "sliding_window": 4096},
}
"""Of config.json; large enough an epsilon and weights that no difference is lost."""
WITHIN = 3e-4
"""Of gradient norms: five steps at a high rate amplify how a CPU rounds, to 1.3e-4 on some; losses differ by 1e-6."""
NO_GPU = "impl=megatron requires GPUs"
"""Asked last: nothing else is refused."""


def point_of(directory: Path, model_type: str, config: dict[str, Any]) -> Resolved:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, **PLAIN, **config}))
    rate = "tp_training.learning_rate=0.01"
    return composed(*TINY_OPTIONS, "impl=megatron", "tp_size=1", "model=hf", f"model.name={directory}", rate)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Resolved]:
    root = tmp_path_factory.mktemp("configs")
    return {
        f"{name}, {of}": point_of(root / name / str(index), name, config)
        for name in SAME
        for index, (of, config) in enumerate(CONFIGS.items())
    }


@pytest.fixture(scope="module")
def trained(points: dict[str, Resolved]) -> dict[str, Trained]:
    assert {tp_training.refusal(point) for point in points.values()} == {NO_GPU}
    (found,) = run_ranks(1, train_points, points, keep="megatron")
    return found


@pytest.mark.parametrize("name", [f"{name}, {of}" for name in SAME for of in CONFIGS])
def test_it_trains_what_hugging_face_does(name: str, points: dict[str, Resolved], trained: dict[str, Trained]) -> None:
    assert max(differences([trained[name]], points[name])) < WITHIN


def test_another_architecture_is_refused_by_megatron_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "granite", Architecture(more={"embedding_multiplier": 3.0}))
    granite = tp_point("impl=megatron", "model.architecture=granite")
    assert tp_training.refusal(granite) == (
        "impl=megatron supports the architectures llama, mistral, qwen2, qwen3, not granite"
    )


OF_LLAMA = Architecture(megatron=True)
CLAIMED = {
    "gemma2": (OF_LLAMA, "does not compute attn_logit_softcapping=50.0"),
    "granite": (OF_LLAMA, "does not compute attention_multiplier=1.0"),
    "cohere": (OF_LLAMA, "does not compute layer_norm_eps=1e-05"),
    "olmo2": (
        Architecture(layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"), megatron=True),
        "have layer_norms=post_attention_layernorm,post_feedforward_layernorm",
    ),
    "phi3": (
        Architecture(column_parallel=("self_attn.qkv_proj", "mlp.gate_up_proj"), megatron=True),
        "have column_parallel=self_attn.qkv_proj,mlp.gate_up_proj",
    ),
}
"""By model_type what another package says that Megatron-Core computes, and what is said before anything starts."""


@pytest.mark.parametrize("model_type", CLAIMED)
def test_what_another_package_says_of_megatron_is_not_believed(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered, reason = CLAIMED[model_type]
    monkeypatch.setitem(ARCHITECTURES, model_type, registered)
    point = point_of(tmp_path, model_type, {"num_key_value_heads": 2})
    assert reason in (tp_training.refusal(point) or "")
