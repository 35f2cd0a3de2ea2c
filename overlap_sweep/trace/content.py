"""The text of a trace file, decompressed, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from overlap_sweep.errors import UserError

BLOCK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"

MANY_MEMBERS = 10_000
LEAST_MEMBER_BYTES = 1024
"""Of text, on average, where there are so many. bgzip, which makes the smallest that are in use, puts 64 KiB in each;
millions of empty ones would take minutes."""

RECORD_AGAIN = "copy it again or record the trace again"

Report = Callable[[str], None]
"""Called with what is wrong, such as `is cut short`."""


def blocks(path: Path, report_damage: Report) -> Iterator[bytes]:
    """Blocks of at most BLOCK_BYTES or little more, none empty. UserError when the file cannot be read at all.

    What a damaged compressed file holds up to the damage is given; then the damage is reported and the blocks end.
    """
    try:
        with path.open("rb") as file:
            yield from _gathered(_inflated(file, path, report_damage)) if is_gzip(path) else _plain(file)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a trace (.json or .json.gz) of torch.profiler.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {RECORD_AGAIN}.") from None


def is_gzip(path: Path) -> bool:
    """The suffix is no help: files get renamed, and some tools gzip without saying so."""
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _inflated(file: BinaryIO, path: Path, report_damage: Report) -> Iterator[bytes]:
    """A gzip file may have several members; what follows the last one is no part of it."""
    pending, members, text_bytes = memoryview(b""), 0, 0
    while pending or (pending := memoryview(file.read(BLOCK_BYTES))):
        if bytes(pending[: len(GZIP_MAGIC)]) != GZIP_MAGIC[: len(pending)]:
            return
        members += 1
        if members > MANY_MEMBERS and text_bytes < members * LEAST_MEMBER_BYTES:
            said = f"more than {MANY_MEMBERS:,} gzip members of less than {LEAST_MEMBER_BYTES} bytes each"
            raise UserError(f"{path} is made of {said}; give what `gzip -dc` makes of it.")
        # 31: gzip's head and checksum around deflate.
        inflate = isal_zlib.decompressobj(wbits=31)
        # What follows a member is copied, so little is looked at before it is known to be a long one.
        window = LEAST_MEMBER_BYTES
        while not inflate.eof:
            pending = pending or memoryview(file.read(BLOCK_BYTES))
            if not pending:
                report_damage("is cut short")
                return
            given = pending[:window]
            try:
                block = inflate.decompress(given, BLOCK_BYTES)
            except isal_zlib.error as error:  # type: ignore[misc]
                report_damage(f"is damaged ({error})")
                return
            left = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            pending = pending[len(given) - len(left) :]
            window = min(2 * window, BLOCK_BYTES)
            text_bytes += len(block)
            if block:
                yield block


def _gathered(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Small ones together: each that is yielded costs its reader as much as its parsing."""
    held = bytearray()
    for block in blocks:
        if not held and len(block) > BLOCK_BYTES // 2:
            yield block
            continue
        held += block
        if len(held) > BLOCK_BYTES // 2:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)
