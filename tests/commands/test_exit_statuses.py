"""The exit statuses of every command, of which docs/analysis.md has the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.commands.command_line import COMMANDS
from tests.analyze import ROOT, analyze
from tests.report.conftest import Made
from tests.sweeps import launch_here

ROWS = {
    **{"report": "operators", "query": "operators", "history": "store/measurements.sqlite", "trace": "traces"},
    **{"diagnose": "traces", "compare": "compared/old compared/new"},
}
"""What has rows, by command; `timeline` has none."""
DONE, FAILED, WRONG, HOLDS = 0, 1, 2, 3


@pytest.fixture
def place(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("operators", "store", "traces", "compared"):
        (tmp_path / name).symlink_to(made(name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_analysis_end_alike(place: Path, name: str) -> None:
    nowhere = ["nowhere", "elsewhere"] if name == "compare" else ["nowhere"]
    ends = {
        (name, "--help"): DONE,
        (name,): WRONG,
        (name, *nowhere, "--fromat", "csv"): WRONG,
        (name, *nowhere): FAILED,
    }
    if name in ROWS:
        rows = (name, *ROWS[name].split())
        ends |= {
            rows: DONE,
            (*rows, "--format", "xml"): WRONG,
            (*rows, "--fail-if", "no_such_column > 1"): WRONG,
            (*rows, "--fail-if", "1 >"): WRONG,
            (*rows, "--fail-if", f"{COLUMN[name]} != 'x'"): HOLDS,
            (*rows, "--fail-if", f"{COLUMN[name]} == 'x'"): DONE,
        }
    assert {typed: analyze(*typed).returncode for typed in ends} == ends


COLUMN = {
    **{"report": "slot", "query": "slot", "history": "operator", "trace": "phase", "diagnose": "cause"},
    **{"compare": "verdict"},
}
"""A column of text that has a value in every row, by command."""


@pytest.mark.parametrize(
    ("typed", "status"),
    [
        ("--help", DONE),
        ("--version", DONE),
        ("--fromat", WRONG),
        # A folder that does not exist, and a point that cannot be measured.
        ("-m resume=nowhere", FAILED),
        ("tp_size=3", FAILED),
    ],
)
def test_launch_ends_like_them(tmp_path: Path, typed: str, status: int) -> None:
    done = launch_here(*typed.split(), "runtime.device=cpu", cwd=tmp_path)
    assert done.returncode == status, done.stderr


def test_the_statuses_are_documented() -> None:
    page = (ROOT / "docs" / "analysis.md").read_text()
    assert all(f"\n| {status} | " in page for status in (DONE, FAILED, WRONG, HOLDS))
