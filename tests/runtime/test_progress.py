"""Asserts what a launch prints while it runs."""

import re
import sys
from pathlib import Path

import pytest

from overlap_sweep.hydra_adapter.overrides import quoted_for_hydra
from overlap_sweep.program import launch_program
from overlap_sweep.results.run_directory import read_result
from overlap_sweep.runtime import progress
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from overlap_sweep.runtime.progress import announce, now_doing, shown_waiting
from tests.make_point import make_point, resolved
from tests.sweeps import wait_for


def _printed(capsys: pytest.CaptureFixture[str], *, lines: int) -> str:
    """Returns what is printed until it has so many lines, also such as are drawn anew."""
    printed: list[str] = []

    def is_enough() -> bool:
        printed.append(capsys.readouterr().out)
        return len(re.findall(r"\.\.\. ", "".join(printed))) >= lines

    wait_for(is_enough)
    return "".join(printed)


def test_what_takes_long_is_named_again_and_again_and_what_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, line in (
        ("starting 2 workers for tp2_\x1b[31msm4", "... 0 s starting 2 workers for tp2_\\x1b[31msm4"),
        (progress.measuring("tp2_sm4", 30.0), "... 0 s measuring tp2_sm4, at most 30 s"),
    ):
        monkeypatch.setattr(progress, "LINES_AFTER_S", (0.1, 0.2))
        with shown_waiting("another"):
            now_doing(what)
            assert _printed(capsys, lines=2).splitlines() == [line] * 2
    with shown_waiting("measuring tp2_sm8"):
        pass
    assert capsys.readouterr().out == ""


def test_on_a_terminal_one_line_is_drawn_anew_and_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "REDRAWN_S", 0.1)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    # A line that wraps could not be removed.
    monkeypatch.setenv("COLUMNS", "20")
    with shown_waiting("measuring tp2_sm4"):
        before = _printed(capsys, lines=2)
    *drawn, last = (before + capsys.readouterr().out).split("\r\x1b[K")[1:]
    assert drawn[:2] == ["... 0 s measurin..."] * 2
    assert last == ""


def test_a_launch_begins_with_what_is_measured_on_which_device(capsys: pytest.CaptureFixture[str]) -> None:
    points = [resolved("operator", tp_size=tp_size, device="cpu") for tp_size in (2, 4)]
    outcomes = Outcomes(root=Path("multirun/now"))
    for _ in range(2):
        announce(points, outcomes)
    assert capsys.readouterr().out.splitlines() == [
        "operator llama3_8b, 8192 tokens, 2 points on the CPU (the answer holds for this CPU only): multirun/now"
    ]


def test_a_search_counts_its_points_over_all_rounds_and_predicts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directories = [make_point("operator", tmp_path, name=f"point_{number}") for number in range(4)]
    results = [Outcome(path, read_result(path / "result.json")) for path in directories]
    for searching in (True, False):
        outcomes = Outcomes(searching=searching, limits=", at most 9 points")
        for first in (0, 2):
            with progress.progress(2, outcomes):
                for outcome in results[first : first + 2]:
                    outcomes.add(outcome)
        printed = capsys.readouterr().out
        numbers = re.findall(r"^\[(.+?)\]", printed, re.MULTILINE)
        assert numbers == (["1", "2", "3", "4"] if searching else ["1/2", "2/2"] * 2)
        assert "left" not in printed
        assert printed.count("(0 s, at most 9 points)") == (4 if searching else 0)


def test_the_printed_command_has_the_words_that_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra is given numbers that are choices of groups in quotes of their own."""
    typed = ["-m", "tp_size=2", "num_sm=1,2", "resume=last", "runtime.device=cpu"]
    monkeypatch.setattr(sys, "argv", ["launch.py", *quoted_for_hydra(typed)])

    resumed = Outcomes(root=Path("multirun/a")).resume_command()

    assert resumed == f"{launch_program()} -m tp_size=2 num_sm=1,2 runtime.device=cpu resume=multirun/a"
