"""What `launch.py --help` and docs/options.md show, and what a shell offers for a command line that is not finished."""

import subprocess
import sys
from pathlib import Path

import pytest

from overlap_sweep import workloads
from overlap_sweep.declared import types_of
from overlap_sweep.hydra_adapter.help import workload_pages
from overlap_sweep.hydra_adapter.overrides import GROUPS
from overlap_sweep.options import options_of
from tests.composed import hydra
from tests.sweeps import ROOT, launch_here


def test_every_option_of_every_workload_has_its_sentence() -> None:
    # What an option is listed under, the workloads have said by then.
    hydra()
    for name in workloads.names():
        schema = workloads.schema(name)
        assert types_of(schema)["workload"] is not None
        assert schema().workload.name == name
        without = [option.name for option in options_of(schema) if not option.about.endswith(".")]
        assert without == []
        paged = [option for page in workload_pages(name) for option in page.options]
        assert sorted(paged, key=str) == sorted(options_of(schema), key=str)


def test_the_front_page_fits_a_screen_and_imports_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "launch.py", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert len(shown.stdout.splitlines()) <= 45
    assert max(map(len, shown.stdout.splitlines())) <= 120
    assert "python launch.py -m tp_size=2,4,8 method=bulk num_sm=1,2,4,8,16" in shown.stdout
    for group in GROUPS:
        assert f"\n  {group} " in shown.stdout
    assert "\n  tp_size         1, 2, 4, 8, or any other number\n" in shown.stdout
    assert "_schema" not in shown.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in shown.stderr.splitlines()}
    assert "hydra" in imported
    assert "torch" not in imported


def test_a_choice_shows_its_options_with_values() -> None:
    shown = launch_here("model=hf", "tp_size=4", "--help", COLUMNS="100").stdout.splitlines()
    assert shown[0].startswith("Example: python launch.py -m tp_size=")
    assert "workload=operator" in shown[2]
    assert shown[4].startswith("model: ")
    assert "  model.name=" in shown
    found = {line.split()[0]: line.split(maxsplit=1)[1:] for line in shown if line.startswith("  ") and "=" in line}
    assert found["tp_size=4"] == ["1 to 8"]
    assert found["method=bulk"] == ["none, bulk, ring_exchange, pipeline"]
    assert any(line.startswith("        16: 16 SMs communicate: what Transformer Engine takes") for line in shown)
    assert max(map(len, shown)) <= 110
    own, common = (next(i for i, line in enumerate(shown) if each in line) for each in ("  method=", "  profile="))
    assert own < common


def test_options_of_the_tuner_are_shown_with_operators_only() -> None:
    of_operators, of_training = (launch_here(f"workload={name}", "--help").stdout for name in ("operator", "fsdp"))
    for option in ("  max_tp_size=", "  tuner.prove="):
        assert option in of_operators
        assert option not in of_training
    assert of_training.startswith("Example: python launch.py -m +experiment=fsdp_overlap")


def test_a_launcher_and_a_sweeper_show_theirs() -> None:
    shown = launch_here("hydra/launcher=slurm", "hydra/sweeper=bisect", "hydra.launcher.qos=high", "--help").stdout
    assert "  hydra.launcher.qos=high\n" in shown
    assert "  hydra.launcher.gpus_per_node=${gpus_of_point:}\n" in shown
    assert "  search.reach=0.25 " in shown
    assert "num_sm" not in shown.replace("min_num_sm", "").replace("max_num_sm", "").partition("search.min")[2]


def offered(line: str) -> list[str]:
    return launch_here("-sc", "query=bash", COMP_LINE=line).stdout.split()


@pytest.mark.parametrize(
    ("typed", "offers"),
    [
        ("method=p", ["method=pipeline"]),
        ("num_sm=1", ["num_sm=1", "num_sm=10", "num_sm=12", "num_sm=16"]),
        ("tp_size=2,", ["tp_size=2,1", "tp_size=2,2", "tp_size=2,4", "tp_size=2,8"]),
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
