"""Diagnoses what torch.profiler has just recorded, inside the training program: `on_trace_ready=diagnose_trace()`.

Every rank writes its trace; the first rank that has the hook reads them all and prints the findings. The ranks find
each other through the store of torch.distributed and not by a collective: that would hang, or meet one of the
training's, if a rank has no profiler.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_sweep.errors import UserError, first_line

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.profiler import profile

WAIT_S = 120.0
"""Longest time for which the rank that diagnoses waits for the traces of ranks that have the hook."""

GRACE_S = 10.0
"""Time after which a rank that has not said that it has the hook has none."""

SHORT_GRACE_S = 2.0
"""The same if the ranks could say so when they made the hook."""

SHARED_FILE_S = 5.0
"""Time that a network file system may take to show a file of another host."""

POLL_S = 0.05

TraceHandler = Callable[[Any], object]
"""What `on_trace_ready` of torch.profiler.profile takes."""

_hooks = itertools.count()


def diagnose_trace(
    directory: str | os.PathLike[str] | None = None, *, also: TraceHandler | None = None
) -> TraceHandler:
    """Returns an `on_trace_ready` for torch.profiler.profile that prints why communication is exposed, and what to try.

    `directory`: where the traces stay, as trace_rank<r>.json.gz, those of further cycles of the profiler's schedule as
    trace_cycle<n>_rank<r>.json.gz; all ranks should see it. None: the traces are deleted. `also`: another handler, such
    as torch.profiler.tensorboard_trace_handler("log"). It gets a copy, because torch exports a trace only once.

    The findings are printed by rank 0, or else by the first rank that has a profiler. It waits for the traces of the
    others, at most two minutes, and names those that are missing. What goes wrong is printed: the training goes on.
    """
    return _Hook(None if directory is None else Path(directory), also)


class _Written(msgspec.Struct, kw_only=True):
    """What a rank sends the others about its trace."""

    path: str = ""
    host: str = ""
    digest: str = ""
    """Digest of the content: another host may have another file of that name."""
    problem: str = ""
    """Why there is none."""


class _Hook:
    def __init__(self, directory: Path | None, also: TraceHandler | None) -> None:
        self._directory = directory
        self._also = also
        self._prefix = f"overlap_sweep/diagnose_trace/{next(_hooks)}"
        self._cycles = itertools.count()
        self._announced_in: Store | None = None
        self._without_hook: set[int] = set()
        store, rank, _ = _group()
        self._grace_s = SHORT_GRACE_S if store else GRACE_S
        self._announce(store, rank)

    def __call__(self, profiler: profile) -> None:
        cycle = next(self._cycles)
        store, rank, world_size = _group()
        self._announce(store, rank)
        with _going_on(), nullcontext(self._directory) if self._directory else _temporary() as place:
            folder = Path(place)
            written = _export(profiler, folder, rank, cycle, keep=self._directory is not None)
            if self._also:
                with _going_on():
                    self._also(profiler if written.problem else _Exported(profiler, Path(written.path)))
            if store:
                self._meet(_Messages(store, self._prefix), rank, world_size, cycle, written, folder)
            elif rank == 0:
                alone = "torch.distributed is not initialized, so only the trace of this rank is diagnosed."
                self._diagnose([written], [alone] if world_size > 1 else [])

    def _announce(self, store: Store | None, rank: int) -> None:
        """Announces, once, that this rank has the hook."""
        if store and self._announced_in is not store:
            _Messages(store, self._prefix).send(f"hook/{rank}", "")
            self._announced_in = store

    def _meet(
        self, messages: _Messages, rank: int, world_size: int, cycle: int, written: _Written, folder: Path
    ) -> None:
        """Gives this rank's trace to the first rank that has the hook, or gathers and diagnoses all of them."""
        messages.send(f"{cycle}/trace/{rank}", msgspec.json.encode(written).decode())
        # Rank 0 first, which may save waiting for others.
        if self._with_hook(messages, range(min(rank, 1))) or self._with_hook(messages, range(rank)):
            if self._directory is None and not written.problem:
                # The trace is deleted afterwards. The other rank may wait for a third one.
                messages.wait([f"{cycle}/taken/{rank}"], 2 * WAIT_S)
            return
        others = self._with_hook(messages, [each for each in range(world_size) if each != rank])
        notes = []
        if self._without_hook:
            without = ", ".join(map(str, sorted(self._without_hook)))
            notes.append(f"Rank {without} has no profiler with diagnose_trace().")
        answers = messages.wait([f"{cycle}/trace/{each}" for each in others], WAIT_S)
        gathered = [written]
        for each in others:
            if answer := answers.get(f"{cycle}/trace/{each}"):
                gathered.append(self._taken(msgspec.json.decode(answer, type=_Written), each, folder))
            else:
                notes.append(f"Rank {each} wrote no trace within {WAIT_S:.0f} s.")
            messages.send(f"{cycle}/taken/{each}", "")
        self._diagnose(gathered, notes)

    def _with_hook(self, messages: _Messages, ranks: Iterable[int]) -> list[int]:
        asked = [rank for rank in ranks if rank not in self._without_hook]
        found = messages.wait([f"hook/{rank}" for rank in asked], self._grace_s)
        self._without_hook |= {rank for rank in asked if f"hook/{rank}" not in found}
        return [rank for rank in asked if rank not in self._without_hook]

    def _taken(self, written: _Written, rank: int, folder: Path) -> _Written:
        """Returns another rank's trace. One that would be deleted is moved to this rank's folder."""
        if written.problem:
            return _Written(problem=f"Rank {rank}: {written.problem}")
        if not _is_here(written):
            instead = "give diagnose_trace() a directory that all ranks see"
            if self._directory is not None:
                instead = "diagnose copies of all traces together, or give a directory that all ranks see"
            return _Written(problem=f"The trace of rank {rank} is on {written.host}, not visible from here; {instead}.")
        return written if self._directory is not None else _Written(path=shutil.move(written.path, str(folder)))

    def _diagnose(self, gathered: Sequence[_Written], notes: Sequence[str]) -> None:
        """Prints the findings to stdout, as `analyze.py diagnose` does, and what is missing to stderr."""
        from overlap_sweep.commands.output import print_error, print_warning
        from overlap_sweep.diagnosis.runs import read_runs
        from overlap_sweep.report.console import console_for
        from overlap_sweep.report.diagnosis import print_diagnosis, warnings_of

        paths = [Path(one.path) for one in gathered if not one.problem]
        # torchrun's, which starts equally many ranks on each node.
        per_node = os.environ.get("LOCAL_WORLD_SIZE", "")
        runs = read_runs(paths, dict.fromkeys(paths, int(per_node)) if per_node.isdecimal() else None)
        for run in runs:
            if run.found and self._directory is None:
                # The names of traces that are deleted afterwards say nothing.
                steps = [step.step for step in run.found.diagnosis.steps]
                run.found.diagnosis.run = f"Profiled steps {min(steps)} to {max(steps)}"
        for note in (*(one.problem for one in gathered if one.problem), *notes, *warnings_of(runs)):
            print_warning(note)
        for run in runs:
            for file in run.files:
                if file.problem:
                    print_error(file.problem)
            if run.found:
                print_diagnosis(run.found, console_for(sys.stdout))
        sys.stdout.flush()


