import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from overlap_sweep.config import OF_EXPERTS, SIZES, Model
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import model_forms, models
from overlap_sweep.overlap.model_forms import sizes_of
from overlap_sweep.overlap.models import layers_with

CONF = Path(__file__).parent.parent.parent / "conf" / "model"


def conf(name: str) -> Model:
    return Model(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))


# (in, out) of the unsharded operators, from the published configurations.
SHAPES = {
    "qwen3_0_6b": {"qkv": (1024, 4096), "proj": (2048, 1024), "fc1": (1024, 6144), "fc2": (3072, 1024)},
    "llama3_8b": {"qkv": (4096, 6144), "proj": (4096, 4096), "fc1": (4096, 28672), "fc2": (14336, 4096)},
    "llama3_70b": {"qkv": (8192, 10240), "proj": (8192, 8192), "fc1": (8192, 57344), "fc2": (28672, 8192)},
    "llama3_405b": {"qkv": (16384, 18432), "proj": (16384, 16384), "fc1": (16384, 106496), "fc2": (53248, 16384)},
    "qwen3_30b_a3b": {"qkv": (2048, 5120), "proj": (4096, 2048)},
    "mixtral_8x7b": {"qkv": (4096, 6144), "proj": (4096, 4096)},
    "deepseek_v3": {"proj": (16384, 7168), "fc1": (7168, 36864), "fc2": (18432, 7168)},
    "gpt3_175b": {"qkv": (12288, 36864), "proj": (12288, 12288), "fc1": (12288, 49152), "fc2": (49152, 12288)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_operator_shapes(name: str) -> None:
    model = model_forms.resolve(conf(name))
    for operator, (in_features, out_features) in SHAPES[name].items():
        shape = models.linear_shape(model, operator, 8192, 1)
        assert (shape.in_features, shape.out_features) == (in_features, out_features)
    assert {name for name in models.OPERATORS if not models.lacks(model, [name])} == {*SHAPES[name]}


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("qwen3_30b_a3b", "qwen3_moe"), ("mixtral_8x7b", "mixtral"), ("deepseek_v3", "deepseek_v3")],
)
def test_a_preset_and_the_architecture_of_the_same_model_have_the_same_layers(name: str, model_type: str) -> None:
    published = {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128} if "qwen3" in name else {}
    read = sizes_of(AutoConfig.for_model(model_type, **published), name)
    preset = model_forms.resolve(conf(name))
    sizes = {key for key, value in vars(read).items() if value is not None} - {"instead", "num_dense_layers"}
    assert {key: getattr(preset, key) for key in sizes} == {key: getattr(read, key) for key in sizes}
    assert preset.instead.keys() == read.instead.keys()
    # Megatron-Core's sizes of the same linears.
    latent = {"q_down_proj": (7168, 1536), "q_up_proj": (1536, 24576), "kv_down_proj": (7168, 576)}
    expected = {**latent, "kv_up_proj": (512, 32768)} if name == "deepseek_v3" else {}
    assert models.latent_projections(preset) == expected


def test_sharded_shapes() -> None:
    column = models.LinearShape("column", 64, 12, 20, 4)
    assert (column.input_shape, column.weight_shape, column.output_shape) == ((16, 12), (5, 12), (64, 5))
    assert (column.local().input_shape, column.local().output_shape) == ((64, 12), (64, 5))
    row = models.LinearShape("row", 64, 12, 20, 4)
    assert (row.input_shape, row.weight_shape, row.output_shape) == ((64, 3), (20, 3), (16, 20))
    assert (row.local().input_shape, row.local().output_shape) == ((64, 3), (64, 20))


@pytest.mark.parametrize(
    ("sizes", "operator", "tokens", "tp_size", "says"),
    [
        ({}, "fc1", 8192, 5, "6144 outputs are not divisible by tp_size=5"),
        ({}, "fc2", 100, 8, "100 tokens are not divisible by tp_size=8"),
        ({}, "proj", 8192, 3, "16 attention heads are not divisible by tp_size=3"),
        ({"num_kv_heads": 3}, "qkv", 64, 4, "16 attention heads are not divisible by 3 key-value heads"),
        ({"num_kv_heads": 2}, "qkv", 64, 4, "2 key-value heads are not divisible by tp_size=4"),
        ({"ffn_hidden_size": 3074}, "fc1", 64, 4, "ffn_hidden_size=3074 is not divisible by tp_size=4"),
    ],
)
def test_sizes_that_do_not_divide(sizes: dict[str, Any], operator: str, tokens: int, tp_size: int, says: str) -> None:
    model = model_forms.resolve(replace(conf("qwen3_0_6b"), **sizes))
    assert models.refusal(model, operator, tokens, tp_size) == f"{operator}: {says}"


QWEN3 = {
    **{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "num_hidden_layers": 28},
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory / "config.json"


def hf(name: str | Path, **sizes: Any) -> Model:
    return Model(name=str(name), source="hf", **sizes)


def test_hf_config_file_and_folder(tmp_path: Path) -> None:
    """A size that is given wins."""
    expected = model_forms.resolve(conf("qwen3_0_6b"))
    config = write_config(tmp_path, QWEN3)
    for source in (config, tmp_path):
        read = model_forms.resolve(hf(source))
        names = (*SIZES, "num_layers")
        assert [getattr(read, size) for size in names] == [getattr(expected, size) for size in names]
    assert model_forms.resolve(hf(config, ffn_hidden_size=4096)).ffn_hidden_size == 4096


QWEN3_MOE = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
}


