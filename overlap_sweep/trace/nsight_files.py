"""Finds the ranks in recordings of Nsight Systems: exports (`.sqlite`), and reports (`.nsys-rep`), which nsys exports.

A file may hold all processes of a node. Each of them that has kernels on a GPU is a rank, whose path is below that of
the file: `report.sqlite/gpu1`. A file of a single rank has its own path.
"""

import hashlib
import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from overlap_sweep.cache import cache_directory
from overlap_sweep.errors import UserError

EXPORT, REPORT = ".sqlite", ".nsys-rep"
SUFFIXES = (EXPORT, REPORT)

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
STRINGS = "StringIds"
_ABOUT = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""What says who exported; the second in 2022."""

STRAY = 0.01
"""Share of the kernels of a process's busiest GPU below which another GPU is none that it works on."""

_BEGINS = b"SQLite format 3\0"
_PART = re.compile(r"gpu(\d{1,6})")
_NODE_IN_NAME = re.compile(r"(node[-_.]?)(\d{1,6})", re.IGNORECASE)


class Source(NamedTuple):
    """Where the kernels of a rank are in an export."""

    process: int
    """The upper bits of globalPid and globalTid; 0 in exports without them, all of which is of one process."""
    device: int


def file_of(path: Path) -> Path:
    """Returns the file in which a trace is: its own path, unless it is one rank of a recording."""
    return path.parent if _PART.fullmatch(path.name) and is_recording(path.parent) else path


def is_recording(path: Path) -> bool:
    """Returns whether the file is named like one of Nsight Systems."""
    return path.name.endswith(SUFFIXES)


def is_whole(path: Path) -> bool:
    """Returns whether a file that is named so holds a recording that is not in another file, too: databases may be
    anybody's, and nsys writes exports next to their reports."""
    if path.name.endswith(REPORT):
        return not path.with_name(path.name.removesuffix(REPORT) + EXPORT).exists()
    try:
        with opened(path) as database:
            return bool(columns_of(database, STRINGS) and any(columns_of(database, name) for name in _ABOUT))
    except (sqlite3.Error, UserError):
        return False


def run_name(path: Path) -> str:
    """Returns the common name of the ranks of a recording, and of those of other nodes of the same run."""
    return str(path.parent.with_name(_NODE_IN_NAME.sub(r"\1*", path.parent.name)) / "gpu*")


def paths_in(path: Path) -> list[Path]:
    """Returns a path for each rank of a trace file; the file itself if it has only one, or cannot be read."""
    if not is_recording(path):
        return [path]
    try:
        count = len(sources_of(path))
    except (sqlite3.Error, UserError):
        # Reading it says why.
        return [path]
    return [path / f"gpu{number}" for number in range(count)] if count > 1 else [path]


def source_of(path: Path) -> Source:
    """Returns the source of a rank. UserError where its file has no kernels, or no such rank."""
    file = file_of(path)
    sources = sources_of(file)
    if not sources:
        raise UserError(f"{file} has no kernels; record with nsys profile --trace=cuda,nvtx.")
    number = 0 if file == path else int(path.name.removeprefix("gpu"))
    if number >= len(sources):
        raise UserError(f"{file} has no {path.name}; choose one of gpu0 to gpu{len(sources) - 1}.")
    return sources[number]


def rank_on_node(path: Path) -> tuple[int | None, bool]:
    """Returns a rank by its place among those of the file, counted on from nodes before it if the file's name has its
    node; None for a file of a single rank. And whether the name had the node."""
    file = file_of(path)
    if file == path:
        return None, False
    node = _NODE_IN_NAME.search(file.name)
    number = int(path.name.removeprefix("gpu"))
    return number + (int(node[2]) * len(sources_of(file)) if node else 0), node is not None


def sources_of(file: Path) -> list[Source]:
    """Returns the sources of a file's ranks, by GPU and process."""
    exported = export_of(file)
    return _sources(exported, _status(exported).st_mtime_ns)


@lru_cache(16)
def _sources(exported: Path, _changed_ns: int) -> list[Source]:
    with opened(exported) as database:
        columns = columns_of(database, KERNELS)
        if not columns:
            return []
        counted = f"SELECT {process_in(columns)}, deviceId, count(*) FROM {KERNELS} GROUP BY 1, 2 ORDER BY 2, 1"
        found = database.execute(counted).fetchall()
    busiest: dict[int, int] = {}
    for number, _, count in found:
        busiest[number] = max(busiest.get(number, 0), count)
    return [Source(number, device) for number, device, count in found if count >= STRAY * busiest[number]]


def process_in(columns: frozenset[str]) -> str:
    """Returns SQL for the process of a table's rows: what is above the 24 bits of the thread; 0 in old exports."""
    return next((f"({name} >> 24)" for name in ("globalTid", "globalPid") if name in columns), "0")


def columns_of(database: sqlite3.Connection, table: str) -> frozenset[str]:
    """Returns the names of a table's columns; none if there is no such table: nsys writes those that have rows."""
    return frozenset(name for _, name, *_ in database.execute(f"PRAGMA table_info({table})"))


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yields the database, which is only read. UserError where the file is missing or none."""
    try:
        with path.open("rb") as file:
            begins = file.read(len(_BEGINS))
    except OSError as error:
        raise _unreadable(path, error) from None
    if begins != _BEGINS:
        raise UserError(f"{path} is no SQLite file; export it again with nsys export --type sqlite.")
    # Immutable: no files are made next to it, so that the directory may be read-only.
    with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)) as database:
        # Programs may name ranges by what is no text.
        database.text_factory = lambda text: text.decode(errors="replace")
        yield database


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({error.strerror or error}); give a file of Nsight Systems.")


def export_of(path: Path) -> Path:
    """Returns the export of a recording; a report's is made by nsys, and kept in the cache. UserError where nsys is
    missing or fails."""
    if not path.name.endswith(REPORT):
        return path
    by_hand = f"run `nsys export --type sqlite --include-blobs=true {path}` and give its .sqlite file"
    status, directory = _status(path), cache_directory("nsight")
    if directory is None:
        raise UserError(f"{path} cannot be read (it has to be exported into a cache that can be written); {by_hand}.")
    key = f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"
    kept = directory / f"{hashlib.sha256(key.encode()).hexdigest()}{EXPORT}"
    if kept.exists():
        return kept
    nsys = shutil.which("nsys")
    if nsys is None:
        raise UserError(f"{path} cannot be read (there is no nsys in PATH to export it); {by_hand}.")
    with tempfile.TemporaryDirectory(dir=directory, prefix=".") as temporary:
        made = Path(temporary, kept.name)
        command = [nsys, "export", "--type", "sqlite", "--output", str(made)]
        # Versions such as 2023.4 have no such option, nor what it exports.
        for options in (["--include-blobs=true"], []):
            done = subprocess.run([*command, *options, str(path)], capture_output=True, text=True, errors="replace")
            if done.returncode == 0 and made.exists():
                break
        else:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise UserError(f"{path} cannot be read ({nsys} does not export it: {''.join(said)}); {by_hand}.")
        made.replace(kept)
    return kept
