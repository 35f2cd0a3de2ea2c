"""Whole searches, with a launcher that makes the results up: budgets, failures, resuming; and real processes."""

import io
import json
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.overlap import space
from overlap_sweep.results.records import SearchRecord
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.kept import remember
from overlap_sweep.search.sweeper import sweep
from tests.composed import QUICK, SIZES
from tests.search.stand_in import NONE_US, ON_CPU, Answer, Settings, StandIn, operator_result, results, sweep_of
from tests.sweeps import Launch, launch_here

SPACE = ("tp_size=2", "operator=fc1,fc2", "method=bulk,ring_exchange,pipeline", "num_sm=8,16")
FEW = ("tp_size=2", "operator=fc2", "method=ring_exchange,pipeline", "num_sm=8")


def ratio(pass_name: str, settings: Settings) -> float:
    """Least at 8 SMs and by ring exchange; bulk pays in dgrad only."""
    found = 0.0
    for slot, setting in settings.items():
        away = abs(setting["num_sm"].bit_length() - 4)
        method = {"ring_exchange": 0.80, "pipeline": 0.88, "bulk": 0.84 if "dgrad" in slot else 1.1}[setting["method"]]
        found += method + 0.04 * away
    return found / len(settings) if len(settings) == 1 else (found - 0.1) / 2


def answer(point: Mapping[str, Any]) -> Result:
    return operator_result(point, ratio)


def searched(directory: Path, *overrides: str, answer: Answer = answer, space: tuple[str, ...] = SPACE) -> StandIn:
    """Run to the end."""
    with sweep_of(directory, "hydra/sweeper=bisect", *ON_CPU, *overrides, answer=answer) as launcher:
        sweep(launcher.inputs(*ON_CPU, *space))
        return launcher


def record(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "search.json").read_text())
    assert len(SearchRecord.read(directory / "search.json").searches) == len(found["searches"])
    return found


def searches(directory: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(search["operator"], search["pass"]): search for search in record(directory)["searches"]}


