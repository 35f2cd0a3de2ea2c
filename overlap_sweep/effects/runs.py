"""Reads the fingerprints of recordings, in several processes, and caches them under the digests of traces and code."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from overlap_sweep.cache import code_digest
from overlap_sweep.diagnosis.facts import facts_of
from overlap_sweep.effects.fingerprint import Fingerprint, fingerprint_of
from overlap_sweep.effects.rests import Spent, spent_of
from overlap_sweep.trace.files import (
    TraceFile,
    cache,
    cached,
    is_of,
    key_of,
    rank_of,
    read_each,
    read_with_trace,
    run_name,
)

_KIND = "fingerprints"


class RankPrint(msgspec.Struct):
    """A trace and its fingerprint."""

    file: TraceFile
    print: Fingerprint | None
    """None if there is a problem."""
    spent: list[Spent] = []
    """What its calls of Transformer Engine's functions spent."""


class Recording(msgspec.Struct):
    """The traces of one run."""

    name: str
    directory: Path
    prints: list[Fingerprint]
    """By rank."""
    problems: list[str]
    """A sentence for each trace that could not be read."""


def read_rank(path: Path) -> RankPrint:
    """Reads a trace and returns its fingerprint, without the cache."""
    file, trace, activity = read_with_trace(path, with_parts=False)
    if trace is None or activity is None:
        return RankPrint(file, None)
    facts = facts_of(trace, file.startup, activity)
    found = fingerprint_of(facts)
    if found.rank is None:
        found.rank = rank_of(file)
    return RankPrint(file, found, spent_of(trace, activity, facts.steady_steps))


def read_prints(paths: Sequence[Path]) -> dict[Path, RankPrint]:
    """Returns what was read of each trace."""
    code = " ".join(map(code_digest, (__package__, "overlap_sweep.diagnosis")))
    keys = {path: key_of(path) for path in paths}
    found = {
        path: one for path, key in keys.items() if key and (one := cached(_KIND, f"{code} {key} {path!r}", RankPrint))
    }
    missing = [path for path in keys if path not in found]
    for path, one in zip(missing, read_each(missing, f"{__name__}:read_rank"), strict=True):
        if is_of(keys[path], one.file):
            cache(_KIND, f"{code} {keys[path]} {path!r}", one)
        found[path] = one
    return found


def recordings(paths: Sequence[Path]) -> list[Recording]:
    """Returns the recordings that the traces are of: those whose names differ only in the rank are one."""
    read = read_prints(paths)
    by_run: dict[str, list[RankPrint]] = {}
    for path in paths:
        by_run.setdefault(run_name(path), []).append(read[path])
    return [
        Recording(
            name=name if len(own) > 1 else str(own[0].file.path),
            directory=own[0].file.path.parent,
            prints=sorted((one.print for one in own if one.print), key=lambda print: print.rank or 0),
            problems=[one.file.problem for one in own if one.file.problem],
        )
        for name, own in by_run.items()
    ]
