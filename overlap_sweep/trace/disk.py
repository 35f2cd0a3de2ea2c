"""Finds trace files in directories, recognises them by content, reads them in decompressed blocks, and repairs text
that is almost JSON.

A directory from somebody else may have links that lead elsewhere: nothing outside of it is read."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from isal import isal_zlib

from overlap_sweep.errors import UserError
from overlap_sweep.trace import MOST_RANKS, nsight_files

SUFFIXES = (".json", ".json.gz", *nsight_files.SUFFIXES)

TENSORBOARD_FOLDER = "torch_profiler"
"""Folder in a point's directory with its traces for TensorBoard, in `rank<r>/`."""

TIMELINE_MARK = "overlap_sweep timeline"
"""Made-by mark at the beginning of a timeline of several ranks."""
_MADE_BY = f'"made_by":"{TIMELINE_MARK}"'.encode()

ROCPROFV3 = "rocprofiler-sdk-tool"
"""The key that all of a file of rocprofv3 is below."""

BLOCK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"

MANY_MEMBERS = 10_000
LEAST_MEMBER_BYTES = 1024
"""Smallest average text per gzip member in a file with many. bgzip puts 64 KiB in each; millions of empty members would
take minutes."""

RECORD_AGAIN = "copy it again or record the trace again"

_RIGHT_ESCAPE = (
    rb'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)

_HALF_A_PAIR = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"

_ESCAPE = re.compile(rb"(?P<right>%s)|(?P<half>%s)|\\" % (_RIGHT_ESCAPE, _HALF_A_PAIR))

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_ERROR_AT = re.compile(r" \(byte (\d+)\)")

RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)

Report = Callable[[str], None]
"""Called with the damage, such as `is cut short`."""


def is_below(path: Path, root: Path) -> bool:
    """Returns whether the path lies below `root` with all links followed; `root` itself may be one."""
    # Path.resolve would raise for links that form a circle.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def is_special(path: Path) -> bool:
    """Returns whether reading the file would block or never end."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def links_out(root: Path, denied: Callable[[OSError], object] | None = None) -> Iterator[Path]:
    """Yields directories below `root` that are links to outside; they are not searched. `denied` is called for each
    directory that cannot be listed."""
    for folder, names, _ in os.walk(root, onerror=denied):
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_symlink() and not is_below(path, root):
                yield path


def find_traces(directory: Path) -> list[Path]:
    """Returns all traces at or below a directory, `rank2` before `rank10`, without merged timelines and without
    TensorBoard's copies of a point's traces."""
    files = (path for path in _candidates(directory) if not (_leads_out(path, directory) or _is_copy(path, directory)))
    own = (path for path in files if path.is_file() and _is_trace(path))
    return [path for file in own for path in nsight_files.paths_in(file)]


def refused_links(directory: Path) -> list[str]:
    """Returns a sentence for each possible trace that is a link to outside; it is not read."""
    links = (path for path in _candidates(directory) if _leads_out(path, directory))
    return [f"{link} is a link that leads out of {directory}, so it is not read; copy the file." for link in links]


def is_timeline(path: Path) -> bool:
    """Returns whether the file is a merged timeline, which may be overwritten."""
    return _MADE_BY in beginning(path)[0]


def natural_order(path: Path) -> list[list[str | int]]:
    """Returns a sort key for paths that orders numbers in names by value."""
    return [[int(word) if i % 2 else word for i, word in enumerate(re.split(r"(\d+)", part))] for part in path.parts]


def rank_in_name(path: Path) -> int | None:
    """Returns the rank in the name of a trace or of its directory."""
    found = RANK_IN_NAME.search(path.name) or RANK_IN_NAME.search(path.parent.name)
    rank = int(found[1]) if found else None
    return None if rank is None or rank >= MOST_RANKS else rank


def _candidates(directory: Path) -> list[Path]:
    return sorted((path for path in directory.rglob("*") if path.name.endswith(SUFFIXES)), key=natural_order)


def _is_copy(path: Path, directory: Path) -> bool:
    rank, point = path.parent, path.parent.parent.parent
    is_for_tensorboard = rank.parent.name == TENSORBOARD_FOLDER and point.is_relative_to(directory)
    return is_for_tensorboard and (point / f"trace_{rank.name}.json.gz").exists()


def _leads_out(path: Path, directory: Path) -> bool:
    return path.is_symlink() and not is_below(path, directory)


def _is_trace(path: Path) -> bool:
    """Returns whether the file is a trace. Results and reports are .json files too, but only traces are compressed: a
    damaged compressed file counts as a trace, so that reading it reports the damage."""
    if nsight_files.is_recording(path):
        return nsight_files.is_whole(path)
    text, whole = beginning(path)
    if _MADE_BY in text:
        return False
    known = any(f'"{key}"'.encode() in text for key in ("traceEvents", ROCPROFV3))
    return "trace" in path.name or known or (not whole and path.name.endswith(".gz"))


def beginning(path: Path) -> tuple[bytes, bool]:
    """Returns the beginning of the file's text as far as it is readable, and whether it was undamaged."""
    damage: list[str] = []
    try:
        return next(blocks(path, damage.append), b""), not damage
    except UserError:
        return b"", False


