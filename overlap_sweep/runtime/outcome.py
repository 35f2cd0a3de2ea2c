"""The outcomes of this process's points, final lines and exit status; the signals that stop it: SIGTERM at once, and
SIGUSR2, which cluster managers send ahead of a time limit or a preemption, after the running point."""

import os
import shlex
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.errors import in_words
from overlap_sweep.hydra_adapter.overrides import as_typed
from overlap_sweep.program import analyze_program, launch_program, stdout_is_closed
from overlap_sweep.report.numbers import visible
from overlap_sweep.results.identity import instrumented
from overlap_sweep.results.run_directory import Result, find_points
from overlap_sweep.runtime.kept import whole_result

if TYPE_CHECKING:
    from overlap_sweep.trackers.tracking import LaunchTracking

LONGEST_REASON = 200
"""Longest reason in a progress line, in characters; result.json has the whole text."""

MOST_BYTES = 2**16


@dataclass(frozen=True)
class Outcome:
    directory: Path
    result: Result

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def compared(self) -> str | None:
        """Returns how the point compares with no overlap, in words, if that was measured and may be compared."""
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
            parts = [f"{time_us:,.0f} us", self.compared or "", rate, instrumented(result.point) or "", reused]
            return visible(start + "  ".join(filter(None, parts)))
        return visible(start + in_short(result.reason))


def in_short(reason: str) -> str:
    """Returns a reason that fits into one line."""
    return textwrap.shorten(reason, LONGEST_REASON, placeholder=" ...")


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
    announced: bool = False
    """Whether the launch's first line was printed."""
    measured: int = 0
    """Number of points that this process measured."""
    began_s: float = field(default_factory=time.monotonic)
    limits: str = ""
    """The budget of a search, in words."""
    resumed_by: Callable[[Path], Sequence[str]] | None = None
    """Returns the words that go on in a directory, of a command that launches for its user; None: launch itself."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What that command's user types for options, by their names; launch's are typed as they are called."""
    may_resume: bool = True
    """False where the same command would end with the same error."""
    wants_report: bool = False
    """Whether this is a sweep that ends with its report."""
    report: Path | None = None
    """The page that was written, if any."""
    tracking: "LaunchTracking | None" = None
    """Logs each newly measured point; None: nothing does."""

    def option(self, name: str, value: float | None = None) -> str:
        """Returns an option as its user types it, with a value if one is given."""
        typed = self.options.get(name, name)
        return typed if value is None else f"{typed}{' ' if typed.startswith('--') else '='}{value:g}"

    def add(self, outcome: Outcome) -> None:
        self.all.append(outcome)
        self.measured += 1
        self.listener(outcome)
        if self.tracking:
            self.tracking.add(outcome.directory)

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

    def give_up(self, directory: Path, error: OSError) -> None:
        """Gives up a point without a result. Raises the error if it is that nobody reads what is printed."""
        if isinstance(error, BrokenPipeError) and stdout_is_closed():
            raise error
        if error.errno is not None:
            # A failed write has no name.
            error.filename = error.filename or str(directory)
        self.given_up[directory] = in_words(error)

    def expect(self, directories: Iterable[Path]) -> None:
        self.expected.update(directories)

    @property
    def missing(self) -> set[Path]:
        return self.expected - {outcome.directory for outcome in self.all}

    def counts(self) -> Counter[str]:
        return Counter(outcome.result.status for outcome in self.all)

    def counts_line(self) -> str:
        counts: Counter[str] = self.counts()
        counts["missing"] = len(self.missing)
        shown = ("ok", "failed", "timeout", "skipped", "missing")
        return ", ".join(f"{counts[status]} {status}" for status in shown if counts[status] or status == "ok")

    def conclude(self) -> int:
        """Prints the final lines of a run, the last of which is what to do next; returns the exit status: 0 if every
        valid point was measured."""
        counts = self.counts()
        for reason, points in Counter(self.given_up.values()).items():
            print(visible(f"{points} missing: {reason}"), file=sys.stderr)
        if self.missing:
            print(f"{self.counts_line()}; resume with: {self.resume_command()}")
            return 1
        if self.searching and not self.answered:
            return 1
        if not self.all:
            return 0
        if counts["skipped"] == len(self.all) and not self.searching:
            reasons = dict.fromkeys(outcome.result.error for outcome in self.all)
            print(visible(f"error: Every point was skipped: {'; '.join(map(str, reasons))}."), file=sys.stderr)
            return 1
        analysis = f"{analyze_program()} {shlex.quote(str(self.directory()))}"
        print(f"{self.counts_line()}; next: {f'open {shlex.quote(str(self.report))}' if self.report else analysis}")
        return int(not self.searching and counts["failed"] + counts["timeout"] > 0)

    def resume_command(self) -> str:
        """Returns the command that measures only missing and failed points."""
        if self.resumed_by:
            return shlex.join(self.resumed_by(self.directory()))
        arguments = [as_typed(argument) for argument in sys.argv[1:] if not argument.startswith("resume=")]
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


def tail(log: Path, lines: int, start: int = 0) -> str:
    """Returns the last lines of a log of any size, from byte `start` on; empty if the file is missing."""
    if not log.exists():
        return ""
    with log.open("rb") as content:
        content.seek(max(start, log.stat().st_size - MOST_BYTES))
        text = content.read(MOST_BYTES).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])


STOP_AFTER_POINT = signal.SIGUSR2
STOP_NOW = signal.SIGTERM


class Stopped(KeyboardInterrupt):
    """Stopped by a signal, like Ctrl-C: a running point leaves no result."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.exit_status = 128 + number


_stop_signal: signal.Signals | None = None


def listen() -> None:
    """Installs the signal handlers; call in the main thread."""
    signal.signal(STOP_AFTER_POINT, _after_the_point)
    signal.signal(STOP_NOW, _now)


def stop_if_requested() -> None:
    """Raises `Stopped` after a stop signal; called before each point."""
    if _stop_signal is not None:
        raise Stopped(_stop_signal)


def _after_the_point(number: int, frame: object) -> None:
    global _stop_signal
    _stop_signal = signal.Signals(number)
    # A handler may run in the middle of a print.
    os.write(sys.stderr.fileno(), f"{_stop_signal.name}: stops after the running point\n".encode())


def _now(number: int, frame: object) -> None:
    # Cluster managers may send it twice, as Slurm does; the second must not interrupt the cleanup after the first.
    signal.signal(STOP_NOW, signal.SIG_IGN)
    raise Stopped(signal.Signals(number))
