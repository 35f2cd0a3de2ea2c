"""`tune` and its report: how the command line is made of arguments, and what is said where there is no report."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import overlap_sweep
from overlap_sweep.errors import UserError
from overlap_sweep.tuner.api import CHECKOUT


def test_a_directory_without_a_report_is_an_error(tmp_path: Path) -> None:
    report = overlap_sweep.Report(tmp_path)
    with pytest.raises(UserError, match=r"holds no tuning_report\.json"):
        report.best  # noqa: B018
    assert report.proof == {}


class Command:
    """In place of launch.py: keeps what it was asked to do."""

    def __init__(self, returncode: int = 0) -> None:
        self.returncode, self.arguments = returncode, list[str]()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == [str(CHECKOUT / "launch.py"), "-m", "+experiment=tp_overlap_tuner"]
        self.arguments = command[4:]
        return subprocess.CompletedProcess(command, self.returncode)


def test_every_argument_is_one_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command()
    monkeypatch.setattr("overlap_sweep.tuner.api.subprocess.run", command)
    report = overlap_sweep.tune(
        "llama3_8b",
        tp_size=[2, 4],
        max_token_len=4096,
        operators=["fc1", "qkv"],
        methods=["bulk"],
        min_num_sm=2,
        max_num_sm=16,
        max_points=50,
        max_minutes=2.5,
        precision="fp8_delayed",
        backend="torch",
        presets=["a b.yaml", Path("c_tp{tp}.yaml")],
        prove=False,
        overlap_threshold=0.6,
        tp_scaling_tolerance=0.1,
        output_dir="out/here",
        overrides=["profile=none"],
    )
    assert report.directory == Path("out/here")
    assert command.arguments == [
        *("model=llama3_8b", "max_tp_size=8", "tuner.prove=false", "tp_size=2,4", "operator=fc1,qkv", "method=bulk"),
        *("workload.tokens=4096", "search.min_num_sm=2", "search.max_num_sm=16", "search.max_points=50"),
        *("search.max_minutes=2.5", "precision=fp8_delayed", "backend=torch", "tuner.overlap_threshold=0.6"),
        *("tuner.tp_scaling_tolerance=0.1", 'tuner.presets=["a b.yaml","c_tp{tp}.yaml"]'),
        *('hydra.sweep.dir="out/here"', "profile=none"),
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen3_0_6b", ["model=qwen3_0_6b"]),
        ("Qwen/Qwen3-0.6B", ["model=hf", 'model.name="Qwen/Qwen3-0.6B"']),
        ("/my models, (é)/config.json", ["model=hf", 'model.name="/my models, (é)/config.json"']),
    ],
)
def test_a_model_is_one_of_ours_or_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch, model: str, said: list[str]
) -> None:
    command = Command()
    monkeypatch.setattr("overlap_sweep.tuner.api.subprocess.run", command)
    report = overlap_sweep.tune(model, tp_size=4)
    assert command.arguments[: len(said)] == said
    assert "tp_size=4" in command.arguments
    # What is left open is the experiment's to say.
    assert command.arguments[len(said) :] == [
        *("max_tp_size=8", "tuner.prove=true", "tp_size=4", f'hydra.sweep.dir="{report.directory}"')
    ]
    assert report.directory.parts[0] == "multirun"


def test_what_is_exported_is_offered() -> None:
    assert set(overlap_sweep.__all__) == {"Report", "tune"}
    with pytest.raises(AttributeError, match="no attribute tuner_of_pianos"):
        overlap_sweep.tuner_of_pianos  # noqa: B018