Done = tuple[Path, StandIn, list[str]]
"""A search that several tests look at, and what it printed."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    directory = tmp_path_factory.mktemp("sweep")
    with redirect_stdout(io.StringIO()) as printed:
        launcher = searched(directory)
    return directory, launcher, printed.getvalue().splitlines()


def test_the_best_of_every_pass_is_found_and_said(done: Done) -> None:
    directory, launcher, printed = done
    found = searches(directory)
    ring = {"method": "ring_exchange", "num_sm": 8}
    assert {key: (search["chosen"], search["exhaustive"]) for key, search in found.items()} == {
        ("fc1", "fwd"): ({"fc1_fprop": ring}, 2),
        ("fc1", "bwd"): ({"fc1_dgrad": ring}, 2 + 2 + 2 * 2 + 2 + 2),
        ("fc2", "fwd"): ({"fc2_fprop": ring}, 4),
        ("fc2", "bwd"): ({"fc2_dgrad": ring}, 2),
    }
    for (_, pass_name), search in found.items():
        none_us = NONE_US[pass_name]
        assert search["time_us"] == pytest.approx(0.8 * none_us)
        assert (search["none_us"], search["floor_us"]) == (none_us, none_us / 2)
        assert search["stopped"] == "no untested setting could be faster than those measured"
        assert search["evaluations"] == sum(tried["measurements"] for tried in search["tried"])
        assert [tried["time_us"] for tried in search["tried"]] == sorted(tried["time_us"] for tried in search["tried"])
        assert search["tried"][0]["setting"] == "ring_sm8"
    assert any(line.startswith("search: qwen3_0_6b TP=2 fc1 fwd: 2 of 2 settings measured; ") for line in printed)
    assert printed[-1].startswith(f"search: {len(launcher.points)} points in ")
    assert str(directory / "search.json") in printed[-1]


def test_all_searches_share_rounds_and_points(done: Done) -> None:
    directory, launcher, _ = done
    found, points, batches = record(directory), launcher.points, launcher.batches
    assert len(points) == found["points"] == len(results(directory))
    assert found["rounds"] == len(batches) - 1
    # First all operators without overlap, then forward and backward side by side.
    assert [point["phases"] for point in batches[0]] == [{"fprop": {"method": "none"}}] * 2
    assert any(len({space.PASS_OF_PHASE[phase] for phase in point["phases"]}) == 2 for point in batches[1])
    assert sum(search["evaluations"] for search in found["searches"]) > len(points)


@pytest.mark.parametrize("lost", [0, 3])
def test_again_only_what_is_lost_is_measured_and_the_answer_is_the_same(done: Done, tmp_path: Path, lost: int) -> None:
    directory = shutil.copytree(done[0], tmp_path / "copy")
    for path in sorted(directory.glob("*/result.json"))[3 : 3 + lost]:
        path.unlink()
    assert len(searched(directory).points) == lost
    before, after = record(done[0]), record(directory)
    assert (after["points"], after["reused"]) == (before["points"], before["points"] - lost)
    assert after["searches"] == before["searches"]


def test_max_points_is_kept_to_and_more_points_go_on_where_fewer_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rings = (*SPACE[:2], "method=ring_exchange", "num_sm=8,16")
    launcher = searched(tmp_path, "search.max_points=1", space=rings)
    assert len(launcher.points) == record(tmp_path)["points"] == 1
    # The first baseline was all.
    assert record(tmp_path)["dropped"] == {"qwen3_0_6b TP=2 fc2": "search.max_points=1 is used up"}
    assert [search["stopped"] for search in record(tmp_path)["searches"]] == ["search.max_points=1 is used up"] * 2
    assert "fc2 not searched: search.max_points=1 is used up" in capsys.readouterr().out

    assert len(searched(tmp_path, "search.max_points=4", space=rings).points) == 3
    assert record(tmp_path)["points"] == len(results(tmp_path)) == 4
    assert "search.max_points=4 is used up" in [search["stopped"] for search in record(tmp_path)["searches"]]

    assert len(searched(tmp_path, space=rings).points) == record(tmp_path)["points"] - 4 > 0
    assert all(search["stopped"].startswith("no untested setting") for search in record(tmp_path)["searches"])


def test_one_tp_size_after_the_other(tmp_path: Path) -> None:
    launcher = searched(tmp_path, space=("tp_size=4,2", "operator=fc2", "method=pipeline", "num_sm=8"))
    sizes = [{point["tp_size"] for point in batch} for batch in launcher.batches]
    assert sizes == sorted(sizes, key=max)
    assert set(map(frozenset, sizes)) == {frozenset({2}), frozenset({4})}
    assert len(record(tmp_path)["searches"]) == 2


def failing(point: Mapping[str, Any]) -> Result:
    """Pipelines compute wrong numbers; ring exchange with 16 SMs dies."""
    for phase, setting in (point["phases"] or {}).items():
        if setting["method"] == "pipeline":
            error = {"output" if phase == "fprop" else "input_grad": 0.5}
            return operator_result(point, status="failed", measured=None, error="wrong numbers", relative_error=error)
        if setting["method"] == "ring_exchange" and setting["num_sm"] == 16 and phase == "fprop":
            return operator_result(point, status="failed", measured=None, error="rank 1 died\nTraceback ...")
    return answer(point)


def test_what_fails_is_left_out_and_noted_and_tried_again_when_the_search_is(tmp_path: Path) -> None:
    without_bulk = (*SPACE[:2], "method=pipeline,ring_exchange", SPACE[3])
    ring = {"method": "ring_exchange", "num_sm": 8}
    first = searched(tmp_path, answer=failing, space=without_bulk)
    found = searches(tmp_path)
    assert not any("pipeline" in str(search["chosen"]) for search in found.values())
    assert "pipeline_sm16_split4 failed: wrong numbers" in found["fc1", "bwd"]["notes"]
    assert "ring_sm16 failed: rank 1 died" in found["fc1", "fwd"]["notes"]
    assert found["fc1", "fwd"]["chosen"] == {"fc1_fprop": ring}
    # The backward setting beside it was measured again, alone.
    assert found["fc2", "bwd"]["chosen"] == {"fc2_dgrad": ring}

    failed = [result for result in results(tmp_path).values() if result.status == "failed"]
    again = searched(tmp_path, space=without_bulk).points
    # Wrong numbers are no accident.
    assert {bool(result.relative_error) for result in failed if result.point in again} == {False}
    assert len(again) < len(first.points)
    assert searches(tmp_path)["fc1", "fwd"]["chosen"] == {"fc1_fprop": ring}


@pytest.mark.parametrize("store", [None, "store"])
def test_wrong_numbers_are_found_once_on_equal_machines(
    store: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipelines(launcher: StandIn) -> int:
        return sum("pipeline" in str(point["phases"]) for point in launcher.points)

    monkeypatch.setenv("OVERLAP_SWEEP_CACHE", str(tmp_path / "cache"))
    given = [f"store={tmp_path / store}"] if store else []
    first = searched(tmp_path / "first", *given, answer=failing, space=FEW)
    assert pipelines(first)
    for name, result in results(tmp_path / "first").items():
        # As after every point.
        remember(first.config, result, tmp_path / "first" / name)
    if store:
        # Another user's.
        monkeypatch.setenv("OVERLAP_SWEEP_CACHE", str(tmp_path / "another"))
    again = searched(tmp_path / "again", *given, answer=failing, space=FEW)
    assert pipelines(again) == 0
    (note,) = searches(tmp_path / "again")["fc2", "fwd"]["notes"]
    assert note.startswith("pipeline_sm8 not measured: wrong numbers in ")
    evaluations = [search["evaluations"] for search in record(tmp_path / "again")["searches"]]
    assert sum(evaluations) == sum(len(search["tried"]) for search in record(tmp_path / "again")["searches"])
    retried = searched(tmp_path / "retried", *given, "search.retry_wrong=true", answer=failing, space=FEW)
    assert pipelines(retried) == pipelines(first)


def test_a_searchs_points_end_early_and_what_they_are_compared_with_later(done: Done) -> None:
    _, launcher, _ = done
    goals = {bool(space.settings(point)): point.workload.noise_goal for point in launcher.points}
    assert goals == {False: 0.003, True: launcher.config.search.noise_goal}


def test_where_everything_fails_the_answer_is_no_overlap_and_without_a_baseline_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def only_fc2_without_overlap(point: Mapping[str, Any]) -> Result:
        works = point["operator"] == "fc2" and not space.settings(point)
        return answer(point) if works else operator_result(point, status="failed", measured=None, error="no luck\nmore")

    searched(tmp_path, answer=only_fc2_without_overlap, space=(FEW[0], "operator=fc1,fc2", *FEW[2:]))
    assert set(searches(tmp_path)) == {("fc2", "fwd"), ("fc2", "bwd")}
    for search in record(tmp_path)["searches"]:
        assert (search["chosen"], search["tried"], search["time_us"]) == ({}, [], search["none_us"])
        assert search["notes"]
    assert capsys.readouterr().out.count(": 0 of ") == 2
    assert record(tmp_path)["dropped"] == {"qwen3_0_6b TP=2 fc1": "its baseline without overlap failed: no luck"}


def test_what_is_searched_is_said_by_params_by_the_command_line_instead_and_within_limits(tmp_path: Path) -> None:
    limits = ("search.min_num_sm=2", "search.max_num_sm=4")
    with sweep_of(tmp_path, *ON_CPU, *limits, answer=answer) as launcher:
        params = {"operator": "fc2", "method": "pipeline,ring_exchange", "num_sm": "1,32"}
        # Plain torch has no copy engines: that knob is not varied at all.
        sweep(launcher.inputs(*ON_CPU, "num_sm=1,2,4,8", "use_ce=null,true", params=params))
    settings = [setting for point in launcher.points for setting in point["phases"].values()]
    assert {setting["num_sm"] for setting in settings if "num_sm" in setting} == {2, 4}
    assert {setting.get("use_ce") for setting in settings} == {None}
    exhaustive = {key: search["exhaustive"] for key, search in searches(tmp_path).items()}
    assert exhaustive == {("fc2", "fwd"): 4, ("fc2", "bwd"): 2}


REAL = ("-m", "hydra/sweeper=bisect", *SIZES, *QUICK)
SMALL = ("tp_size=2", "operator=fc1", "method=bulk,ring_exchange", "num_sm=1,2")


@pytest.mark.end_to_end
def test_every_pass_is_searched_and_answered_by_what_was_measured_and_again_nothing_is(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "search")
    done = launch.run(*REAL, *SMALL)
    assert done.returncode == 0, done.stderr
    found, results = record(launch.directory), launch.results().values()
    of = [(one["tp_size"], one["operator"], one["pass"]) for one in found["searches"]]
    assert of == [(2, "fc1", "fwd"), (2, "fc1", "bwd")]
    assert {result.status for result in results} == {"ok"}
    # Forward and backward were measured in the same points.
    assert {"fwd", "bwd"} in [{space.PASS_OF_PHASE[phase] for phase in result.recorded["phases"]} for result in results]
    assert (found["points"], found["reused"], found["dropped"]) == (len(results), 0, {})
    for one in found["searches"]:
        measured = f"{len(one['tried'])} of {one['exhaustive']} settings measured; no untested"
        assert f"\nsearch: qwen3_0_6b TP=2 fc1 {one['pass']}: {measured}" in done.stdout
        assert sum(entry["measurements"] for entry in one["tried"]) == one["evaluations"]
        assert len(one["tried"]) <= one["exhaustive"]
        assert one["time_us"] <= one["none_us"]
    assert done.stdout.splitlines()[-1].startswith(f"{found['points']} ok; next: python analyze.py ")

    written = {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")}
    again = launch.run(*REAL, *SMALL)
    assert again.returncode == 0, again.stderr
    after = record(launch.directory)
    assert after["reused"] == after["points"] == found["points"]
    assert after["searches"] == found["searches"]
    assert {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")} == written


@pytest.mark.end_to_end
def test_another_launcher_measures_no_more_points_than_allowed(tmp_path: Path) -> None:
    """hydra/launcher=basic gives every point processes of its own."""
    launch = Launch(tmp_path)
    few = ("tp_size=2", "operator=proj", "method=ring_exchange,pipeline", "num_sm=1,2")
    done = launch.run(*REAL, *few, "hydra/launcher=basic", "runtime.isolate=true", "search.max_points=2")
    assert done.returncode == 0, done.stderr
    assert [result.status for result in launch.results().values()] == ["ok", "ok"]
    found = record(tmp_path)
    assert found["points"] == 2
    assert found["searches"][0]["stopped"] == "search.max_points=2 is used up"
    # What the second point said of either pass is not lost.
    tried = [[entry["setting"].partition("_")[0] for entry in one["tried"]] for one in found["searches"]]
    assert tried == [["ring"], ["ring"]]


@pytest.mark.end_to_end
def test_without_time_nothing_is_started_and_there_is_no_answer(tmp_path: Path) -> None:
    done = launch_here(*REAL, *SMALL, "search.max_minutes=0", f"hydra.sweep.dir={tmp_path}")
    assert (done.returncode, done.stderr) == (1, "")
    assert not list(tmp_path.glob("*/result.json"))
    assert (record(tmp_path)["points"], record(tmp_path)["searches"]) == (0, [])
    assert set(record(tmp_path)["dropped"].values()) == {"search.max_minutes=0 is used up"}
