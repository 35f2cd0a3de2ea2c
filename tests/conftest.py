"""Fixtures and markers that all tests share."""

from __future__ import annotations

import os

import pytest

from overlap_sweep.runtime.devices import visible_gpus

# No test may depend on whether the machine has a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker:
        count = marker.kwargs.get("count", 1)
        if visible_gpus() < count:
            pytest.skip(f"needs {count} GPUs, {visible_gpus()} are visible")
