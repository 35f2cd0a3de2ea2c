"""Files of JSON lines that others may still be appending to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.store.measurement import note


class Line(NamedTuple):
    start: int
    """In bytes from the file's beginning."""
    text: bytes
    """Without its line feed."""

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + len(self.text) + 1


def files_directory(path: Path) -> Path:
    """Where the files lie beside a store's path."""
    return path.with_name(f"{path.name}.d")


def line_files(directory: Path) -> list[Path]:
    """Sorted by name; empty where there is no such directory."""
    return sorted(path for path in directory.glob("*.jsonl") if path.is_file())


def whole_lines(file: Path, problems: list[str], start: int = 0) -> Iterator[Line]:
    """From a byte on which a line begins; a file that has become shorter than that is read from its beginning.

    A last line without a line feed is left out: it is being written, or its writer ended while writing it and never
    took it for kept. A file that cannot be read becomes a problem.
    """
    try:
        with file.open("rb") as content:
            if start > file.stat().st_size:
                start = 0
            content.seek(start)
            for text in content:
                if text.endswith(b"\n"):
                    yield Line(start, text.removesuffix(b"\n"))
                start += len(text)
    except OSError as error:
        note(problems, f"{file} cannot be read ({error.strerror}); it is left out.")
