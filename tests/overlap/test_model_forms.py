"""Sizes read from a config are those of transformers' own model of it, for every architecture with a causal language
model: right, or refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from overlap_sweep.config import ResolvedModel
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import model_forms, models
from overlap_sweep.overlap.model_forms import FORMS, sizes_of
from overlap_sweep.overlap.models import ATTENTION
from overlap_sweep.overlap.space import OPERATORS
from tests.module_shapes import Experts, Operator, experts_of, latent_of, layers_of, norms_of, operators_of

LAYERS = 2
SEVERAL_KINDS = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "flint", "glm_moe_dsa", "olmo_hybrid", "qwen3_5_text"), 4),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), 4),
}
"""In how many layers all kinds that it has are."""
NO_DEFAULT = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
}
"""What their configs must say."""
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": LAYERS, "attention_types": [[["global", "local"], LAYERS // 2]]},
}


def config_of(model_type: str, **changes: Any) -> Any:
    few = FEW_LAYERS.get(model_type, {"num_hidden_layers": SEVERAL_KINDS.get(model_type, LAYERS)})
    return AutoConfig.for_model(model_type, **{**few, **NO_DEFAULT.get(model_type, {}), **changes})


def wrong(config: Any) -> dict[str, str]:
    """By operator what is read and what the model has, where they differ. An operator is also wrong that is refused
    although layers have it in the dense form: all of them, or for the MLP any."""
    try:
        read = sizes_of(config, "it")
    except UserError:
        return {}
    layers = layers_of(config)
    latent, found = latent_of(layers), {}
    by_layer = [operators_of([layer]) for layer in layers]
    for operator in OPERATORS:
        truth = set[Operator | str]().union(*(layer_operators[operator] for layer_operators in by_layer))
        if operator == "proj" and latent:
            continue
        dense = {layer_operators for layer_operators in truth if isinstance(layer_operators, Operator)}
        has_it = dense == truth if operator in ATTENTION else bool(dense)
        said: Any = read.instead.get(operator)
        if not said:
            shape = models.linear_shape(read, operator, 1, 1)
            said = Operator(shape.in_features, shape.out_features)
        if bool(read.instead.get(operator)) == has_it or not (read.instead.get(operator) or dense == {said}):
            found[operator] = f"{said} is {sorted(map(str, truth))}"
    if latent:
        projections = models.latent_projections(read)
        proj = models.linear_shape(read, "proj", 1, 1)
        said = tuple(sorted({**projections, "proj": (proj.in_features, proj.out_features)}.items()))
        if latent != {said}:
            found["latent"] = f"{said} is {latent}"
    dense_layers = sum(isinstance(*layer_operators["fc2"], Operator) for layer_operators in by_layer)
    if dense_layers != (read.layers.dense_mlp if read.layers else len(layers)):
        found["layers"] = f"{read.layers} is {dense_layers} of {len(layers)}"
    if (norms := norms_of(layers)) and norms != {read.normalization}:
        found["normalization"] = f"{read.normalization} is {norms}"
    sizes = read.expert_ffn_hidden_size, read.shared_expert_ffn_hidden_size
    experts = {Experts(read.num_experts, *sizes)} if read.num_experts else set()
    if experts_of(layers) not in (experts, set()):
        found["experts"] = f"{experts} is {experts_of(layers)}"
    return found


def cases(model_type: str) -> Iterator[dict[str, Any]]:
    """Changes of the architecture's small config: sizes, also in fields that it ignores, and each switch of its own."""
    yield {}
    for sizes in SIZES:
        if (model_type, sizes.get("num_key_value_heads")) not in NO_SUCH:
            yield {**SIZES_OF_ALL, **sizes}
    if FORMS[model_type].expert:
        yield SOME_DENSE
    for name, value in config_of(model_type).to_dict().items():
        if isinstance(value, bool) and name not in EVERY_CONFIG:
            yield {name: not value}


SIZES_OF_ALL = {"hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 320}
SIZES: list[dict[str, Any]] = [
    {"num_key_value_heads": 1, "num_kv_heads": 2, "multi_query": True, "n_inner": 352, "ffn_dim": 288},
    {
        **{"num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 96, "shared_intermediate_size": 224},
        "shared_expert_intermediate_size": 256,
        **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 3),
    },
]
SOME_DENSE: dict[str, Any] = {
    **{"num_hidden_layers": 5, "first_k_dense_replace": 2, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2, "moe_layers": [1, 3]},
    **{"intermediate_size_mlp": 416, "prefix_dense_intermediate_size": 448},
}
"""A mixture with dense layers, as each architecture says it; it ignores the others' fields."""
NO_SUCH = {("diffllama", 1)}
"""What transformers makes no model of."""
EVERY_CONFIG = {*PreTrainedConfig().to_dict(), "use_cache", "tie_word_embeddings"}


@pytest.mark.parametrize("model_type", sorted(FORMS))
def test_what_is_read_is_what_the_model_has(model_type: str) -> None:
    found = {}
    for changes in cases(model_type):
        try:
            config = config_of(model_type, **changes)
        except StrictDataclassError:
            # transformers has no such model.
            continue
        if differs := wrong(config):
            found[str(changes)] = differs
    assert found == {}


IMAGES_AND_TEXT = {
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "got_ocr2": "qwen2",
    "llama4": "llama4_text",
    "moss_transcribe_diarize": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Sized as their language models."""
UNKNOWN = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FORMS) - set(IMAGES_AND_TEXT))


def read(directory: Path, model_type: str) -> ResolvedModel:
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return sizes_of(model_forms.read_hf_config(str(directory)), "it")


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_what_is_on_no_list_is_refused_in_one_line(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(is not supported|not a config that transformers knows).*; give [^\n]*$"):
        read(tmp_path, model_type)


@pytest.mark.parametrize("model_type", IMAGES_AND_TEXT)
def test_a_model_of_images_and_text_is_sized_as_its_language_model(model_type: str, tmp_path: Path) -> None:
    text = AutoConfig.for_model(model_type).get_text_config()
    assert text.model_type == IMAGES_AND_TEXT[model_type]
    assert read(tmp_path, model_type) == sizes_of(text, "it")
