"""Architectures and implementations that other packages bring: the examples of docs/tp_training.md, installed as pip
leaves them."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from overlap_sweep.overlap.model_forms import ARCHITECTURES_GROUP
from overlap_sweep.workloads.tp_training.config import IMPLEMENTATIONS_GROUP
from tests.sweeps import ROOT, Launch

pytestmark = pytest.mark.end_to_end

CONFIG = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "vocab_size": 333, "pad_token_id": 0, "embedding_multiplier": 3.0},
}


def fenced(title: str, language: str) -> str:
    """The only block in that language of the document's section."""
    section = (ROOT / "docs" / "tp_training.md").read_text().partition(f"\n## {title}\n")[2]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    (block,) = [text for of_language, text in blocks if of_language == language]
    return str(block)


def installed(folder: Path, title: str, group: str, more_code: str = "", **more: str) -> dict[str, str]:
    """The environment in which the section's package is installed."""
    project = tomllib.loads(fenced(title, "toml"))["project"]
    module = project["name"].replace("-", "_")
    info = folder / f"{module}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = {**project["entry-points"][group], **more}
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in points.items())]))
    (folder / f"{module}.py").write_text(fenced(title, "python") + more_code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    broken = {"helium": "my_models:HELIUM", "glm": "my_models:CONFIG"}
    folder = tmp_path / "site-packages"
    return installed(folder, "A model of your own", ARCHITECTURES_GROUP, "CONFIG = {}\n", **broken)


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
    trained, refused = sorted(launch.results().values(), key=lambda result: result.recorded["impl"])
    assert (trained.status, refused.status) == ("ok", "skipped")
    assert trained.recorded["language_model"]["embedding_multiplier"] == 3.0
    assert "impl=megatron supports the architectures llama, mistral, qwen2, qwen3, not granite" in refused.error
    for given, said in {
        granite: "model.architecture=granite cannot be trained; choose one of llama, mistral, qwen2, qwen3, or add it",
        config("helium"): "model.architecture=helium cannot be loaded from my_models:HELIUM (AttributeError: module",
        config("glm"): "model.architecture=glm: my_models:CONFIG is not an Architecture; fix or remove that package.",
    }.items():
        wrong = Launch(tmp_path / "wrong", {} if given == granite else environment)
        done = wrong.run(*options, given)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {said}"), done.stderr
        assert done.stderr.count("\n") == 1


def test_another_implementation_is_compared_with_ours(tmp_path: Path) -> None:
    environment = installed(
        tmp_path / "site-packages", "A stack of your own", IMPLEMENTATIONS_GROUP, broken="my_stacks:Broken"
    )
    launch, output = Launch(tmp_path / "sweep", environment), tmp_path / "results"
    options = ("workload=tp_training", "runtime.device=cpu", "profile=none", "tp_training.seq_length=16")
    steps = ("tp_training.num_training_steps=3", "tp_training.warmup_steps=1")
    done = launch.run("-m", *options, *steps, "impl=fsdp_dtensor,replicas,broken", "tp_size=1", "dp_size=2")
    assert done.returncode == 0, done.stderr
    assert "The losses agree" in done.stdout
    found = {result.recorded["impl"]: result for result in launch.results().values()}
    assert {impl: result.status for impl, result in found.items()} == {
        **{"fsdp_dtensor": "ok", "replicas": "ok", "broken": "skipped"}
    }
    assert found["replicas"].recorded["libraries"] == {"my-stacks": "1"}
    assert "impl=broken cannot be loaded from my_stacks:Broken (AttributeError: module" in found["broken"].reason
    written = {path.name for path in launch.directory.glob("results_*.json")}
    assert written == {f"results_{impl}_tp1_dp2.json" for impl in ("fsdp_dtensor", "replicas")}
    # Of a single point the output directory has it, too.
    command = [sys.executable, "launch.py", *options, *steps, "impl=replicas", f"tp_training.output_dir={output}"]
    subprocess.run([*command, "tp_size=1"], cwd=ROOT, env={**os.environ, **environment}, check=True)
    (point,) = output.glob("*/results_replicas_tp1_dp1.json")
    assert (output / point.name).read_bytes() == point.read_bytes()
    refused = Launch(tmp_path / "refused").run("workload=tp_training", "impl=replicas")
    assert refused.stderr.startswith("error: impl=replicas is not known; choose one of autotp, fsdp_dtensor, async_tp,")
