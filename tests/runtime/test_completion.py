"""What a shell offers for a command line that is not finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweeps import ROOT, launch_here


def offered(line: str) -> list[str]:
    return launch_here("-sc", "query=bash", COMP_LINE=line).stdout.split()


@pytest.mark.parametrize(
    ("typed", "offers"),
    [
        ("method=p", ["method=pipeline"]),
        ("tp_size=2 -m method=bulk,ri", ["method=bulk,ring_exchange"]),
        ("num_s", ["num_sm=", "num_splits="]),
        ("precision=fp8_", ["precision=fp8_delayed", "precision=fp8_current", "precision=fp8_block"]),
        ("runtime.isolate=", ["runtime.isolate=true", "runtime.isolate=false"]),
        ("workload=fsdp fsdp.backward_prefetch=BACKWARD_PO", ["fsdp.backward_prefetch=BACKWARD_POST"]),
        ("impl=mega", ["impl=megatron"]),
        ("+experiment=four", ["+experiment=four_operators"]),
        ("mod", ["model.", "model="]),
        ("workload=job job.command='torchrun --x {b} a.py' job.metric_is=m", ["job.metric_is=milliseconds"]),
        ("workload=job job.command='torchrun a.py' +job.values.b=1 job.opt", ["job.optimizer_steps="]),
        ("workload=job job.command='torchrun --sta", []),
    ],
)
def test_groups_options_and_their_values_are_offered(typed: str, offers: list[str]) -> None:
    assert offered(f"python launch.py {typed}") == offers


COMPLETED = """
eval "$({command} -sc install=bash)"
COMP_LINE={line!r} COMP_CWORD=2
hydra_bash_completion
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize("command", ["python launch.py", "overlap-sweep"])
def test_bash_completes_with_either_command(tmp_path: Path, command: str) -> None:
    installed = tmp_path / "overlap-sweep"
    starts = "from overlap_sweep.commands.installed import main; main()"
    installed.write_text(f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(ROOT)!r})\n{starts}\n")
    installed.chmod(0o755)
    line = f"{'python launch.py' if 'python' in command else 'overlap-sweep launch'} precision=bf"
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    script = COMPLETED.format(command=command, line=line)
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True)
    assert done.stdout.split() == ["precision=bf16"], done.stderr
