"""hydra/sweeper=bisect as a user runs it: real processes, real collectives."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import overlap_cfg, space
from overlap_sweep.run_directory import Result
from tests.search.tiny import QUICK, SIZES, analyze_py, assert_one_error
from tests.sweeps import Launch

pytestmark = pytest.mark.end_to_end

SPACE = ("tp_size=2", "operator=fc1,proj", "method=bulk,ring_exchange,pipeline", "num_sm=1,2,4")
Done = subprocess.CompletedProcess[str]


def search(launch: Launch, *more: str) -> Done:
    return launch.run("-m", "hydra/sweeper=bisect", *more)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, Done]:
    launch = Launch(tmp_path_factory.mktemp("search"))
    done = search(launch, *SIZES, *QUICK, *SPACE)
    assert done.returncode == 0, done.stderr
    return launch, done


def record(launch: Launch) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((launch.directory / "search.json").read_text())
    return found


def test_every_pass_is_searched_and_answered(searched: tuple[Launch, Done]) -> None:
    launch, done = searched
    found = record(launch)
    assert {(s["model"], s["tp_size"], s["operator"], s["pass"]) for s in found["searches"]} == {
        ("qwen3_0_6b", 2, operator, pass_name) for operator in ("fc1", "proj") for pass_name in space.PASSES
    }
    assert found["points"] == len(launch.results())
    assert (found["reused"], found["dropped"]) == (0, {})
    for one in found["searches"]:
        answer = space.settings_name(one["chosen"]) if one["chosen"] else "don't overlap"
        line = f"search: qwen3_0_6b TP=2 {one['operator']} {one['pass']}: {re.escape(answer)}"
        assert re.search(f"^{line}.* of {one['exhaustive']} settings measured; nothing left", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith(f"{found['points']} ok; analyse with: python analyze.py ")


def test_what_the_search_says_is_what_was_measured(searched: tuple[Launch, Done]) -> None:
    launch, _ = searched
    results = launch.results().values()
    assert {result.status for result in results} == {"ok"}
    for one in record(launch)["searches"]:
        assert sum(entry["measurements"] for entry in one["tried"]) == one["evaluations"]
        # Backward, both slots may be given the same alone: their names are the same then.
        measured = Counter(space.settings_name(own(result, one)) for result in results if is_of(result, one))
        tried: Counter[str] = Counter()
        for entry in one["tried"]:
            tried[entry["setting"]] += entry["measurements"]
        assert tried <= measured
        assert one["time_us"] <= one["none_us"]
        assert len(one["tried"]) <= one["exhaustive"]


def is_of(result: Result, one: dict[str, Any]) -> bool:
    return bool(result.point["operator"] == one["operator"])


def own(result: Result, one: dict[str, Any]) -> dict[str, space.Setting]:
    """The settings of the pass."""
    return {s: x for s, x in result.settings.items() if space.PASS_OF_PHASE[s.partition("_")[2]] == one["pass"]}


def test_forward_and_backward_were_measured_in_the_same_points(searched: tuple[Launch, Done]) -> None:
    passes = [
        {space.PASS_OF_PHASE[phase] for phase in result.point["phases"]} for result in searched[0].results().values()
    ]
    assert {"fwd", "bwd"} in passes


def test_analysis_chooses_among_what_was_measured(searched: tuple[Launch, Done]) -> None:
    launch, _ = searched
    answer = analyze_py(launch.directory)
    assert answer.returncode == 0, answer.stderr
    assert "TP=2" in answer.stdout
    config = overlap_cfg.read(launch.directory / "optimal_tp_comm_overlap_cfg_tp2.yaml")
    measured = [result.settings for result in launch.results().values()]
    for operator in ("fc1", "proj"):
        for pass_name in space.PASSES:
            slots = {s: x for s, x in config.slots.items() if s.startswith(operator)}
            chosen = {s: x for s, x in slots.items() if space.PASS_OF_PHASE[s.partition("_")[2]] == pass_name}
            assert not chosen or any(chosen.items() <= settings.items() for settings in measured)
    report = json.loads((launch.directory / "tuning_report.json").read_text())
    assert report["counts"]["ok"] == len(measured)


def test_again_nothing_is_measured(searched: tuple[Launch, Done]) -> None:
    launch, _ = searched
    before, points = record(launch), {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")}
    done = search(launch, *SIZES, *QUICK, *SPACE)
    assert done.returncode == 0, done.stderr
    after = record(launch)
    assert after["reused"] == after["points"] == before["points"]
    assert after["searches"] == before["searches"]
    assert {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")} == points
    assert f"{after['points']} points, {after['reused']} of them measured before" in done.stdout
    assert "[1/" not in done.stdout


def test_another_launcher_measures_no_more_points_than_allowed(tmp_path: Path) -> None:
    """hydra/launcher=basic gives every point processes of its own."""
    launch = Launch(tmp_path)
    few = ("tp_size=2", "operator=proj", "method=ring_exchange,pipeline", "num_sm=1,2", *SIZES, *QUICK)
    done = search(launch, "hydra/launcher=basic", "runtime.isolate=true", "search.max_points=2", *few)
    assert done.returncode == 0, done.stderr
    assert [result.status for result in launch.results().values()] == ["ok", "ok"]
    found = record(launch)
    assert found["points"] == 2
    assert found["searches"][0]["stopped"] == "search.max_points=2 is used up"
    assert "search.max_points=2 is used up" in done.stdout
    # What the second point said of either pass is not lost.
    assert [[entry["setting"].partition("_")[0] for entry in one["tried"]] for one in found["searches"]] == [
        ["ring"]
    ] * 2


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    done = search(launch, *SIZES, *QUICK, *SPACE, "search.max_minutes=0")
    # There is no answer.
    assert (done.returncode, done.stderr) == (1, "")
    assert launch.results() == {}
    assert "fc1 is not searched: search.max_minutes=0 is used up" in done.stdout
    assert record(launch)["points"] == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("operator=proj", "method=bulk"), "there is nothing to search: no swept method fits"),
        (("num_sm=interval(1,4)",), "num_sm=interval(1,4): a search needs values that can be counted; list them."),
        (("search.min_num_sm=8",), "no num_sm of 1, 2, 4 lies between search.min_num_sm=8 and search.max_num_sm=512"),
        (("workload=layer",), "not for workload=layer"),
    ],
)
def test_what_cannot_be_searched_is_one_line_and_starts_nothing(
    tmp_path: Path, wrong: tuple[str, ...], says: str
) -> None:
    done = search(Launch(tmp_path), *SIZES, *QUICK, *SPACE, *wrong)
    assert_one_error(done, says)
    assert list(tmp_path.iterdir()) == []
