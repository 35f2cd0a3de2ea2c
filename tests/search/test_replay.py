"""The search against recorded surfaces: its aims, and that what replay says of them can be recomputed."""

from __future__ import annotations

import functools
import json
import math
import random
import runpy
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import overlap_cfg, space
from overlap_sweep.search import replay
from overlap_sweep.search.bisect import Effort
from overlap_sweep.search.recording import read
from overlap_sweep.search.start import STARTS
from tests.analyze import ROOT, Ran

MODULE = "overlap_sweep.search.replay"
SURFACES = sorted((ROOT / "tests" / "data" / "surfaces").glob("*.jsonl"))
Replay = Callable[..., Ran]

surface = pytest.mark.parametrize("path", SURFACES, ids=[path.stem for path in SURFACES])


@pytest.fixture
def replay_py(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Runs `python -m overlap_sweep.search.replay ARGUMENTS` in this process."""

    def run(*arguments: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["replay.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended, pytest.warns(RuntimeWarning, match=MODULE):
            runpy.run_module(MODULE, run_name="__main__")
        printed = capsys.readouterr()
        return Ran(int(ended.value.code or 0), printed.out, printed.err, printed.out.encode())

    return run


@functools.cache
def rows_of(path: Path, start: str = "usual") -> list[replay.Row]:
    return [replay.row(cell, replay.replay(cell, Effort(), STARTS[start])) for cell in read(path)]


@surface
@pytest.mark.parametrize("start", STARTS)
def test_the_aims_are_met(path: Path, start: str) -> None:
    rows = rows_of(path, start)
    regrets = [row.regret for row in rows]
    assert sum(row.evaluations for row in rows) <= 0.4 * sum(row.exhaustive for row in rows)
    assert statistics.median(regrets) < 0.0005
    assert statistics.mean(regrets) <= 0.01
    assert max(regrets) <= 0.03


@surface
def test_the_aims_are_met_on_noisier_machines(path: Path) -> None:
    """1.5 % on every recorded sample: what is chosen is judged by what was recorded."""
    regrets, evaluations, exhaustive = [], 0, 0
    for seed in range(8):
        drawn = random.Random(seed)
        for cell in read(path):
            samples = {
                candidate: [
                    replace(sample, time_us=sample.time_us * drawn.gauss(1.0, 0.015)) for sample in of_candidate
                ]
                for candidate, of_candidate in cell.samples.items()
            }
            trail = replay.replay(replace(cell, samples=samples), Effort())
            regrets.append(cell.time_us(trail.best) / cell.time_us(cell.best) - 1)
            evaluations += trail.evaluations
            exhaustive += len(cell.cell.candidates)
    assert statistics.mean(regrets) <= 0.01
    assert statistics.median(regrets) < 0.001
    assert evaluations <= 0.45 * exhaustive


def setting_key(cfg: Mapping[str, Any] | None, operator: str, pass_name: str) -> str:
    """Of what the slots of the pass run with; without overlap `null`."""
    given = None if cfg is None else overlap_cfg.settings_of_pass(cfg, operator, pass_name)
    return json.dumps(given, sort_keys=True)


def recorded_us(path: Path) -> dict[tuple[Any, ...], dict[str, float]]:
    """By cell, by setting the median time; straight from the lines."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, path.read_text().splitlines()):
        for operator, times in line["times"].items():
            for index, pass_name in enumerate(("fwd", "bwd")):
                if line["kind"] != "floor":
                    key = line["model"], line["tp"], operator, pass_name
                    found[key][setting_key(line["cfg"], operator, pass_name)].append(1e3 * times[index])
    for settings in found.values():
        settings["null"] = settings["null"][1:] or settings["null"]
    return {key: {name: statistics.median(us) for name, us in settings.items()} for key, settings in found.items()}


@surface
def test_regret_and_number_of_settings_can_be_recomputed_from_the_lines(path: Path) -> None:
    recorded = recorded_us(path)
    rows = rows_of(path)
    assert {(row.model, row.tp_size, row.operator, row.phase) for row in rows} == recorded.keys()
    for row in rows:
        times_us = recorded[row.model, row.tp_size, row.operator, row.phase]
        assert row.exhaustive == len(times_us) - 1
        chosen_us = times_us[setting_key(row.settings or None, row.operator, row.phase)]
        assert row.time_us == pytest.approx(chosen_us)
        assert row.best_us == pytest.approx(min(times_us.values()))
        assert row.regret == pytest.approx(chosen_us / min(times_us.values()) - 1)
        assert row.regret >= 0.0
        assert row.evaluations >= 1
        assert row.chosen == space.settings_name(row.settings)


@surface
def test_nothing_is_measured_more_often_than_it_was_recorded(path: Path) -> None:
    for cell in read(path):
        trail = replay.replay(cell, Effort(repeats=100))
        assert trail.settings_tried <= len(cell.cell.candidates)
        assert all(len(samples) <= len(cell.samples[candidate]) for candidate, samples in trail.samples.items())
        assert trail.stopped


@surface
def test_rows_as_json_and_the_totals_on_stderr(path: Path, replay_py: Replay) -> None:
    done = replay_py(path, "--format", "json")
    assert [list(row.items()) for row in done.rows] == [list(asdict(row).items()) for row in rows_of(path)]
    totals, other = done.stderr.splitlines()
    used, of = sum(row["evaluations"] for row in done.rows), sum(row["exhaustive"] for row in done.rows)
    assert totals.startswith(
        f"{len(done.rows)} searches: {used} of {of} evaluations ({used / of:.1%}); regret: median "
    )
    assert other.startswith("with --start model: ")


def test_the_table_has_one_line_per_search_of_all_files_and_both_starts(replay_py: Replay) -> None:
    done = replay_py(SURFACES[0], SURFACES[0], "--start", "model")
    rows = 2 * rows_of(SURFACES[0], "model")
    *table, totals, other = done.stdout.splitlines()
    lines = [line for line in table if f" {rows[0].tp_size} " in line and "%" in line and " of " in line]
    assert (done.returncode, len(lines)) == (0, len(rows))
    assert totals == replay.totals(rows)
    assert other.startswith("with --start usual: ")


def test_help_says_what_regret_is() -> None:
    for option in ("-h", "--help"):
        done = subprocess.run([sys.executable, "-m", MODULE, option], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0
        assert all(said in done.stdout for said in (f"Usage: python -m {MODULE}", "regret", "--format"))


LINE = {"model": "m", "tp": 2, "times": {"fc1": [1.0, 2.0, 0.1, 0.1, 3.0]}}
NONE_LINE = {**LINE, "kind": "none", "cfg": None}
OVERLAP_LINE = {**LINE, "kind": "overlap", "cfg": {}}


def recording(path: Path, *lines: Mapping[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("what\n", "line 1: no JSON"),
        (json.dumps(NONE_LINE) + "\n" + json.dumps(NONE_LINE)[:20], "line 2: no JSON"),
        ("", "has no model with a `none`"),
        (json.dumps(OVERLAP_LINE), "has no model with a `none`"),
        ('{"a": 1}\n', "is no recorded surface (KeyError: 'times')"),
        ("[1, 2]\n", "is no recorded surface (TypeError"),
        (json.dumps({**OVERLAP_LINE, "cfg": None}), "is no recorded surface"),
        (json.dumps({**OVERLAP_LINE, "times": {"fc3": [1, 2, 0, 0]}}), "is no recorded surface"),
        (json.dumps({**NONE_LINE, "times": {"fc1": ["a", "b", 0, 0]}}), "is no recorded surface"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_recording_is_one_line(
    tmp_path: Path, replay_py: Replay, content: str | bytes | None, says: str
) -> None:
    path = tmp_path / "surface.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    done = replay_py(SURFACES[0], path, "--format", "json")
    done.assert_error(str(path), says)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)


@pytest.mark.parametrize("arguments", [(), ("--format", "xml", SURFACES[0]), ("--start", "anywhere", SURFACES[0])])
def test_a_wrong_command_line_says_how_it_should_be(arguments: tuple[str | Path, ...], replay_py: Replay) -> None:
    replay_py(*arguments).assert_usage_error("Usage:")


def test_a_recording_holds_medians_and_what_the_defaults_add(tmp_path: Path) -> None:
    ring = {"fc1_fprop": {"method": "ring_exchange", "aggregate": True}}
    lines = [
        {**NONE_LINE, "times": {"fc1": [99.0, 99.0, 0.0, 0.0]}},
        *({**NONE_LINE, "times": {"fc1": [us, 2 * us, 0.3, 0.3]}} for us in (1.0, 1.2, 1.4)),
        {**LINE, "kind": "floor", "cfg": None, "times": {"fc1": [0.5, 1.0, 0.0, 0.0]}},
        *({**LINE, "kind": "overlap", "cfg": ring, "times": {"fc1": [us, 1.9, 0.0, 0.0]}} for us in (0.8, 0.9)),
    ]
    forward, backward = read(recording(tmp_path / "surface.jsonl", *lines))
    (candidate,) = forward.cell.candidates
    assert candidate.settings == {
        "fc1_fprop": {
            **{"method": "ring_exchange", "num_sm": 1, "aggregate": True, "cga_size": 1},
            **{"set_sm_margin": False, "use_ce": True},
        }
    }
    # The first `none` is start-up.
    assert forward.baselines.none.time_us == pytest.approx(1200.0)
    assert forward.baselines.none.noise_us == pytest.approx(1.57 * 300.0 / math.sqrt(12))
    assert forward.time_us(candidate) == pytest.approx(850.0)
    assert (forward.floor_us, backward.floor_us) == (pytest.approx(500.0), pytest.approx(1000.0))
    # 700 us exposed forward, 700 us for each of two collectives backward.
    assert forward.collective_us == backward.collective_us == pytest.approx(700.0)
    assert backward.cell.label == "m TP=2 fc1 bwd"
    (both,) = backward.cell.candidates
    assert set(both.settings) == {"fc1_dgrad", "fc1_wgrad"}
    assert replay.replay(forward, Effort()).best == candidate


def test_a_recording_without_a_floor_can_be_searched_from_either_start(tmp_path: Path) -> None:
    overlaps = [
        {**LINE, "kind": "overlap", "cfg": {"fc1_dgrad": {"num_sm": n}}, "times": {"fc1": [1.0, 1 + 1 / n, 0, 0]}}
        for n in (4, 8, 16)
    ]
    path = recording(tmp_path / "surface.jsonl", NONE_LINE, *overlaps)
    for start in STARTS:
        assert [row.phase for row in rows_of(path, start)] == ["fwd", "bwd"]
        assert rows_of(path, start)[1].regret == 0.0
