"""The text of a trace file, decompressed, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from overlap_sweep.errors import UserError

BLOCK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"

RECORD_AGAIN = "copy it again or record the trace again"

Report = Callable[[str], None]
"""Called with what is wrong, such as `is cut short`."""


def blocks(path: Path, report_damage: Report) -> Iterator[bytes]:
    """Blocks of at most BLOCK_BYTES or little more, none empty. UserError when the file cannot be read at all.

    What a damaged compressed file holds up to the damage is given; then the damage is reported and the blocks end.
    """
    try:
        with path.open("rb") as file:
            yield from _inflated(file, report_damage) if is_gzip(path) else _plain(file)
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


def _inflated(file: BinaryIO, report_damage: Report) -> Iterator[bytes]:
    """A gzip file may have several members; what follows the last one is no part of it."""
    pending = b""
    while pending or (pending := file.read(BLOCK_BYTES)):
        if not pending.startswith(GZIP_MAGIC[: len(pending)]):
            return
        # 31: gzip's head and checksum around deflate.
        inflate = isal_zlib.decompressobj(wbits=31)
        while not inflate.eof:
            pending = pending or file.read(BLOCK_BYTES)
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
