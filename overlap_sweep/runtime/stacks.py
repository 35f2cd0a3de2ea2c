"""Where the ranks of a point were when it was given up, or when a signal killed them: the stacks of their threads.

Each rank has a file in the run directory while it runs a point. Python's faulthandler writes to it from a thread of its
own, shortly before the launcher gives up, even while the rank is inside a library that never returns.
"""

import faulthandler
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEFORE_S = 2.0
"""Time before the limit at which a rank writes its stacks, but at most a quarter of the limit."""

INNERMOST = 4
"""Calls that are named of a rank's main thread."""

MOST_BYTES = 2**18
"""Most that is read of a rank's stacks."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_THREAD = re.compile(r"^(Current thread|Thread) ", re.MULTILINE)
_PATH_PARTS = 3


def _file(directory: Path, rank: int) -> Path:
    return directory / f".stacks_rank{rank}.tmp"


@contextmanager
def stacks_written(directory: Path, rank: int, limit_s: float) -> Iterator[None]:
    """Has this process write its stacks if the block does not end in time, or a signal such as SIGSEGV ends the
    process. After the block there is no file left."""
    path = _file(directory, rank)
    try:
        with path.open("w") as file:
            faulthandler.dump_traceback_later(limit_s - min(BEFORE_S, limit_s / 4), file=file)
            faulthandler.enable(file)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()
                faulthandler.disable()
    finally:
        path.unlink(missing_ok=True)


def gather(directory: Path, log: Path) -> list[str]:
    """Appends the stacks of all ranks to the log and removes their files. Returns a line for each rank that wrote
    some: the innermost calls of its main thread."""
    places = []
    for rank, path in sorted((int(re.sub(r"\D", "", path.name)), path) for path in directory.glob(".stacks_rank*.tmp")):
        with path.open(errors="replace") as file:
            text = file.read(MOST_BYTES)
        path.unlink()
        if not text:
            continue
        with log.open("a") as said:
            said.write(f"rank {rank}: {text.rstrip()}\n")
        if place := _place(text):
            places.append(f"rank {rank} was in {place}")
    return places


def _place(text: str) -> str:
    """Returns the innermost calls of the thread that got a signal, else of the main thread, which a dump lists last."""
    threads = _THREAD.split(text)[1:]
    current = [thread for kind, thread in zip(threads[::2], threads[1::2], strict=True) if kind == "Current thread"]
    thread = [*threads, *current][-1] if threads else ""
    frames = [frame for line in thread.splitlines() if (frame := _FRAME.match(line))]
    return ", called by ".join(
        f"{frame[3]} ({'/'.join(Path(frame[1]).parts[-_PATH_PARTS:])}:{frame[2]})" for frame in frames[:INNERMOST]
    )
