from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from overlap_sweep.analysis.history import HISTORY_COLUMNS
from overlap_sweep.report.command_line import app
from overlap_sweep.store.files import FileStore
from overlap_sweep.store.sqlite import SqliteStore
from tests.analyze import analyze, files_below, on_terminal
from tests.report.test_command_line import ROOT, assert_one_error
from tests.store.measured import environment, result

NEW = environment(packages={"torch": "2.13.0"}, driver="580.2")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed; 6 rows."""
    path = tmp_path_factory.mktemp("store") / "measurements.sqlite"
    with SqliteStore(path) as kept:
        for num_sm, before_us, after_us in ((1, 100.0, 100.1), (2, 100.0, 120.0), (4, 100.0, 70.0)):
            for minute in (1, 2):
                kept.add(result(num_sm, before_us, minute), path.parent / "old")
            kept.add(result(num_sm, after_us, 5, NEW), path.parent / "new")
        kept.add(result(8, minute=6, on=NEW, launch_bound=True), path.parent / "new")
    return path


def rows(*arguments: str | Path) -> list[dict[str, object]]:
    """As JSON, without a process of its own."""
    process = CliRunner().invoke(app, ["history", *map(str, arguments), "--format", "json"])
    assert process.exit_code == 0, process.output
    found: list[dict[str, object]] = json.loads(process.stdout)
    return found


def test_the_rows(store: Path) -> None:
    found = rows(store)
    assert found[0].keys() == HISTORY_COLUMNS.keys()
    assert [(row["setting"], row["verdict"]) for row in found] == [
        ("dgrad bulk_sm4 + wgrad bulk_sm4", None), ("dgrad bulk_sm4 + wgrad bulk_sm4", "faster"),
        ("dgrad bulk_sm2 + wgrad bulk_sm2", None), ("dgrad bulk_sm2 + wgrad bulk_sm2", "slower"),
        ("dgrad bulk_sm1 + wgrad bulk_sm1", None), ("dgrad bulk_sm1 + wgrad bulk_sm1", "same"),
    ]  # fmt: skip
    assert found[0]["measurements"] == 2
    assert found[1]["ratio"] == pytest.approx(0.7)
    assert found[1]["changed"] == "torch 2.12.0 -> 2.13.0, driver 570.1 -> 580.2"


def test_the_table(store: Path) -> None:
    process = analyze("history", store)
    assert (process.returncode, process.stderr) == (0, "")
    lines = [line.split() for line in process.stdout.splitlines()]
    first = " ".join(next(line for line in lines if line[:1] == ["2"]))
    assert first.startswith(
        "2 fc1 bwd dgrad bulk_sm4 + wgrad bulk_sm4 2026-11-20 21:01 2 100.0 0.0 - - - torch 2.12.0,"
    )
    assert "torch 2.12.0, transformer-engine 2.9.0, nccl 2.27.3, driver 570.1" in process.stdout
    after = next(line for line in lines if "faster" in line)
    assert after[:8] == ["2026-11-20", "21:05", "1", "70.0", "0.0", "0.700", "1.000", "faster"]
    assert "3 points in 2 environments, 9 measurements: 1 faster, 1 slower, 1 same" in process.stdout
    assert "without a time and left out: 1 launch-bound" in process.stdout


def test_an_expression_chooses_rows(store: Path) -> None:
    assert [row["time_us"] for row in rows(store, "verdict != 'same' and torch == '2.13.0'")] == [70.0, 120.0]
    chosen = CliRunner().invoke(app, ["history", str(store), "ratio > 1.1"])
    assert "1 point in 1 environment, 1 measurement: 1 slower" in chosen.stdout
    process = analyze("history", store, "tp_size == 16")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "No row matches, of 6.\n")
    assert_one_error(analyze("history", store, "speed > 1"), "speed is no column")


def test_fail_if(store: Path) -> None:
    failing = analyze("history", store, "--fail-if", "verdict == 'slower'")
    assert failing.returncode == 3
    assert "fail-if: verdict == 'slower' holds for 1 of 6 rows, first " in failing.stderr
    assert "bulk_sm2 at TP=2 (verdict slower)" in failing.stderr
    assert CliRunner().invoke(app, ["history", str(store), "--fail-if", "ratio > 1.3"]).exit_code == 0


def test_every_format_has_the_same_rows(store: Path) -> None:
    expected = pd.DataFrame(rows(store), columns=list(HISTORY_COLUMNS)).astype(HISTORY_COLUMNS)
    text = CliRunner().invoke(app, ["history", str(store), "--format", "csv"]).stdout
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text), dtype=HISTORY_COLUMNS), expected)
    command = [sys.executable, "analyze.py", "history", str(store), "--format", "parquet"]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(piped.stdout)), expected)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_of_any_width_shows_what_matters(store: Path, columns: int) -> None:
    shown = on_terminal(columns, "history", store)
    assert max(map(len, shown.splitlines())) <= columns
    for expected in ("bulk_sm4", "70.0", "0.700", "faster", "2.12.0", "9 measurements"):
        assert expected in " ".join(shown.split())


def test_nothing_is_written(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store.parent, tmp_path / "copy")
    before = files_below(tmp_path)
    assert len(rows(tmp_path / "copy" / store.name)) == 6
    assert files_below(tmp_path) == before
    assert_one_error(analyze("history", tmp_path / "none.sqlite"), "none.sqlite does not exist")
    assert files_below(tmp_path) == before


def test_files_of_a_network_file_system(tmp_path: Path) -> None:
    path = tmp_path / "measurements.sqlite"
    with FileStore(path) as kept:
        kept.add(result(4, 100.0, 1), tmp_path)
        kept.add(result(4, 90.0, 2, NEW), tmp_path)
    assert [row["verdict"] for row in rows(path)] == [None, "faster"]


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "measurements.sqlite"
    with FileStore(path) as kept:
        kept.add(result(4, 100.0, 1), tmp_path)
        kept.add(result(4, 90.0, 2), tmp_path / "b")
    (file,) = (tmp_path / "measurements.sqlite.d").iterdir()
    file.write_bytes(b"{}\n" + file.read_bytes())
    process = analyze("history", path)
    assert_one_error(process, f"{file}, byte 0 cannot be read")
    assert "1 point in 1 environment, 2 measurements" in process.stdout


def test_a_terminal_does_not_obey_what_a_store_says(tmp_path: Path) -> None:
    path = tmp_path / "measurements.sqlite"
    with SqliteStore(path) as kept:
        kept.add(result(4, 100.0, 1, environment(packages={"torch": "2\x1b]0;title\x07"}, host="\x1b[2J")), tmp_path)
        kept.add(result(4, 90.0, 2, point={"tp_size": "\x1b[2J"}), tmp_path)
    process = analyze("history", path)
    assert "\x1b" not in process.stdout + process.stderr
    assert "torch 2\\x1b]0;title" in process.stdout
    assert process.stderr.startswith("error: A measurement is left out")


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert_one_error(analyze("history", tmp_path / "result.json"), "cannot be used as a store")
    assert_one_error(analyze("history", tmp_path), "is a directory; give the store's file")


def test_help_names_every_column() -> None:
    text = CliRunner().invoke(app, ["history", "--help"]).stdout
    assert all(f" {column}" in text for column in HISTORY_COLUMNS)
