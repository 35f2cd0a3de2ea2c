"""What `launch.py --help` shows, and docs/options.md."""

from __future__ import annotations

import subprocess
import sys

from overlap_sweep import workloads
from overlap_sweep.declared import types_of
from overlap_sweep.hydra_adapter.help import GROUPS, workload_pages
from overlap_sweep.options import options_of
from tests.golden.options import OPTIONS_MD, reference
from tests.sweeps import ROOT, launch_here


def test_the_reference_is_that_of_the_declared_options() -> None:
    """Where it is not: `make golden` writes it."""
    assert OPTIONS_MD.read_text() == reference()


def test_every_option_of_every_workload_has_its_sentence() -> None:
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
