"""`analyze.py history`: the rows of a store, before and after what changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.store.files import FileStore
from overlap_sweep.store.sqlite import SqliteStore
from tests.analyze import analyze, rows
from tests.report.conftest import Made
from tests.store.measured import environment, result


def test_the_rows(made: Made) -> None:
    found = rows("history", made("store") / "measurements.sqlite")
    assert [(row["setting"], row["verdict"]) for row in found] == [
        (f"dgrad bulk_sm{num_sm} + wgrad bulk_sm{num_sm}", verdict)
        for num_sm, after in ((4, "faster"), (2, "slower"), (1, "same"))
        for verdict in (None, after)
    ]
    before, after = found[:2]
    assert (before["measurements"], before["time_us"], before["ratio"]) == (2, 100.0, None)
    assert (after["time_us"], after["ratio"]) == (70.0, pytest.approx(0.7))
    assert after["changed"] == "torch 2.12.0 -> 2.13.0, driver 570.1 -> 580.2"


def test_an_expression_chooses_rows(made: Made) -> None:
    store = made("store") / "measurements.sqlite"
    found = rows("history", store, "verdict != 'same' and torch == '2.13.0'")
    assert [row["time_us"] for row in found] == [70.0, 120.0]
    nothing = analyze("history", store, "tp_size == 16")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "No row matches, of 6.\n")
    told = analyze("history", store).stdout
    assert "3 points in 2 environments, 9 measurements: 1 faster, 1 slower, 1 same" in told
    assert "1 launch-bound" in told


def test_files_of_a_network_file_system(tmp_path: Path) -> None:
    path = tmp_path / "measurements.sqlite"
    with FileStore(path) as kept:
        kept.add(result(4, 100.0, 1), tmp_path)
        kept.add(result(4, 90.0, 2, environment(driver="580.2")), tmp_path)
    assert [row["verdict"] for row in rows("history", path)] == [None, "faster"]


def test_a_terminal_does_not_obey_what_a_store_says(tmp_path: Path) -> None:
    path = tmp_path / "measurements.sqlite"
    with SqliteStore(path) as kept:
        kept.add(result(4, 100.0, 1, environment(packages={"torch": "2\x1b]0;title\x07"}, host="\x1b[2J")), tmp_path)
        kept.add(result(4, 90.0, 2, point={"tp_size": "\x1b[2J"}), tmp_path)
    process = analyze("history", path)
    assert "\x1b" not in process.stdout + process.stderr
    assert "torch 2\\x1b]0;title" in process.stdout
    process.assert_error("A measurement is left out")
