"""One real Slurm for all tests here; every test finds it empty."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, started_cluster, why_unavailable
from tests.slurm.sweep import SlurmSweep

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A conftest's hook sees the items of all directories.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def slurm_available() -> None:
    if reason := why_unavailable():
        # In CI a skip would look like a pass for ever.
        if os.environ.get("CI"):
            pytest.fail(f"CI must test with Slurm: {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm(slurm_available: None) -> Iterator[Slurm]:
    """A cluster of two nodes with 8 pretended GPUs each, where sacct works."""
    with started_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_without_sacct(slurm_available: None) -> Iterator[Slurm]:
    """A second cluster, beside, that keeps no accounts and forgets jobs soon after they ended."""
    with started_cluster(accounting=False, min_job_age_s=5) as cluster:
        yield cluster


@pytest.fixture
def sweep(slurm: Slurm, tmp_path: Path) -> Iterator[SlurmSweep]:
    with closing(SlurmSweep(slurm, tmp_path)) as sweep:
        yield sweep


@pytest.fixture
def sweep_without_sacct(slurm_without_sacct: Slurm, tmp_path: Path) -> Iterator[SlurmSweep]:
    with closing(SlurmSweep(slurm_without_sacct, tmp_path)) as sweep:
        yield sweep


@pytest.fixture(autouse=True)
def leave_no_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    names = {"slurm", "slurm_without_sacct"} & set(request.fixturenames)
    clusters = [request.getfixturevalue(name) for name in names]
    yield
    for cluster in clusters:
        cluster.clean_up()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when == "call":
        clusters = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Slurm)]
        report.sections.extend(("Slurm", cluster.report()) for cluster in clusters)
    return report
