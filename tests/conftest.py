"""Fixtures and markers that all tests share."""

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from overlap_sweep.cache import cache_root
from overlap_sweep.gpus import visible_gpus

if find_spec("hypothesis"):
    # Not on machines with GPUs alone. What an example may take says nothing on a machine that others share.
    from hypothesis import settings

    settings.register_profile("no_deadline", deadline=None)
    settings.load_profile("no_deadline")

# A shell starts what runs in its background without SIGINT, which launches that tests interrupt would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may depend on whether the machine has a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Takes modules and tests out of garbage collection, which they outlive: to visit them again and again took a fifth
    of the suite's time."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 50, 100)
    return collected


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests cache is not left behind in the user's home, and nothing there can help them pass or fail."""
    os.environ["OVERLAP_SWEEP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["OVERLAP_SWEEP_CALIBRATIONS"] = str(tmp_path_factory.mktemp("calibrations"))


@pytest.fixture(autouse=True)
def _forgotten_wrong_numbers() -> Iterator[None]:
    """What one test has computed wrong numbers with does not decide what the next one measures."""
    yield
    shutil.rmtree(cache_root() / "wrong_numbers", ignore_errors=True)


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
