"""Trace files on disk: found in directories, told from the other files there by what they hold, and read in blocks,
decompressed.

A directory that somebody sent may hold links and names that lead elsewhere: nothing outside of it is read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from overlap_sweep.errors import UserError

SUFFIXES = (".json", ".json.gz")

TIMELINE_MARK = "overlap_sweep timeline"
"""What a timeline of several ranks says it was made by, before anything else."""

BLOCK_BYTES = 1 << 20
COMPRESSED_BYTES = 1 << 16
"""How much is inflated at a time: what follows a gzip member in it is copied."""
GZIP_MAGIC = b"\x1f\x8b"

RECORD_AGAIN = "copy it again or record the trace again"

Report = Callable[[str], None]
"""Called with what is wrong, such as `is cut short`."""


def is_below(path: Path, root: Path) -> bool:
    """Returns whether the path lies below `root` with all links followed; `root` itself may be one."""
    # Unlike Path.resolve it takes links that lead in circles.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def is_special(path: Path) -> bool:
    """Returns whether reading it would wait for somebody to write, or never end."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def links_out(root: Path) -> Iterator[Path]:
    """Yields directories below `root` that are links to somewhere else. Nothing looks into them."""
    for folder, names, _ in os.walk(root):
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_symlink() and not is_below(path, root):
                yield path


def find_traces(directory: Path) -> list[Path]:
    """Returns all traces at or below a directory, `rank2` before `rank10`, without timelines that were made of them."""
    files = [path for path in _candidates(directory) if not _leads_out(path, directory)]
    return [path for path in files if path.is_file() and _is_trace(path)]


def refused_links(directory: Path) -> list[str]:
    """Returns a sentence for each link that may be a trace and leads elsewhere: nothing looks into it."""
    links = [path for path in _candidates(directory) if _leads_out(path, directory)]
    return [f"{link} is a link that leads out of {directory}, so it is not read; copy the file." for link in links]


def is_timeline(path: Path) -> bool:
    """Returns whether the file is a timeline of several ranks: no rank's trace, and ours to replace."""
    return _marked(beginning(path)[0])


def natural_order(path: Path) -> list[list[str | int]]:
    """Returns a key to sort paths by: numbers in names count by their value."""
    return [[int(word) if i % 2 else word for i, word in enumerate(re.split(r"(\d+)", part))] for part in path.parts]


def _candidates(directory: Path) -> list[Path]:
    return sorted((path for path in directory.rglob("*") if path.name.endswith(SUFFIXES)), key=natural_order)


def _leads_out(path: Path, directory: Path) -> bool:
    return path.is_symlink() and not is_below(path, directory)


def _is_trace(path: Path) -> bool:
    """Results and reports are .json files, too; only traces are compressed, so reading one that is damaged as a trace
    will say what is wrong."""
    text, whole = beginning(path)
    if _marked(text):
        return False
    return "trace" in path.name or b'"traceEvents"' in text or (not whole and path.name.endswith(".gz"))


def _marked(text: bytes) -> bool:
    return f'"made_by":"{TIMELINE_MARK}"'.encode() in text


def beginning(path: Path) -> tuple[bytes, bool]:
    """Returns the beginning of the file's text as far as it can be read, and whether all of it could be."""
    damage: list[str] = []
    try:
        return next(blocks(path, damage.append), b""), not damage
    except UserError:
        return b"", False


def blocks(path: Path, report_damage: Report) -> Iterator[bytes]:
    """Yields blocks of at most BLOCK_BYTES, none empty. UserError when the file cannot be read at all.

    It is gzip by its content: files get renamed, and some tools gzip without saying so.
    What a damaged compressed file holds up to the damage is given; then the damage is reported and the blocks end.
    """
    try:
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            yield from _inflated(file, report_damage) if is_gzip else iter(lambda: file.read(BLOCK_BYTES), b"")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a trace (.json or .json.gz) of torch.profiler.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {RECORD_AGAIN}.") from None


def _inflated(file: BinaryIO, report_damage: Report) -> Iterator[bytes]:
    """A gzip file may have several members; what follows the last one is no part of it."""
    pending = b""
    while pending := pending or file.read(COMPRESSED_BYTES):
        if not GZIP_MAGIC.startswith(pending[: len(GZIP_MAGIC)]):
            return
        # 31: gzip's head and checksum around deflate.
        inflate = isal_zlib.decompressobj(wbits=31)
        while not inflate.eof:
            pending = pending or file.read(COMPRESSED_BYTES)
            if not pending:
                report_damage("is cut short")
                return
            try:
                block = inflate.decompress(pending, BLOCK_BYTES)
            except isal_zlib.error as error:  # type: ignore[misc]
                report_damage(f"is damaged ({error})")
                return
            pending = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            if block:
                yield block
