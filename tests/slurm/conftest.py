"""One real Slurm for all tests here."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.slurm.cluster import GPUS_PER_NODE, Slurm, started_cluster, why_unavailable
from tests.slurm.sweep import SlurmSweep


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A cluster of two nodes with pretended GPUs."""
    if reason := why_unavailable():
        # In CI a skip would look like a pass for ever.
        if os.environ.get("CI"):
            pytest.fail(f"CI must test with Slurm: {reason}")
        pytest.skip(reason)
    with started_cluster(GPUS_PER_NODE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def new_sweep(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SlurmSweep]]:
    """-> a sweep whose launchers and jobs may live as long as the module's tests, beside those of others."""
    folder = tmp_path_factory.mktemp
    with ExitStack() as closed:
        yield lambda **given: closed.enter_context(closing(SlurmSweep(slurm, folder("slurm"), **given)))
