"""Files in a command's working folder that look like snapshots: what one run writes there, the next one may load."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

from overlap_sweep.report.numbers import some_of

ENDINGS = (".pt", ".pth", ".ckpt", ".safetensors", "_model.bin", "optimizer.bin", ".distcp", ".pth.tar", ".pt.tar")
"""How names of snapshots end."""
MOST_ENTRIES = 10_000
"""Names that are looked at in a working folder, the nearest first."""
DEEPEST = 4
"""Levels of folders that are looked at."""

Listing = dict[str, tuple[int, int]]
"""Size and time of change of each file, by its path in the working folder."""


def snapshots(folder: Path, directory: Path) -> Listing:
    """Returns what looks like a snapshot in a working folder, except in run directories, where no other run loads it.
    `directory`: that of the point."""
    found: Listing = {}
    run = directory.resolve()
    if folder.resolve().is_relative_to(run):
        return found
    for entry in _files(folder, {str(run), str(run.parent)}):
        if entry.name.endswith(ENDINGS):
            try:
                status = entry.stat()
            except OSError:
                # It has just been removed or renamed.
                continue
            found[os.path.relpath(entry.path, folder.resolve())] = (status.st_size, status.st_mtime_ns)
    return found


def _files(folder: Path, left_out: Collection[str]) -> Iterator[os.DirEntry[str]]:
    """Yields a folder's files, level by level and without hidden folders, in which environments and caches are."""
    seen, waiting = 0, deque([(str(folder.resolve()), 1)])
    while waiting:
        path, level = waiting.popleft()
        try:
            entries = list(os.scandir(path))
        except OSError:
            # Others' folders may be unreadable, or just removed.
            continue
        for entry in entries:
            seen += 1
            if seen > MOST_ENTRIES:
                return
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif level < DEEPEST and not entry.name.startswith(".") and entry.path not in left_out:
                waiting.append((entry.path, level + 1))


def warnings(before: Listing, after: Listing) -> list[str]:
    """Returns sentences on what a command has written."""
    new = [name for name in after if name not in before]
    again = [name for name in after if name in before and after[name] != before[name]]
    instead = "give each run its own by {run} in an argument, or by job.directory={run} and the script's whole path."
    found = []
    if again:
        found.append(
            f"A run found {some_of(again)} in job.directory and wrote it anew: it may have gone on where an earlier "
            f"run ended, so runs may not be alike; {instead}"
        )
    if new:
        found.append(f"A run wrote {some_of(new)} into job.directory, which a later one may load; {instead}")
    return found


def hint(before: Listing) -> str:
    """Returns why a command may have had nothing left to train; empty if there was no snapshot."""
    return f"; it found {some_of(before)} in job.directory, perhaps of a finished training run" if before else ""
