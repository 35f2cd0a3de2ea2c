"""The outcomes of this process's points: progress lines, final lines and exit status."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from overlap_sweep.program import analyze_program, launch_program
from overlap_sweep.results.identity import instrumented
from overlap_sweep.results.measured import Speedup
from overlap_sweep.results.run_directory import Result, find_points
from overlap_sweep.runtime.kept import whole_result

LONGEST_REASON = 200
"""Longest reason in a progress line, in characters; result.json has the whole text."""

MOST_BYTES = 2**16
SLOW_S = 30.0
"""Time without an outcome after which a line says what is being measured."""


@dataclass(frozen=True)
class Outcome:
    directory: Path
    result: Result

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def compared(self) -> Speedup | None:
        """Returns the point's speedup over no overlap, if that was measured and may be compared."""
        if not self.result.measured or instrumented(self.result.point):
            return None
        return self.result.measured.compared(self.result)

    def __str__(self) -> str:
        result = self.result
        start = f"{result.status:<8}{self.name}  "
        if result.objective_us is not None:
            time_us = result.measured.shown_us(result) if result.measured else result.objective_us
            rate = result.measured.rate if result.measured else ""
            reused = f"from the store, measured {(result.started or '')[:10]}" if result.reused_from else ""
            parts = [f"{time_us:,.0f} us", str(self.compared or ""), rate, instrumented(result.point) or "", reused]
            return start + "  ".join(filter(None, parts))
        return start + textwrap.shorten(result.reason, LONGEST_REASON, placeholder=" ...")


@dataclass
class Outcomes:
    """The outcomes of all points, in order of completion."""

    all: list[Outcome] = field(default_factory=list)
    listener: Callable[[Outcome], None] = print
    """Called with each newly measured outcome."""
    expected: set[Path] = field(default_factory=set)
    """Directories of all points to measure."""
    given_up: dict[Path, str] = field(default_factory=dict)
    """Reasons of points that were given up without a result, by directory."""
    searching: bool = False
    """Whether this is a search, in which points may fail without failing the run."""
    answered: bool = False
    """Whether the search has an answer, from points of this run or of an earlier one."""
    root: Path | None = None
    """Directory of the run or sweep, as the user typed it."""
    common: Path | None = None
    """Directory that all points are below: the sweep's, or the workload's own output directory; None if there is
    neither."""

    def add(self, outcome: Outcome) -> None:
        self.all.append(outcome)
        self.listener(outcome)

    def keep(self, outcome: Outcome) -> None:
        """Adds the outcome of a point that was measured earlier, once: a search may request it repeatedly."""
        if outcome.directory not in {other.directory for other in self.all}:
            self.all.append(outcome)

    def hear_of_other_processes(self) -> None:
        """Adds the points in the sweep's directory if this process measured none: other launchers than ours run points
        in processes that don't report here."""
        if self.all or self.expected or not self.root:
            return
        self.expect(find_points(self.root))
        for directory in sorted(self.expected):
            if result := whole_result(directory):
                self.add(Outcome(directory, result))

    def expect(self, directories: Iterable[Path]) -> None:
        self.expected.update(directories)

    @property
    def missing(self) -> set[Path]:
        return self.expected - {outcome.directory for outcome in self.all}

    def best(self) -> Outcome | None:
        """Returns the outcome with the largest speedup, if the workload's points can be ranked: times of different
        operators or TP sizes cannot be compared."""
        ranked = [(found.speedup, one) for one in self.all if (found := one.compared) and found.ranks]
        return max(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def counts(self) -> Counter[str]:
        return Counter(outcome.result.status for outcome in self.all)

    def counts_line(self) -> str:
        counts: Counter[str] = self.counts()
        counts["missing"] = len(self.missing)
        shown = ("ok", "failed", "timeout", "skipped", "missing")
        return ", ".join(f"{counts[status]} {status}" for status in shown if counts[status] or status == "ok")

    def conclude(self) -> int:
        """Prints the final lines of a run; returns the exit status: 0 if every valid point was measured."""
        counts = self.counts()
        for reason, points in Counter(self.given_up.values()).items():
            print(f"{points} missing: {reason}", file=sys.stderr)
        if self.missing:
            print(f"{self.counts_line()}; resume with: {self.resume_command()}")
            return 1
        if self.searching and not self.answered:
            return 1
        if not self.all:
            return 0
        if counts["skipped"] == len(self.all) and not self.searching:
            reasons = dict.fromkeys(outcome.result.error for outcome in self.all)
            print(f"error: Every point was skipped: {'; '.join(map(str, reasons))}.", file=sys.stderr)
            return 1
        print(f"{self.counts_line()}; analyse with: {analyze_program()} {shlex.quote(str(self.directory()))}")
        return int(not self.searching and counts["failed"] + counts["timeout"] > 0)

    def resume_command(self) -> str:
        """Returns the command that measures only missing and failed points."""
        arguments = [argument for argument in sys.argv[1:] if not argument.startswith("resume=")]
        named = any(argument.startswith("hydra.sweep.dir=") for argument in arguments)
        return shlex.join([*launch_program().split(), *arguments, *([] if named else [f"resume={self.directory()}"])])

    def directory(self) -> Path:
        """Returns the results' directory, as the user typed it."""
        if self.root:
            return self.root
        return Path(os.path.commonpath({outcome.directory for outcome in self.all}))


outcomes = Outcomes()
"""The outcomes of this process. Global, since Hydra calls the task from many places and only the entry point knows when
the run is over."""


@contextmanager
def progress(total: int, outcomes: Outcomes) -> Iterator[None]:
    """Prints a line for every outcome that is added inside the block, and the best one at its end."""
    start, before = time.monotonic(), len(outcomes.all)

    def print_progress(outcome: Outcome) -> None:
        done, elapsed_s = len(outcomes.all) - before, time.monotonic() - start
        left_s = elapsed_s / done * (total - done)
        times = f"elapsed {elapsed_s:.0f} s, left {left_s:.0f} s"
        print(f"[{done:>{len(str(total))}}/{total}] {outcome}  ({times})", flush=True)

    outcomes.listener = print_progress
    try:
        yield
    finally:
        outcomes.listener = print
    best = outcomes.best()
    if best and not outcomes.searching:
        print(f"best    {best.name}  {best.compared}", flush=True)


@contextmanager
def told_how_long(name: str, limit_s: float, on_cpu: bool) -> Iterator[None]:
    """Prints for how long the point has run: after SLOW_S, and each time it has taken twice as long."""
    ended, start, where = threading.Event(), time.monotonic(), " on the CPU" if on_cpu else ""

    def tell() -> None:
        # Of all threads only the main one is woken by signals that it handles.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for waited_s in (SLOW_S * 2**number for number in count()):
            if ended.wait(start + waited_s - time.monotonic()):
                return
            print(f"running {name}  {waited_s:g} s{where} so far, {limit_s:.0f} s at most", flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def tail(log: Path, lines: int, start: int = 0) -> str:
    """Returns the last lines of a log of any size, from byte `start` on; empty if the file is missing."""
    if not log.exists():
        return ""
    with log.open("rb") as content:
        content.seek(max(start, log.stat().st_size - MOST_BYTES))
        text = content.read(MOST_BYTES).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
