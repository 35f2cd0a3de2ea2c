"""Diagnoses trace files: groups them into runs, one trace per rank, reads them in several processes, and caches the
diagnoses under the digests of traces and code, see `overlap_sweep.cache`.

What needs numpy is imported once the other processes have been started, which import it, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.cache import code_digest
from overlap_sweep.diagnosis import Diagnosis, causes
from overlap_sweep.trace.files import (
    TraceFile,
    cache,
    cache_file,
    cached,
    cached_file,
    is_of,
    keys_of,
    missing_ranks,
    rank_of,
    read_each,
    runs_of,
)

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.facts import RankFacts, RankRead
    from overlap_sweep.diagnosis.findings import Found
    from overlap_sweep.diagnosis.losses import Seen

_KIND = "diagnoses"


@dataclass(kw_only=True)
class Run:
    """The traces of one run and their diagnosis."""

    name: str
    """Common name of the traces, with their directory."""
    files: list[TraceFile]
    """Sorted by rank; also those with a problem."""
    missing: list[int]
    """Ranks with no trace, or one that could not be read."""
    found: Found | None
    """None if no trace could be read."""
    seen: Seen | None = field(default=None, compare=False, repr=False)
    """The ranks, if they were read; None if the diagnosis was found in the cache."""


def diagnose(paths: Sequence[Path]) -> list[Diagnosis]:
    """Returns a diagnosis for each run whose traces can be read, in the order of their first trace."""
    return [run.found.diagnosis for run in read_runs(paths) if run.found]


def read_runs(paths: Sequence[Path], ranks_per_node: Mapping[Path, int] | None = None) -> list[Run]:
    """Returns the runs of these traces, in the order of their first trace. A trace whose rank is unknown is a run by
    itself. `ranks_per_node`: by trace, where it is known."""
    per_node = ranks_per_node or {}
    keys = keys_of(paths)
    known = {path: file for path, key in keys.items() if (file := cached_file(key, path, with_parts=False))}
    read = read_ranks(path for path in keys if path not in known)
    for path, one in read.items():
        cache_file(keys[path], one.file, with_parts=False)
        known[path] = one.file
    runs = grouped([known[path] for path in keys])
    from overlap_sweep.diagnosis.findings import Found, found_of
    from overlap_sweep.diagnosis.losses import seen_of

    cache_keys = {name: _key(name, own, keys, per_node) for name, own in runs.items()}
    known_runs = {name: cached(_KIND, key, Found) if key else None for name, key in cache_keys.items()}
    wanted = [path for name, own in runs.items() if not known_runs[name] for path in own if not known[path].problem]
    read |= read_ranks(path for path in wanted if path not in read)
    found = []
    for name, own in runs.items():
        files = [read[path].file if path in read else known[path] for path in own]
        by_rank = {rank: file for file in files if (rank := rank_of(file)) is not None}
        missing = missing_ranks(by_rank) if by_rank else []
        facts = [] if known_runs[name] else facts_of_ranks(files, read, per_node)
        seen = seen_of(facts) if facts else None
        if seen:
            known_runs[name] = found_of(name, files, facts, seen, missing)
            if (key := cache_keys[name]) and all(is_of(keys[file.path], file) for file in files):
                cache(_KIND, key, known_runs[name])
        found.append(Run(name=name, files=files, missing=missing, found=known_runs[name], seen=seen))
    return found


def read_ranks(paths: Iterable[Path]) -> dict[Path, RankRead]:
    """Returns what was read of each trace, without the cache."""
    wanted = list(paths)
    return dict(zip(wanted, read_each(wanted, "overlap_sweep.diagnosis.facts:read_rank"), strict=True))


def grouped(files: Sequence[TraceFile]) -> dict[str, list[Path]]:
    """Returns the traces of each run by its name, sorted by rank."""
    runs: dict[str, list[Path]] = {}
    name_of = {
        file.path: name
        for name, by_rank in runs_of(files).items()
        for file in by_rank.values()
        # The common name of a single trace is its own.
        if len(by_rank) > 1
    }
    for file in sorted(files, key=lambda file: -1 if (rank := rank_of(file)) is None else rank):
        runs.setdefault(name_of.get(file.path, str(file.path)), []).append(file.path)
    order = {file.path: number for number, file in enumerate(files)}
    return dict(sorted(runs.items(), key=lambda run: min(order[path] for path in run[1])))


def facts_of_ranks(
    files: Sequence[TraceFile], read: Mapping[Path, RankRead], per_node: Mapping[Path, int]
) -> list[RankFacts]:
    """Returns the facts of the ranks. A step that contains the profiler's start on one of them is start-up on all."""
    startup = {number for file in files for number in file.startup}
    found = []
    for file in files:
        if facts := read[file.path].facts if file.path in read else None:
            steps = [step._replace(startup=step.number in startup) for step in facts.steps]
            # If a trace does not record its rank, the file's name may have it.
            found.append(replace(facts, rank=rank_of(file), steps=steps, ranks_per_node=per_node.get(file.path)))
    return found


def _key(name: str, paths: Sequence[Path], keys: Mapping[Path, str | None], per_node: Mapping[Path, int]) -> str | None:
    """Returns a key of the traces, their nodes, and the code that reads and diagnoses them; None if one cannot be
    read."""
    if not all(keys[path] for path in paths):
        return None
    own = [(repr(path), keys[path], per_node.get(path)) for path in paths]
    return repr((*map(code_digest, (__package__, causes.__name__)), name, own))
