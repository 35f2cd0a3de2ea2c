"""A workload that another package brings, installed and used as a person would: nothing here knows of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from overlap_sweep.results.run_directory import RESULT_FILE
from tests.sweeps import ROOT, Launch

pytestmark = pytest.mark.end_to_end

TOY = Path(__file__).parent.parent / "toy_workload"
SWEEP = ("-m", "workload=toy", "runtime.device=cpu", "workload.tokens=64", "toy.chunks=1,4")

Analyze = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package is installed."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    # Building writes beside the source.
    shutil.copytree(TOY, source / "toy")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    install = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source / "toy")]
    subprocess.run(install, check=True)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))}


@pytest.fixture(scope="module")
def sweep(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, str]:
    """A sweep over it, and what that printed."""
    launch = Launch(tmp_path_factory.mktemp("sweep"), installed)
    done = launch.run(*SWEEP, f"store={launch.directory}.sqlite")
    assert done.returncode == 0, done.stderr
    return launch, done.stdout


@pytest.fixture(scope="module")
def analyze(installed: dict[str, str]) -> Analyze:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "analyze.py", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **installed}, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def results(directory: Path) -> dict[str, Any]:
    """By point; as JSON, since the workload is not installed here."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(directory.glob(f"*/{RESULT_FILE}"))}


def times(launch: Launch) -> dict[str, float]:
    return {name: result["objective_us"] for name, result in results(launch.directory).items()}


def test_it_is_small_and_nothing_else_knows_it() -> None:
    files = [*TOY.glob("*.toml"), *TOY.rglob("*.py"), *TOY.rglob("*.yaml")]
    lines = [line for path in files for line in path.read_text().splitlines() if line]
    assert 100 < len(lines) <= 150
    product = [*(ROOT / "overlap_sweep").rglob("*.*"), *(ROOT / "conf").rglob("*.yaml"), ROOT / "launch.py"]
    assert not any("toy" in path.read_text().split() for path in product if path.suffix in (".py", ".yaml"))


def test_it_is_swept_and_told(sweep: tuple[Launch, str]) -> None:
    launch, printed = sweep
    found = results(launch.directory).values()
    assert [result["status"] for result in found] == ["ok", "ok"]
    assert all(result["measured"]["time"]["median_us"] == result["objective_us"] for result in found)
    assert "All-reduce of qwen3_0_6b, TP=2" in printed
    assert re.search(r"^ *setting +runs +speedup +time us +noise us", printed, re.MULTILINE)


def test_it_refuses_what_it_does_not_have(installed: dict[str, str], tmp_path: Path) -> None:
    launch = Launch(tmp_path, installed)
    for given, said in {
        "operator=fc2": "operator requires workload=operator",
        "toy.chunk=2": "Unknown option toy.chunk. Did you mean toy.chunks?",
        "toy.chunks=65": "toy.chunks=65 is out of range; give a value from 1 to 64.",
        "model.bias=true": "workload=toy does not use model.bias=True;",
    }.items():
        done = launch.run("workload=toy", "runtime.device=cpu", given)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    done = Launch(tmp_path).run("workload=toy")
    assert done.stderr.startswith("error: workload=toy is not known; choose one of copy_engine, fsdp,")


def test_its_results_are_kept_and_remembered(sweep: tuple[Launch, str], tmp_path: Path) -> None:
    launch, _ = sweep
    resumed = launch.run(*SWEEP)
    assert "already measured: 2 of 2 points" in resumed.stdout
    again = Launch(tmp_path, launch.environment)
    assert again.run(*SWEEP, f"store={launch.directory}.sqlite", "reuse=true").returncode == 0
    found = results(again.directory)
    assert {name: result["objective_us"] for name, result in found.items()} == times(launch)
    assert all(result["reused_from"] for result in found.values())


def test_its_answer_is_in_every_rendering(sweep: tuple[Launch, str], analyze: Analyze, tmp_path: Path) -> None:
    launch, _ = sweep
    assert "All-reduce of qwen3_0_6b, TP=2" in analyze(launch.directory, "--output", tmp_path).stdout
    for rows in (pd.read_csv(tmp_path / "toy.csv"), pd.read_parquet(tmp_path / "toy.parquet")):
        assert dict(zip(rows["point"], rows["time_us"], strict=True)) == pytest.approx(times(launch))
    page = (tmp_path / "report.html").read_text()
    assert "All-reduce of qwen3_0_6b, TP=2" in page
    assert "chunks=4" in page
    assert "defaults" in page


def test_its_points_are_asked_for_by_its_flag(sweep: tuple[Launch, str], analyze: Analyze) -> None:
    launch, _ = sweep
    for flags in ((), ("--toy",)):
        found = json.loads(analyze("query", launch.directory, "chunks == 4", *flags, "--format", "json").stdout)
        assert [row["time_us"] for row in found] == pytest.approx([times(launch)[row["point"]] for row in found])
        assert len(found) == 1
    assert "chunks" in analyze("query", launch.directory).stdout
    assert "Columns with --toy, one row per point:" in analyze("query", "--help").stdout
    assert "Columns of workload=toy, one row per case: the best setting:" in analyze("report", "--help").stdout


def test_it_is_compared_and_has_a_history(sweep: tuple[Launch, str], analyze: Analyze) -> None:
    launch, _ = sweep
    said = analyze("compare", f"a={launch.directory}", f"b={launch.directory}", "--format", "json").stdout
    rows = [row for row in json.loads(said) if row["setting"] == "chunks=4"]
    assert [row["operator"] for row in rows] == ["all-reduce"]
    history = analyze("history", f"{launch.directory}.sqlite").stdout
    assert "all-reduce" in history


def test_its_options_are_searched(installed: dict[str, str], analyze: Analyze, tmp_path: Path) -> None:
    launch = Launch(tmp_path / "search", installed)
    done = launch.run(*SWEEP, "hydra/sweeper=knobs", "search.max_points=8")
    assert done.returncode == 0, done.stderr
    (search,) = json.loads((launch.directory / "knobs.json").read_text())["searches"]
    assert search["knobs"] == {"toy.chunks": ["1", "4"]}
    assert {*search["best_points"], *search["baseline_points"]} <= {*results(launch.directory)}
    assert "Search for knobs" in analyze(launch.directory, "--output", tmp_path).stdout
