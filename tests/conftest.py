"""Fixtures and markers that all tests share."""

from __future__ import annotations

import os

import pytest

from overlap_sweep.runtime.devices import visible_gpus

# No test may depend on whether the machine has a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests cache is not left behind in the user's home, and nothing there can help them pass."""
    os.environ["OVERLAP_SWEEP_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker:
        count = marker.kwargs.get("count", 1)
        if visible_gpus() < count:
            pytest.skip(f"needs {count} GPUs, {visible_gpus()} are visible")
