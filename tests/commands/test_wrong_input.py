"""Every command: what is wrong is one error and exit status 1 or 2, what is damaged hides nothing else, and --fail-if
has a status of its own: command lines and their answers are in tests/golden/analysis_lines.txt."""

from pathlib import Path

import pytest

from overlap_sweep.commands.command_line import COMMANDS
from tests.analyze import ROOT, analyze
from tests.golden import analysis_lines
from tests.golden.command_lines import answers
from tests.sweeps import launch_here

ANSWERS = answers(analysis_lines.FILE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    analysis_lines.build(folder)
    return folder


@pytest.mark.parametrize("typed", ANSWERS)
def test_a_command_line_is_answered_as_it_was(place: Path, typed: str) -> None:
    """Where the answer has changed, and should have: `make golden`."""
    assert analysis_lines.answer(typed, place) == ANSWERS[typed]
    assert ANSWERS[typed].count("error: ") == any(f"exit status {status}" in ANSWERS[typed] for status in (1, 2))


@pytest.mark.parametrize(
    "typed",
    [
        *("", "query x --limit 0", "diagnose x --by kernel", "timeline x --fromat csv"),
        *(name for name in COMMANDS if name != "levers"),
        *(f"{name} x --format xml" for name in COMMANDS),
    ],
)
def test_wrong_usage_has_a_status_of_its_own(typed: str) -> None:
    assert analyze(*typed.split()).returncode == 2


@pytest.mark.parametrize(
    ("typed", "status"), [("--help", 0), ("--version", 0), ("--fromat", 2), ("-m resume=nowhere", 1), ("tp_size=3", 1)]
)
def test_launch_ends_like_them(tmp_path: Path, typed: str, status: int) -> None:
    assert launch_here(*typed.split(), "runtime.device=cpu", cwd=tmp_path).returncode == status


def test_the_statuses_are_documented() -> None:
    page = (ROOT / "docs" / "analysis.md").read_text()
    assert all(f"\n| {status} | " in page for status in range(4))
