"""Times the analysis of 300 run directories, first and repeated, and the opening of the report page.

python benchmarks/report_of_300_points.py [DIRECTORY]        (default: 300 made-up points with recorded traces)

Every run of analyze.py is timed from start to exit, with a separate cache. The page is opened in Chromium, which must
be installed, until its charts are drawn and its table can be sorted.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

REPEATS = 5


def analyse_s(directory: Path, cache: Path) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "analyze.py", str(directory)],
        cwd=ROOT,
        env={**os.environ, "OVERLAP_SWEEP_CACHE": str(cache)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def ready_ms(page: Path) -> list[float]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        taken = []
        for _ in range(REPEATS):
            tab = browser.new_context().new_page()
            tab.goto(page.as_uri())
            tab.wait_for_function("document.documentElement.dataset.ready === 'yes'")
            taken.append(tab.evaluate("performance.getEntriesByName('ready')[0].startTime"))
        browser.close()
    return taken


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory, cache = Path(temporary) / "sweep", Path(temporary) / "cache"
        if len(sys.argv) > 1:
            shutil.copytree(sys.argv[1], directory)
        else:
            from benchmarks.sweep_of_300 import write_sweep_of_300

            write_sweep_of_300(directory)
        traces = sum(1 for _ in directory.rglob("trace_*.json.gz"))
        print(f"{len(list(directory.rglob('result.json')))} run directories with {traces} traces")
        print(f"first analysis {analyse_s(directory, cache):.2f} s")
        print("again          " + ", ".join(f"{analyse_s(directory, cache):.2f}" for _ in range(REPEATS)) + " s")
        page = directory / "report.html"
        print(f"report.html    {page.stat().st_size / 1e6:.2f} MB")
        print("ready          " + ", ".join(f"{taken / 1000:.2f}" for taken in ready_ms(page)) + " s")


if __name__ == "__main__":
    main()
