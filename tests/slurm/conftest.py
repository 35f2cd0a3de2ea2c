"""One real Slurm for all tests here."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.slurm.cluster import GPUS_PER_NODE, Slurm, started_cluster, why_unavailable
from tests.slurm.sweep import SlurmSweep

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A conftest's hook sees the items of all directories.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


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


def _sweeps(slurm: Slurm, folders: pytest.TempPathFactory) -> Iterator[Callable[..., SlurmSweep]]:
    with ExitStack() as closed:
        yield lambda **given: closed.enter_context(closing(SlurmSweep(slurm, folders.mktemp("slurm"), **given)))


@pytest.fixture(scope="module")
def new_sweep(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SlurmSweep]]:
    """-> a sweep whose launchers and jobs may live as long as the module's tests, beside those of others."""
    yield from _sweeps(slurm, tmp_path_factory)


@pytest.fixture(scope="session")
def time_limited(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SlurmSweep]]:
    """Sweeps whose jobs reach their time limit, beside other tests: Slurm looks at limits every half minute."""
    for make in _sweeps(slurm, tmp_path_factory):
        long = make(plan=[{"fault": "dawdles", "rank": 0}])
        long.start(
            "num_sm=" + ",".join(map(str, range(1, 19))),
            "hydra.launcher.timeout_min=2",
            "hydra.launcher.signal_delay_s=30",
        )
        hanging = make()
        hanging.hold("tp2_sm1")
        hanging.start("num_sm=1,2,3", "runtime.retries=0")
        # The first is told to make room when Slurm looks for the last time half a minute before its end.
        for sweep, seconds in ((long, 50), (hanging, 1)):
            sweep.wait_until_begun("tp2_sm1")
            sweep.end_in(seconds)
        yield {"long": long, "hanging": hanging}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when == "call":
        clusters = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Slurm)]
        report.sections.extend(("Slurm", cluster.report()) for cluster in clusters)
    return report
