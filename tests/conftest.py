"""Fixtures and markers that all tests share."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.runtime.group_config import visible_gpus

START_PROCESSES = {"backends", "measure", "runtime", "workloads", "test_main_job.py"}
"""Folders and files whose tests start process groups of their own."""
ONLY_READ = {
    *("test_answer.py", "test_choice.py", "test_drift.py", "test_exports.py", "test_proof.py", "test_switches.py"),
    *("test_command.py", "test_compare.py", "test_complete.py", "test_config.py", "test_started.py"),
    *("test_composition.py", "test_jobs.py", "test_kept.py", "test_lock.py", "test_model.py", "test_slurm_jobs.py"),
    *("test_door.py", "test_step_calls.py", "test_step_recorder.py", "test_template.py", "test_time_limits.py"),
    "test_traced.py",
    # They start launches that are refused, one process each.
    *("test_completion.py", "test_help.py", "test_mistakes.py", "test_refusals.py", "test_slurm_packing.py"),
    *("test_telemetry.py", "test_telemetry_comparison.py", "test_telemetry_lines.py", "test_times.py"),
}
"""Files in those folders whose tests start none."""

if find_spec("hypothesis"):
    # Not on machines with GPUs alone. What an example may take says nothing on a machine that others share.
    from hypothesis import settings

    settings.register_profile("no_deadline", deadline=None)
    settings.load_profile("no_deadline")

# A shell starts what runs in its background without SIGINT, which launches that tests interrupt would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may depend on whether the machine has a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests cache is not left behind in the user's home, and nothing there can help them pass."""
    os.environ["OVERLAP_SWEEP_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        first = item.path.relative_to(Path(__file__).parent).parts[0]
        if first in START_PROCESSES and item.path.name not in ONLY_READ:
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns for `--dist loadfile` what keeps all tests of Slurm in one process, where they share one cluster."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class SlurmTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "slurm" if nodeid.startswith("tests/slurm/") else super()._split_scope(nodeid)

    return SlurmTogether(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker:
        count = marker.kwargs.get("count", 1)
        if visible_gpus() < count:
            pytest.skip(f"needs {count} GPUs, {visible_gpus()} are visible")
