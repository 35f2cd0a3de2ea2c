"""What a launch says while it runs: its first line, a line for every outcome, and what it is doing meanwhile."""

import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from shutil import get_terminal_size

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.gpus import elsewhere
from overlap_sweep.report.numbers import as_duration, counted, shortened, some_of, visible
from overlap_sweep.runtime.group_config import machine_of
from overlap_sweep.runtime.outcome import Outcome, Outcomes, outcomes

LINES_AFTER_S = (4.0, 10.0, 20.0, 40.0)
"""Times after which a log file gets a line on what goes on; from then on one every REPEATED_S."""
REPEATED_S = 60.0
LATE_S = 10.0
"""Time below which those of a search's later runs get none."""
REDRAWN_S = 1.0
"""Interval in which a terminal's line is drawn anew."""
_CLEARED = "\r\x1b[K"


class _Doing:
    """What this process is doing. Global, since only the innermost call knows and only the outermost one reports."""

    what = ""


_doing = _Doing()


def now_doing(what: str) -> None:
    """Names what the next lines of `shown_waiting` say; has no effect outside."""
    _doing.what = what


def measuring(name: str, limit_s: float) -> str:
    """Returns what is done while a point is measured."""
    return f"measuring {name}, at most {as_duration(limit_s)}"


@contextmanager
def shown_waiting(what: str) -> Iterator[None]:
    """Says what goes on inside the block and for how long: on a terminal in one line that is drawn anew every second
    and removed at the end, elsewhere in lines that become rarer."""
    ended, start, on_terminal = threading.Event(), time.monotonic(), sys.stdout.isatty()
    now_doing(what)

    def show() -> None:
        # Of all threads only the main one is woken by signals that it handles.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # How long the runs of a search take is known from the first one.
        is_known = outcomes.searching and outcomes.measured
        late_s = [after_s for after_s in LINES_AFTER_S if after_s > LATE_S or not is_known]
        in_log = chain(late_s, (REPEATED_S * number for number in count(1)))
        for waited_s in (REDRAWN_S * number for number in count(1)) if on_terminal else in_log:
            if ended.wait(max(0.0, start + waited_s - time.monotonic())):
                break
            line = visible(f"... {as_duration(waited_s)} {_doing.what}")
            if on_terminal:
                # A line that wraps could not be removed.
                print(f"{_CLEARED}{shortened(line, get_terminal_size().columns - 1)}", end="", flush=True)
            else:
                print(line, flush=True)
        if on_terminal:
            print(_CLEARED, end="", flush=True)

    def show_while_read() -> None:
        # Nobody reads any more: the main thread, which alone can end the process, finds out with its next line.
        with suppress(BrokenPipeError):
            show()

    thread = threading.Thread(target=show_while_read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def announce(points: Collection[ResolvedPoint], outcomes: Outcomes) -> None:
    """Prints the first line of a launch, once: what is measured, on which device, and where it is written."""
    if outcomes.announced or not points:
        return
    outcomes.announced = True
    first, *_ = points
    tokens = sorted({point.workload.tokens for point in points if getattr(point.workload, "tokens", None)})
    what = [some_of(dict.fromkeys(map(_subject, points)), most=2)]
    what += [f"{some_of(tokens, most=2)} tokens"] if tokens else []
    how_many = "a search" if outcomes.searching else counted(len(points), "point")
    print(visible(f"{', '.join(what)}, {how_many} on {_device(first)}: {outcomes.root}"), flush=True)


def _device(point: ResolvedPoint) -> str:
    if point.runtime.device == "cpu":
        return "the CPU (the answer holds for this CPU only)"
    names = [] if elsewhere() else machine_of(point).get("gpus") or []
    return some_of(dict.fromkeys(names), most=2) or "GPUs"


def _subject(point: ResolvedPoint) -> str:
    return f"{point.workload.name} {point.model.name}"


@contextmanager
def progress(total: int, outcomes: Outcomes) -> Iterator[None]:
    """Prints a line for every outcome that is added inside the block. A search, which enters a block for each of its
    rounds, counts its points and its time over all of them: how many there will be is not known."""
    start, before = time.monotonic(), outcomes.measured + len(outcomes.given_up)

    def print_progress(outcome: Outcome) -> None:
        if outcomes.searching:
            used = as_duration(time.monotonic() - outcomes.began_s)
            print(visible(f"[{outcomes.measured}] {outcome}  ({used}{outcomes.limits})"), flush=True)
            return
        done = outcomes.measured + len(outcomes.given_up) - before
        elapsed_s = time.monotonic() - start
        # The first point also starts processes.
        known = 1 < done < total
        left = f", about {as_duration(elapsed_s / done * (total - done))} left" if known else ""
        number = f"{done:>{len(str(total))}}/{total}"
        print(visible(f"[{number}] {outcome}  ({as_duration(elapsed_s)}{left})"), flush=True)

    outcomes.listener = print_progress
    try:
        yield
    finally:
        outcomes.listener = print
