"""Made-up sweeps that are only read, and images that are not drawn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlap_sweep.report import comparison
from overlap_sweep.report.charts import figures
from tests import made_sweeps
from tests.golden.made_report import TRACES, write_compared, write_ranks
from tests.golden.outputs import drawing_no_images
from tests.store.measured import write_history

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Made = Callable[[str], Path]

RENDERED, AS_PNG = figures.rendered, comparison.as_png


BUILDERS: dict[str, Callable[[Path], object]] = {
    "operators": made_sweeps.write_sweep,
    "tuned": made_sweeps.write_tuned_sweep,
    "layers": made_sweeps.write_layers,
    "kernels": made_sweeps.write_sweep_of_kernels,
    "training": made_sweeps.write_sweep_of_training,
    "copies": made_sweeps.write_sweep_of_copies,
    "stacks": made_sweeps.write_sweep_of_stacks,
    "compared": write_compared,
    "ranks": write_ranks,
    "traces": lambda directory: shutil.copytree(TRACES, directory),
    "store": lambda directory: write_history(directory / "measurements.sqlite"),
}


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Returns a directory by name, written when it is first asked for. Not to be changed."""
    root = tmp_path_factory.mktemp("made")

    def directory(name: str) -> Path:
        if not (root / name).exists():
            BUILDERS[name](root / name)
        return root / name

    return directory


@pytest.fixture(scope="package", autouse=True)
def no_images() -> Iterator[None]:
    """PNGs take most of a report's time, and hardly a test looks at one."""
    with drawing_no_images():
        yield


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    """PNGs are drawn, after all."""
    monkeypatch.setattr(figures, "rendered", RENDERED)
    monkeypatch.setattr(comparison, "as_png", AS_PNG)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written without report.html and plots."""
    monkeypatch.setattr("overlap_sweep.report.files.page_files", lambda *_, **__: iter(()))


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """One browser for all pages; tests are skipped where it is missing, but fail in CI."""
    missing = pytest.fail if os.environ.get("CI") else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed; run `pip install playwright`")
    path = shutil.which("chromium")
    if not path:
        missing("chromium is not installed; run `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
