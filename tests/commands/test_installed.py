"""`overlap-sweep`, the command of an installed package; .ci/wheel uses a real one."""

import subprocess
import sys
from pathlib import Path

import pytest

import overlap_sweep
from overlap_sweep.commands.installed import COMMANDS
from overlap_sweep.program import environment_with_package
from tests.sweeps import ROOT, start_here


def installed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in the folder, as `python -m`, which needs no installation."""
    command = [sys.executable, "-m", "overlap_sweep", *arguments]
    environment = environment_with_package() | {"COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_version_is_ours_and_names_the_libraries(tmp_path: Path) -> None:
    for command in ([], ["launch"], ["analyze"]):
        shown = installed(tmp_path, *command, "--version").stdout.splitlines()
        assert shown[0] == f"overlap-sweep {overlap_sweep.__version__}"
        assert any(line.startswith("hydra-core 1.3") for line in shown)
    assert not list(tmp_path.iterdir())


def test_help_names_every_command(tmp_path: Path) -> None:
    shown = installed(tmp_path).stdout
    assert all(f"  overlap-sweep {command} " in shown for command in COMMANDS)
    assert "overlap-sweep analyze query DIR" in installed(tmp_path, "analyze", "query", "--help").stdout.replace(
        "multirun/2026-11-20", "DIR"
    )
    assert "overlap-sweep tune MODEL" in installed(tmp_path, "tune", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["lanch"], 2, "error: Unknown command lanch. Did you mean launch?\n"),
        (["sweep"], 2, "error: Unknown command sweep. Choose one of optimize, tune, launch, analyze, mcp.\n"),
        (["tune", "llama3_8"], 2, "error: Unknown model llama3_8. Did you mean llama3_8b?\n"),
        (["tune", "llama3_8b", "num_smm=8"], 2, "error: Unknown option num_smm. Did you mean num_sm?\n"),
        (
            ["tune", "llama3_8b", "operator=fc2", "method=bulk", "runtime.device=cpu"],
            1,
            "error: There is nothing to search: none of the operator's slots takes a swept method.\n",
        ),
        (["tune", "tp_size=2"], 2, "error: The model comes first, not tp_size=2: overlap-sweep tune llama3_8b ...\n"),
        (
            ["optimize", "torchrun", "train.py"],
            2,
            "error: The command is given after --; put -- before torchrun: "
            "overlap-sweep optimize -- torchrun train.py\n",
        ),
        (["optimize", "--"], 2, "error: The command is missing after --.\n"),
        (
            ["optimize", "job.command=a.py", "--", "b.py"],
            2,
            "error: job.command=a.py: the command is given after --; leave that out.\n",
        ),
        (
            ["optimize", "--levers", "ddp,", "--", "b.py"],
            2,
            "error: --levers 'ddp,' has an empty name; give levers or families, such as ddp,nccl.max_ctas.\n",
        ),
        (["optimize", "--minuts=3", "--", "x"], 2, "error: Unknown option --minuts. Did you mean --minutes?\n"),
        (
            ["optimize", "--memory=900%", "--", "x"],
            2,
            "error: --memory 900% is no share of the memory; give such as 90% or 0.9.\n",
        ),
        (["optimize", "--levers=fsdp9", "--", "x"], 2, "error: Unknown lever fsdp9. Did you mean fsdp2?\n"),
        (
            ["optimize", "fast", "--", "x"],
            2,
            "error: fast is no option KEY=VALUE; put -- before your command: "
            "overlap-sweep optimize -- torchrun train.py\n",
        ),
        (
            ["optimize", "job.env.A=1,2", "--", "x"],
            2,
            "error: optimize chooses what to try; give one value of job.env.A, or sweep it with launch.\n",
        ),
        (
            ["optimize", "--fail-if=gian < 0", "--", "x"],
            2,
            "error: Unknown column 'gian'. Did you mean gain, minutes, runs? Put text in quotes.\n",
        ),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    done = start_here(*arguments, cwd=tmp_path, program=str(ROOT / "overlap_sweep" / "__main__.py")).wait()
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)
    assert not list(tmp_path.iterdir())


def test_the_configuration_is_found_from_any_folder(tmp_path: Path) -> None:
    done = installed(tmp_path, "launch", "model=qwen3_tiny", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "name: qwen3_tiny" in done.stdout
    assert not list(tmp_path.iterdir())