class _Messages:
    """Messages between the ranks through the store of torch.distributed. A rank that is gone sends none."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def send(self, key: str, value: str) -> None:
        with _while_there():
            self._store.set(f"{self._prefix}/{key}", value)

    def wait(self, keys: Sequence[str], most_s: float) -> dict[str, str]:
        """Returns the values of those keys that are sent within the time."""
        waiting = list(keys)
        found: dict[str, str] = {}
        end_s = time.monotonic() + most_s
        with _while_there():
            while True:
                for key in [key for key in waiting if self._store.check([f"{self._prefix}/{key}"])]:
                    found[key] = self._store.get(f"{self._prefix}/{key}").decode()
                    waiting.remove(key)
                if not waiting or time.monotonic() > end_s:
                    break
                time.sleep(POLL_S)
        return found


class _Exported:
    """A profiler whose trace is exported already: exporting it again copies the file."""

    def __init__(self, profiler: profile, path: Path) -> None:
        self._profiler = profiler
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profiler, name)

    def export_chrome_trace(self, path: str, *_: object, **__: object) -> None:
        from overlap_sweep.results.run_directory import copy_trace

        copy_trace(self._path, Path(path))


def _group() -> tuple[Store | None, int, int]:
    """Returns the store of torch.distributed, None if it is not initialized; this rank, and the number of ranks."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store(), dist.get_rank(), dist.get_world_size()
    return None, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _export(profiler: profile, folder: Path, rank: int, cycle: int, *, keep: bool) -> _Written:
    from overlap_sweep.results.run_directory import trace_file, write_trace

    path = folder / trace_file(rank, f"cycle{cycle}" if cycle else "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if keep:
            write_trace(profiler, path)
        else:
            path = path.with_suffix("")
            profiler.export_chrome_trace(str(path))
        digest = _digest(path)
    except (OSError, RuntimeError) as error:
        return _Written(problem=f"The trace could not be written to {path} ({first_line(error)}).")
    return _Written(path=str(path.absolute()), host=socket.gethostname(), digest=digest)


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="overlap_sweep_", ignore_cleanup_errors=True)


def _is_here(written: _Written) -> bool:
    """Returns whether this rank sees the very file that the other one has written."""
    path = Path(written.path)
    end_s = time.monotonic() + (SHARED_FILE_S if written.host != socket.gethostname() else 0.0)
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(POLL_S)
    try:
        return _digest(path) == written.digest
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _while_there() -> Iterator[None]:
    """Prints an error of the store: its process may have ended."""
    try:
        yield
    except RuntimeError as error:
        from overlap_sweep.commands.output import print_warning

        print_warning(f"The ranks cannot exchange where their traces are ({first_line(error)}).")


@contextmanager
def _going_on() -> Iterator[None]:
    """Prints errors instead of raising them: a diagnosis is no reason to end a training run."""
    from overlap_sweep.commands.output import print_error

    try:
        yield
    except UserError as error:
        print_error(str(error))
    except Exception:
        traceback.print_exc()
        print_error("The profiled steps could not be diagnosed (see above); training continues.")
