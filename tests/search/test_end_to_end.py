"""hydra/sweeper=bisect as a user runs it: real processes, real collectives."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import space
from tests.search.tiny import QUICK, SIZES
from tests.sweeps import Launch, launch_here

pytestmark = pytest.mark.end_to_end

SPACE = ("tp_size=2", "operator=fc1", "method=bulk,ring_exchange", "num_sm=1,2")
SEARCH = ("-m", "hydra/sweeper=bisect", *SIZES, *QUICK)
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, Done]:
    launch = Launch(tmp_path_factory.mktemp("search"))
    done = launch.run(*SEARCH, *SPACE)
    assert done.returncode == 0, done.stderr
    return launch, done


def record(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "search.json").read_text())
    return found


def of_pass(settings: dict[str, space.Setting], pass_name: str) -> dict[str, space.Setting]:
    return {slot: x for slot, x in settings.items() if space.PASS_OF_PHASE[slot.partition("_")[2]] == pass_name}


def test_every_pass_is_searched_and_answered_by_what_was_measured(searched: tuple[Launch, Done]) -> None:
    launch, done = searched
    found, results = record(launch.directory), launch.results().values()
    assert [(one["tp_size"], one["operator"], one["pass"]) for one in found["searches"]] == [
        (2, "fc1", "fwd"),
        (2, "fc1", "bwd"),
    ]
    assert {result.status for result in results} == {"ok"}
    # Forward and backward were measured in the same points.
    assert {"fwd", "bwd"} in [{space.PASS_OF_PHASE[phase] for phase in result.point["phases"]} for result in results]
    assert (found["points"], found["reused"], found["dropped"]) == (len(results), 0, {})
    for one in found["searches"]:
        answer = space.settings_name(one["chosen"]) if one["chosen"] else "don't overlap"
        line = f"search: qwen3_0_6b TP=2 fc1 {one['pass']}: {re.escape(answer)}"
        assert re.search(f"^{line}.* of {one['exhaustive']} settings measured; nothing left", done.stdout, re.MULTILINE)
        # Backward, both slots may be given the same alone: their names are the same then.
        measured = Counter(space.settings_name(of_pass(result.settings, one["pass"])) for result in results)
        tried: Counter[str] = Counter()
        for entry in one["tried"]:
            tried[entry["setting"]] += entry["measurements"]
        assert tried.total() == one["evaluations"]
        assert tried <= measured
        assert len(one["tried"]) <= one["exhaustive"]
        assert one["time_us"] <= one["none_us"]
    assert done.stdout.splitlines()[-1].startswith(f"{found['points']} ok; analyse with: python analyze.py ")


def test_again_nothing_is_measured(searched: tuple[Launch, Done]) -> None:
    launch, _ = searched
    before, points = record(launch.directory), written(launch)
    done = launch.run(*SEARCH, *SPACE)
    assert done.returncode == 0, done.stderr
    after = record(launch.directory)
    assert after["reused"] == after["points"] == before["points"]
    assert after["searches"] == before["searches"]
    assert written(launch) == points


def written(launch: Launch) -> dict[Path, int]:
    """When each result was."""
    return {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")}


def test_another_launcher_measures_no_more_points_than_allowed(tmp_path: Path) -> None:
    """hydra/launcher=basic gives every point processes of its own."""
    launch = Launch(tmp_path)
    few = ("tp_size=2", "operator=proj", "method=ring_exchange,pipeline", "num_sm=1,2")
    done = launch.run(*SEARCH, *few, "hydra/launcher=basic", "runtime.isolate=true", "search.max_points=2")
    assert done.returncode == 0, done.stderr
    assert [result.status for result in launch.results().values()] == ["ok", "ok"]
    found = record(tmp_path)
    assert found["points"] == 2
    assert found["searches"][0]["stopped"] == "search.max_points=2 is used up"
    # What the second point said of either pass is not lost.
    tried = [[entry["setting"].partition("_")[0] for entry in one["tried"]] for one in found["searches"]]
    assert tried == [["ring"], ["ring"]]


def test_without_time_nothing_is_started_and_there_is_no_answer(tmp_path: Path) -> None:
    done = launch_here(*SEARCH, *SPACE, "search.max_minutes=0", f"hydra.sweep.dir={tmp_path}")
    assert (done.returncode, done.stderr) == (1, "")
    assert not list(tmp_path.glob("*/result.json"))
    assert record(tmp_path)["points"] == 0


def test_what_cannot_be_searched_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    done = launch_here(*SEARCH, "tp_size=2", "operator=proj", "method=bulk", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 1
    assert re.fullmatch("error: there is nothing to search: .*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
