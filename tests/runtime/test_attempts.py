from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.runtime.attempts import ATTEMPTS_FILE, MOST_LOST, Attempts


def fail(attempts: Attempts, error: str) -> None:
    attempts.begin()
    attempts.end("failed", error)


def failed(directory: Path, launch: str = "launch") -> list[str]:
    """The errors that a process would count which begins now."""
    return [attempt.error for attempt in Attempts(directory, launch).failed]


def test_alone_a_process_counts_in_memory(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "point")
    fail(attempts, "one")
    attempts.begin()
    attempts.end("timeout", "two")
    assert [(attempt.status, attempt.error) for attempt in attempts.failed] == [("failed", "one"), ("timeout", "two")]
    assert all(attempt.started and attempt.where for attempt in attempts.failed)
    assert not (tmp_path / "point").exists()
    assert Attempts(tmp_path / "point").failed == []


def test_a_successor_counts_on_until_there_is_a_result_and_another_launch_does_not(tmp_path: Path) -> None:
    fail(Attempts(tmp_path, "launch"), "one")
    later = Attempts(tmp_path, "launch")
    fail(later, "two")
    assert failed(tmp_path) == ["one", "two"]
    assert failed(tmp_path, "another") == []
    later.forget()
    later.forget()
    assert not list(tmp_path.iterdir())


def test_one_that_died_counts_once_when_it_is_buried(tmp_path: Path) -> None:
    Attempts(tmp_path, "launch").begin()
    successor = Attempts(tmp_path, "launch")
    assert successor.failed == []
    successor.bury("its node is gone")
    successor.bury("it cannot die twice")
    assert failed(tmp_path) == ["its node is gone"]


def test_one_that_was_interrupted_counts_never(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, "launch")
    attempts.begin()
    attempts.end("interrupted")
    assert attempts.failed == []
    successor = Attempts(tmp_path, "launch")
    successor.bury("it ended in order")
    assert successor.failed == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"launch": 3}', b'{"launch": "launch", "attem'])
def test_what_is_no_record_counts_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ATTEMPTS_FILE).write_bytes(content)
    attempts = Attempts(tmp_path, "launch")
    assert attempts.failed == []
    fail(attempts, "one")
    assert failed(tmp_path) == ["one"]


def test_the_first_that_were_lost_do_not_count(tmp_path: Path) -> None:
    """Nodes go away for reasons of their own, but not every time for the same point."""
    for number in range(MOST_LOST + 2):
        Attempts(tmp_path, "launch").begin()
        Attempts(tmp_path, "launch").bury(f"node {number} is gone", lost=True)
    assert failed(tmp_path) == [f"node {MOST_LOST} is gone", f"node {MOST_LOST + 1} is gone"]
    assert {attempt.status for attempt in Attempts(tmp_path, "launch").failed} == {"failed"}
