"""The recorder is put in front of the script, wherever python's and torchrun's options end."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_sweep.workloads.job.started import TORCHRUN_FLAGS, attached, started

MODULE = "-m overlap_sweep.attach"
COMMANDS = {
    "python train.py --x -m y": f"python {MODULE} train.py --x -m y",
    "python3.11 -u -m pkg.train --x": f"python3.11 -u {MODULE} -m pkg.train --x",
    "/opt/venv/bin/python3 train.py": f"/opt/venv/bin/python3 {MODULE} train.py",
    "python3.13t train.py": f"python3.13t {MODULE} train.py",
    "python -uBm train": f"python -uB {MODULE} -m train",
    "python -mtrain": f"python {MODULE} -m train",
    "python -W ignore -X dev -Wdefault -Xtracemalloc=2 t.py": (
        f"python -W ignore -X dev -Wdefault -Xtracemalloc=2 {MODULE} t.py"
    ),
    "python -uW ignore t.py": f"python -uW ignore {MODULE} t.py",
    "python --check-hash-based-pycs always t.py": f"python --check-hash-based-pycs always {MODULE} t.py",
    "python -- t.py": f"python {MODULE} t.py",
    "torchrun train.py": f"torchrun {MODULE} train.py",
    "/opt/bin/torchrun --nproc-per-node 2 train.py --nproc-per-node 3": (
        f"/opt/bin/torchrun --nproc-per-node 2 {MODULE} train.py --nproc-per-node 3"
    ),
    "torchrun --standalone --nproc_per_node=2 train.py": f"torchrun --standalone --nproc_per_node=2 {MODULE} train.py",
    "torchrun -r3 -t 3 --rdzv-conf a=1,b=2 t.py": f"torchrun -r3 -t 3 --rdzv-conf a=1,b=2 {MODULE} t.py",
    "torchrun --standalo --nproc-per 2 t.py": f"torchrun --standalo --nproc-per 2 {MODULE} t.py",
    "torchrun -m pkg.train x": f"torchrun {MODULE} -m pkg.train x",
    "torchrun --module --nproc-per-node 2 pkg.train": f"torchrun --nproc-per-node 2 {MODULE} -m pkg.train",
    "torchrun --nproc-per-node 2 -- t.py": f"torchrun --nproc-per-node 2 {MODULE} t.py",
    "torchrun --no-python --nproc-per-node 2 python -u t.py": (
        f"torchrun --no-python --nproc-per-node 2 python -u {MODULE} t.py"
    ),
    "python -m torch.distributed.run --standalone t.py": f"python -m torch.distributed.run --standalone {MODULE} t.py",
    "python -m torch.distributed.launch --use-env t.py": f"python -m torch.distributed.launch --use-env {MODULE} t.py",
    "python -u /opt/bin/torchrun -m t": f"python -u /opt/bin/torchrun {MODULE} -m t",
}
LEFT_ALONE = [
    "torchrun -m overlap_sweep.attach train.py",
    "python -m overlap_sweep.attach -m train",
    "accelerate launch -m overlap_sweep.attach train.py",
    "accelerate launch train.py",
    "deepspeed train.py",
    "srun python train.py",
    "bash -c 'torchrun train.py'",
    "./train.sh",
    "python-config train.py",
    "python -c pass",
    "python -Ic pass",
    "python - x",
    "python -V",
    "python",
    "python -m",
    "torchrun --nproc-per-node 2",
    "torchrun --no-python ./train.sh",
    "torchrun --run-path /a/train.py",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_recorder_goes_in_front_of_the_script(command: str) -> None:
    assert " ".join(attached(command.split()) or []) == COMMANDS[command]


@pytest.mark.parametrize("command", LEFT_ALONE)
def test_other_commands_are_left_as_they_are(command: str) -> None:
    assert attached(command.split()) is None


@pytest.mark.parametrize(
    ("command", "name", "file"),
    [
        ("torchrun a/train.py b.py", "train.py", "a/train.py"),
        ("python -m pkg.train b.py", "pkg.train", None),
        ("torchrun -m overlap_sweep.attach a/train.py", "train.py", "a/train.py"),
        ("torchrun -m overlap_sweep.attach -m pkg.train", "pkg.train", None),
    ],
)
def test_what_is_run_has_a_name(command: str, name: str, file: str | None) -> None:
    found = started(command.split())
    assert found
    assert (found.name, found.file) == (name, file)


def test_options_without_a_value_are_those_of_the_installed_torchrun() -> None:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    assert flags == {*TORCHRUN_FLAGS} - {"--use-env", "--use_env"}


def test_python_and_torchrun_take_the_script_where_we_do(tmp_path: Path) -> None:
    """Real interpreters, whose module `overlap_sweep.attach` prints its arguments; torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    (tmp_path / "overlap_sweep").mkdir()
    (tmp_path / "overlap_sweep" / "__init__.py").touch()
    (tmp_path / "overlap_sweep" / "attach.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    for command, whole in COMMANDS.items():
        words = whole.replace("3.13t", "").replace("/opt/venv/bin/", "").split()
        script = words[words.index("overlap_sweep.attach") + 1 :]
        if "torchrun" in command or "torch.distributed" in command:
            starts = [i for i, word in enumerate(words) if "torch" in word]
            parsed = get_args_parser().parse_args([w for w in words[starts[0] + 1 :] if w != "--use-env"])
            given = [parsed.training_script, *parsed.training_script_args]
            assert given[given.index("overlap_sweep.attach") + 1 :] == script
            assert parsed.module or parsed.no_python
            continue
        run = [sys.executable, *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == script
