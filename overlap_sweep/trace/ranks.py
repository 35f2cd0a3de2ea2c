"""The ranks of a run beside each other: which is the slowest, by how much, and whose trace is missing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from overlap_sweep.trace.files import TraceFile
from overlap_sweep.trace.kineto import MOST_RANKS
from overlap_sweep.trace.overlap import PhaseSummary, summarise

_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
_TENSORBOARD_NAME = re.compile(r"\.pt\.trace\.json(\.gz)?$")
_DIGITS = re.compile(r"\d+")


class RankRow(msgspec.Struct, kw_only=True):
    """One phase of a run with several ranks. Of every rank the median over its iterations but start-up, in
    microseconds."""

    run: str
    phase: str
    num_ranks: int
    world_size: int | None
    """None when no trace says."""
    missing: str | None
    """The ranks whose traces are not there, or could not be analysed."""
    slowest_rank: int
    slowest_us: float
    """Its span."""
    fastest_rank: int
    fastest_us: float
    skew_us: float
    """Between the two."""
    exposed_comm_us: float
    """Of the slowest rank, like what follows."""
    wait_us: float
    overlap_ratio: float | None
    startup_iterations: int
    """How many of the slowest rank are left out as start-up."""


class RunRanks(msgspec.Struct, kw_only=True):
    """What was recorded together: one trace a rank."""

    name: str
    """The files' common name, their directory with it."""
    world_size: int | None
    """None when no trace says."""
    ranks: list[int]
    """Whose traces could be analysed."""
    missing: list[int]
    """Whose are not there, or could not be."""
    rows: list[RankRow]
    """By phase; empty with fewer than two ranks."""


def ranks_of(files: Sequence[TraceFile]) -> list[RunRanks]:
    """Runs in the order of their first file. Traces that tell no rank, in themselves or in their names, are in none."""
    runs: dict[str, dict[int, TraceFile]] = {}
    for file in {file.path: file for file in files}.values():
        if (rank := rank_of(file)) is None:
            continue
        name = common = run_name(file.path)
        # A second trace of the same rank belongs to another run of that name.
        numbers = itertools.count(2)
        while rank in runs.setdefault(name, {}):
            name = f"{common} ({next(numbers)})"
        runs[name][rank] = file
    return [_ranks_of_run(name, of_run) for name, of_run in runs.items()]


def rank_of(file: TraceFile) -> int | None:
    """As the trace has it; of one that doesn't say, or that cannot be read, as its name or its directory's has it."""
    if file.rank is not None:
        return file.rank
    in_name = _RANK_IN_NAME.search(file.path.name) or _RANK_IN_NAME.search(file.path.parent.name)
    rank = int(in_name[1]) if in_name else None
    return None if rank is None or rank >= MOST_RANKS else rank


def run_name(path: Path) -> str:
    """What the traces of one run have in common: everything but the rank, or what may stand for it.

    Where the file's name doesn't say its rank, its directory's may; else the rank may be hidden in any of the name's
    numbers. torch.profiler's own `<host>_<process>.<time>.pt.trace.json` may come from several hosts.
    """
    for part in (path, path.parent):
        if _RANK_IN_NAME.search(part.name):
            return str(part.with_name(_RANK_IN_NAME.sub("rank*", part.name)) / path.relative_to(part))
    if own := _TENSORBOARD_NAME.search(path.name):
        return str(path.with_name(f"*{own[0]}"))
    return str(path.with_name(_DIGITS.sub("*", path.name)))


def _ranks_of_run(name: str, files: dict[int, TraceFile]) -> RunRanks:
    world_size = max((file.world_size or 0 for file in files.values()), default=0) or None
    read = {rank: file for rank, file in sorted(files.items()) if not file.problem}
    missing = sorted(set(range(world_size or max(files) + 1)) - set(read))
    by_phase: dict[str, dict[int, PhaseSummary]] = {}
    for rank, file in read.items():
        for summary in summarise(file.steady_rows):
            by_phase.setdefault(summary.phase, {})[rank] = summary
    rows = []
    for phase, of_phase in by_phase.items() if len(read) > 1 else ():
        slowest, fastest = (pick(of_phase, key=lambda rank: of_phase[rank].span_us) for pick in (max, min))
        summary = of_phase[slowest]
        rows.append(
            RankRow(
                run=name,
                phase=phase,
                num_ranks=len(of_phase),
                world_size=world_size,
                missing=",".join(map(str, missing)) or None,
                slowest_rank=slowest,
                slowest_us=summary.span_us,
                fastest_rank=fastest,
                fastest_us=of_phase[fastest].span_us,
                skew_us=summary.span_us - of_phase[fastest].span_us,
                exposed_comm_us=summary.exposed_comm_us,
                wait_us=summary.wait_us,
                overlap_ratio=summary.overlap_ratio,
                startup_iterations=len(read[slowest].startup),
            )
        )
    return RunRanks(name=name, world_size=world_size, ranks=list(read), missing=missing, rows=rows)
