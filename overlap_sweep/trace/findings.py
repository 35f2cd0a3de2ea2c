"""All that is found in one trace. `python -m overlap_sweep.trace.findings` does it for several, in another process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.breakdown import PartRow, breakdown
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import TraceRow, overlap_rows


class Findings(msgspec.Struct, kw_only=True):
    """What one trace holds, or why it holds nothing."""

    rank: int | None = None
    world_size: int | None = None
    rows: list[TraceRow] = []
    """Per iteration and phase; empty where there is a problem."""
    parts: list[PartRow] = []
    """Where they were asked for."""
    warnings: list[str] = []
    """One sentence for each reason why it was read only in part."""
    problem: str | None = None
    """In a sentence, why it could not be analysed."""


class Request(msgspec.Struct):
    """What another process is asked for."""

    paths: list[str]
    with_parts: bool


def find(path: Path, with_parts: bool) -> Findings:
    try:
        trace = read_trace(path)
        activity = activity_of(trace)
        rows = overlap_rows(activity, str(path), trace.rank)
    except UserError as error:
        return Findings(problem=str(error))
    parts = breakdown(activity, str(path), trace.rank) if with_parts else []
    return Findings(rank=trace.rank, world_size=trace.world_size, rows=rows, parts=parts, warnings=trace.warnings)


def answer(request: bytes) -> bytes:
    """For a Request, as MessagePack, the list of Findings."""
    asked = msgspec.msgpack.decode(request, type=Request)
    return msgspec.msgpack.encode([find(Path(path), asked.with_parts) for path in asked.paths])


def request_for(paths: Sequence[Path], with_parts: bool) -> bytes:
    return msgspec.msgpack.encode(Request([str(path) for path in paths], with_parts))


if __name__ == "__main__":
    sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
