"""Models' sizes, where they are read from, and what of their layers is overlapped."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from overlap_sweep.config import Model
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import model_forms, models
from overlap_sweep.overlap.model_forms import sizes_of
from tests.golden import models as golden
from tests.golden.command_lines import answers
from tests.sweeps import ROOT

ANSWERS = answers(golden.FILE)


@pytest.mark.parametrize("line", ANSWERS)
def test_what_is_said_of_a_models_operators(line: str) -> None:
    assert golden.answer(line) == ANSWERS[line]


def conf(name: str) -> Model:
    return Model(**yaml.safe_load((ROOT / f"conf/model/{name}.yaml").read_text()))


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


def test_sharded_shapes() -> None:
    column = models.LinearShape("column", 64, 12, 20, 4)
    assert (column.input_shape, column.weight_shape, column.output_shape) == ((16, 12), (5, 12), (64, 5))
    assert (column.local().input_shape, column.local().output_shape) == ((64, 12), (64, 5))
    row = models.LinearShape("row", 64, 12, 20, 4)
    assert (row.input_shape, row.weight_shape, row.output_shape) == ((64, 3), (20, 3), (16, 20))
    assert (row.local().input_shape, row.local().output_shape) == ((64, 3), (64, 20))


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory / "config.json"


def hf(name: str | Path, **sizes: Any) -> Model:
    return Model(name=str(name), source="hf", **sizes)


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
        ("musicgen", "not a config that transformers knows .Multiple valid text configs"),
    ],
)
def test_names_of_no_config_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("broken", "empty", "musicgen"):
        Path(folder).mkdir()
    Path("broken/config.json").write_text("{")
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