def blocks(path: Path, report_damage: Report) -> Iterator[bytes]:
    """Yields non-empty blocks of about BLOCK_BYTES at most. UserError when the file cannot be read at all.

    A damaged compressed file is read up to the damage, which is then reported.
    """
    try:
        with path.open("rb") as file:
            yield from (
                _gathered(_inflated(file, path, report_damage))
                if is_gzip(path)
                else iter(lambda: file.read(BLOCK_BYTES), b"")
            )
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a trace (.json or .json.gz) from torch.profiler.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {RECORD_AGAIN}.") from None


def is_gzip(path: Path) -> bool:
    """Returns whether the content is gzip: a file's name may not show it."""
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def _inflated(file: BinaryIO, path: Path, report_damage: Report) -> Iterator[bytes]:
    """Yields decompressed blocks. A gzip file may have several members; data after the last one is ignored."""
    pending, members, text_bytes = memoryview(b""), 0, 0
    while pending or (pending := memoryview(file.read(BLOCK_BYTES))):
        if bytes(pending[: len(GZIP_MAGIC)]) != GZIP_MAGIC[: len(pending)]:
            return
        members += 1
        if members > MANY_MEMBERS and text_bytes < members * LEAST_MEMBER_BYTES:
            members_found = f"more than {MANY_MEMBERS:,} gzip members of less than {LEAST_MEMBER_BYTES} bytes each"
            raise UserError(f"{path} has {members_found}; decompress it with `gzip -dc` first.")
        # 31: gzip's head and checksum around deflate.
        inflate = isal_zlib.decompressobj(wbits=31)
        # Data after a member is copied, so the window starts small and grows with a long member.
        window = LEAST_MEMBER_BYTES
        while not inflate.eof:
            pending = pending or memoryview(file.read(BLOCK_BYTES))
            if not pending:
                report_damage("is cut short")
                return
            chunk = pending[:window]
            try:
                block = inflate.decompress(chunk, BLOCK_BYTES)
            except isal_zlib.error as error:  # type: ignore[misc]
                report_damage(f"is damaged ({error})")
                return
            left = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            pending = pending[len(chunk) - len(left) :]
            window = min(2 * window, BLOCK_BYTES)
            text_bytes += len(block)
            if block:
                yield block


def _gathered(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields blocks with small ones joined, because each block has a fixed cost for its reader."""
    held: list[bytes] = []
    for block in blocks:
        held.append(block)
        if sum(map(len, held)) > BLOCK_BYTES // 2:
            yield b"".join(held)
            held.clear()
    if held:
        yield b"".join(held)


def as_written_and_mended(text: bytes) -> Iterator[bytes]:
    """Yields the text, and the mended text if it differs."""
    yield text
    if (other := mended(text)) != text:
        yield other


def mended(text: bytes) -> bytes:
    """Returns the text without common errors of traces: control characters, invalid UTF-8 and stray backslashes in
    names, NaN and infinities, commas before a closing bracket."""
    text = text.translate(bytes.maketrans(bytes(range(32)), b" " * 32))
    text = text.decode(errors="replace").encode()
    if b"\\" in text:
        text = _ESCAPE.sub(_right_escape, text)
    text = re.sub(rb"([:\[,]\s*)[-+]?(?:nan|inf|infinity)(?=\s*[,}\]])", rb"\1null", text, flags=re.IGNORECASE)
    return re.sub(rb",\s*([}\]])", rb"\1", text)


def _right_escape(found: re.Match[bytes]) -> bytes:
    return found[0] if found["right"] else rb"\ufffd" if found["half"] else rb"\\"


def damage_of(text: bytes) -> str:
    """Returns what is wrong with a text that does not parse even when mended."""
    for number, candidate in enumerate(as_written_and_mended(text)):
        error = error_of(candidate)
        if error is None:
            return "is not a list of events" if number == 0 else "is not valid JSON"
        if not isinstance(error, RecursionError) and position_of(error, len(candidate)) >= len(candidate):
            return "is cut short"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return f"is not valid JSON ({_ERROR_AT.sub('', str(error))})"


def error_of(text: bytes) -> Exception | None:
    """Returns the parser's error, or None."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except NO_JSON as error:
        return error
    return None


def position_of(error: Exception, length: int) -> int:
    """Returns the byte at which a text of this length is wrong."""
    if isinstance(error, UnicodeDecodeError | RecursionError):
        return 0
    found = _ERROR_AT.search(str(error))
    return int(found[1]) if found else length


def is_over(error: Exception) -> bool:
    """Returns whether the only error is text after the list."""
    return "trailing characters" in str(error)
