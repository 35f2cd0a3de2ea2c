"""An architecture that another package brings: the example of docs/tp_training.md, installed as pip leaves it."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from overlap_sweep.overlap.model_forms import ARCHITECTURES_GROUP
from tests.sweeps import ROOT, Launch

pytestmark = pytest.mark.end_to_end

CONFIG = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "vocab_size": 333, "pad_token_id": 0, "embedding_multiplier": 3.0},
}


def fenced(language: str) -> str:
    """The only block in that language of the document's section."""
    section = (ROOT / "docs" / "tp_training.md").read_text().partition("\n## A model of your own\n")[2]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    (block,) = [text for of_language, text in blocks if of_language == language]
    return str(block)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder, project = tmp_path / "site-packages", tomllib.loads(fenced("toml"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = {**project["entry-points"][ARCHITECTURES_GROUP], "helium": "my_models:HELIUM", "glm": "my_models:CONFIG"}
    (info / "entry_points.txt").write_text(
        "\n".join([f"[{ARCHITECTURES_GROUP}]", *(f"{k} = {v}" for k, v in points.items())])
    )
    (folder / "my_models.py").write_text(fenced("python") + "CONFIG = {}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def test_it_is_trained_once_it_is_installed_and_a_broken_one_is_told_in_a_line(
    environment: dict[str, str], tmp_path: Path
) -> None:
    options = ("workload=tp_training", "runtime.device=cpu", "profile=none", "tp_size=1", "model=hf")
    steps = ("tp_training.seq_length=16", "tp_training.num_training_steps=3", "tp_training.warmup_steps=1")

    def config(model_type: str) -> str:
        (tmp_path / model_type).mkdir()
        (tmp_path / model_type / "config.json").write_text(json.dumps({"model_type": model_type, **CONFIG}))
        return f"model.name={tmp_path / model_type}"

    launch = Launch(tmp_path / "sweep", environment)
    granite = config("granite")
    done = launch.run("-m", *options, *steps, granite, "impl=fsdp_dtensor,megatron")
    assert done.returncode == 0, done.stderr
    trained, refused = sorted(launch.results().values(), key=lambda result: result.point["impl"])
    assert (trained.status, refused.status) == ("ok", "skipped")
    assert trained.point["language_model"]["embedding_multiplier"] == 3.0
    assert "impl=megatron supports the architectures llama, mistral, qwen2, qwen3, not granite" in refused.error
    for given, said in {
        granite: "model.architecture=granite cannot be trained; choose one of llama, mistral, qwen2, qwen3, or add it",
        config("helium"): "model.architecture=helium cannot be loaded from my_models:HELIUM (AttributeError: module",
        config("glm"): "model.architecture=glm: my_models:CONFIG is no Architecture; fix or uninstall that package.",
    }.items():
        wrong = Launch(tmp_path / "wrong", {} if given == granite else environment)
        done = wrong.run(*options, given)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {said}"), done.stderr
        assert done.stderr.count("\n") == 1
