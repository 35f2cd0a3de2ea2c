from __future__ import annotations

from pathlib import Path

from overlap_sweep.runtime.log_tail import MOST_BYTES, tail


def test_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log, 3) == ""
    log.write_text("")
    assert tail(log, 3) == ""
    log.write_text("a\nb\nc\nd\n")
    assert tail(log, 3) == "b\nc\nd"
    assert tail(log, 30) == "a\nb\nc\nd"
    # From where somebody else's end.
    assert tail(log, 10, start=len("a\nb\n")) == "c\nd"
    assert tail(log, 10, start=log.stat().st_size) == ""


def test_a_huge_log_is_not_read_as_a_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(2**40)
        file.write(b"\xff the end")
    text = tail(log, 2)
    assert text.endswith("� the end")
    assert len(text) <= MOST_BYTES