def test_operators_that_a_model_has_not_are_refused_and_the_others_are_sized(tmp_path: Path) -> None:
    model = model_forms.resolve(hf(write_config(tmp_path, QWEN3_MOE)))
    assert (model.ffn_hidden_size, model.gated_mlp) == (None, None)
    assert (model.normalization, model.bias) == ("RMSNorm", False)
    assert [models.refusal(model, operator, 8192, 4) for operator in ("qkv", "proj")] == [None, None]
    assert models.linear_shape(model, "qkv", 8192, 1).out_features == (32 + 2 * 4) * 128
    for operator in ("fc1", "fc2"):
        said = (
            f"{operator}: qwen3_moe has experts instead of one dense MLP; sweep operator=qkv,proj, "
            "or give model.ffn_hidden_size and model.gated_mlp"
        )
        assert models.refusal(model, operator, 8192, 4) == said
        with pytest.raises(UserError) as error:
            models.linear_shape(model, operator, 8192, 1)
        assert str(error.value) == f"{said}."
    assert models.lacks(model) is not None
    assert {name: getattr(model, name) for name in OF_EXPERTS} == {
        **{"num_experts": 128, "experts_per_token": 8, "expert_ffn_hidden_size": 768, "gated_experts": True},
        **{"shared_expert_ffn_hidden_size": None, "num_dense_layers": 0},
    }


def test_a_model_of_experts_by_sizes_alone() -> None:
    sizes = Model(name="mixture", hidden_size=2048, num_attention_heads=32, num_kv_heads=4, head_dim=128)
    mixture = replace(sizes, num_experts=128, experts_per_token=8, expert_ffn_hidden_size=768)
    model = model_forms.resolve(mixture)
    assert (model.gated_experts, model.gated_mlp, model.normalization) == (True, None, "RMSNorm")
    assert str(models.lacks(model, ["fc1"])).startswith("fc1: mixture has experts instead of one dense MLP; ")
    assert models.refusal(model, "qkv", 64, 4) is None
    left = models.without_experts(model)
    assert {getattr(left, name) for name in OF_EXPERTS} == {None}


def test_sizes_that_are_given_are_swept_whatever_the_model_has(tmp_path: Path) -> None:
    config = write_config(tmp_path, QWEN3_MOE)
    model = model_forms.resolve(hf(config, ffn_hidden_size=768, gated_mlp=True))
    assert models.lacks(model) is None
    assert models.linear_shape(model, "fc1", 8192, 1).out_features == 2 * 768
    assert layers_with(model) == dict.fromkeys(models.OPERATORS, 24)
    with pytest.raises(UserError, match="has no gated_mlp; give model"):
        model_forms.resolve(hf(config, ffn_hidden_size=768))
    latent = write_config(tmp_path, {"model_type": "deepseek_v3"})
    with pytest.raises(UserError, match="has no num_kv_heads"):
        model_forms.resolve(hf(latent, head_dim=128))
    assert models.lacks(model_forms.resolve(hf(latent, head_dim=128, num_kv_heads=128)), ["qkv", "proj"]) is None
    some_dense = write_config(tmp_path, {**QWEN3_MOE, "mlp_only_layers": [0]})
    assert "experts in 23 of 24 layers" in str(models.mixed(model_forms.resolve(hf(some_dense))))
    assert models.mixed(model_forms.resolve(hf(some_dense, ffn_hidden_size=768))) is None


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_it_fails_soon(monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    import huggingface_hub

    # Nothing answers on the discard port of this machine, whether or not it has a network.
    for module in (huggingface_hub.constants, huggingface_hub.file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)

    start = time.monotonic()
    with pytest.raises(UserError, match="local folder"):
        model_forms.resolve(hf("nobody/no-such-model"))
    # transformers alone would try again for 23 s.
    assert time.monotonic() - start < 15.0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere/config.json", "does not exist"),
        ("a/b/c/d", "nor a Hugging Face name"),
        ("broken", "not a config"),
        ("empty", "without a config.json"),
        ("mamba", "the architecture mamba is not supported; give sizes"),
        ("musicgen", "not a config that transformers knows .Multiple valid text configs"),
    ],
)
def test_names_of_no_config_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("broken", "empty", "mamba", "musicgen"):
        Path(folder).mkdir()
    Path("broken/config.json").write_text("{")
    write_config(Path("mamba"), {"model_type": "mamba", "hidden_size": 64})
    write_config(Path("musicgen"), {"model_type": "musicgen"})
    with pytest.raises(UserError, match=says):
        model_forms.resolve(hf(name))


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    attacked = tmp_path / "attacked"
    (tmp_path / "evil.py").write_text(f"open({str(attacked)!r}, 'w').close()\nclass Config: pass\n")
    write_config(tmp_path, {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}, "hidden_size": 8})
    with pytest.raises(UserError):
        sizes_of(model_forms.read_hf_config(str(tmp_path)), "it")
    assert not attacked.exists()
