"""How the points of this process went: for the lines of progress, the last lines and the exit status."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from overlap_sweep.program import analyze_program, launch_program
from overlap_sweep.results.measured import Speedup
from overlap_sweep.results.run_directory import Result, find_points
from overlap_sweep.runtime.kept import whole_result

LONGEST_REASON = 200
"""In a line of progress; result.json has it whole."""

MOST_BYTES = 2**16


@dataclass(frozen=True)
class Outcome:
    directory: Path
    result: Result

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def compared(self) -> Speedup | None:
        """Returns how much faster the point is than the same without overlap, if that was measured."""
        return self.result.measured.compared(self.result) if self.result.measured else None

    def __str__(self) -> str:
        result = self.result
        start = f"{result.status:<8}{self.name}  "
        if result.objective_us is not None:
            rate = result.measured.rate if result.measured else ""
            told = [f"{result.objective_us:,.0f} us", str(self.compared or ""), rate]
            return start + "  ".join(filter(None, told))
        return start + textwrap.shorten(result.reason, LONGEST_REASON, placeholder=" ...")


@dataclass
class Outcomes:
    """The outcomes of all points, in the order in which they came."""

    all: list[Outcome] = field(default_factory=list)
    listener: Callable[[Outcome], None] = print
    """Hears of each that is measured."""
    expected: set[Path] = field(default_factory=set)
    """The directories of all points that were to be measured."""
    given_up: dict[Path, str] = field(default_factory=dict)
    """Why some of those have no outcome."""
    searching: bool = False
    """A search tries what may fail: that some points did is no failure of the run."""
    answered: bool = False
    """The search came to an answer, of points of this run or of an earlier one."""
    root: Path | None = None
    """The directory of the run or the sweep, as it was given."""

    def add(self, outcome: Outcome) -> None:
        self.all.append(outcome)
        self.listener(outcome)

    def keep(self, outcome: Outcome) -> None:
        """Adds the outcome of a point that was measured before, once: a search may ask for it again and again."""
        if outcome.directory not in {other.directory for other in self.all}:
            self.all.append(outcome)

    def hear_of_other_processes(self) -> None:
        """Adds the points in the sweep's directory if this process measured none: other launchers than ours run them in
        processes that it does not hear of."""
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
        """Returns the outcome with the largest speedup, of workloads whose points rank by themselves: times of
        different operators or TP sizes cannot be compared."""
        ranked = [(told.speedup, one) for one in self.all if (told := one.compared) and told.ranks]
        return max(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def counts(self) -> Counter[str]:
        return Counter(outcome.result.status for outcome in self.all)

    def counts_line(self) -> str:
        counts: Counter[str] = self.counts()
        counts["missing"] = len(self.missing)
        shown = ("ok", "failed", "timeout", "skipped", "missing")
        return ", ".join(f"{counts[status]} {status}" for status in shown if counts[status] or status == "ok")

    def conclude(self) -> int:
        """Prints the last lines of a run; returns the exit status: 0 when all that makes sense was measured."""
        counts = self.counts()
        for reason, points in Counter(self.given_up.values()).items():
            print(f"{points} missing: {reason}", file=sys.stderr)
        if self.missing:
            print(f"{self.counts_line()}; go on with: {self.resume_command()}")
            return 1
        if self.searching and not self.answered:
            return 1
        if not self.all:
            return 0
        if counts["skipped"] == len(self.all) and not self.searching:
            reasons = dict.fromkeys(outcome.result.error for outcome in self.all)
            print(f"error: no point makes sense: {'; '.join(map(str, reasons))}", file=sys.stderr)
            return 1
        print(f"{self.counts_line()}; analyse with: {analyze_program()} {shlex.quote(str(self.directory()))}")
        return int(not self.searching and counts["failed"] + counts["timeout"] > 0)

    def resume_command(self) -> str:
        """Returns the command that measures only what is missing or failed."""
        given = [argument for argument in sys.argv[1:] if not argument.startswith("resume=")]
        named = any(argument.startswith("hydra.sweep.dir=") for argument in given)
        return shlex.join([*launch_program().split(), *given, *([] if named else [f"resume={self.directory()}"])])

    def directory(self) -> Path:
        """Returns the results' directory, as the user typed it."""
        if self.root:
            return self.root
        return Path(os.path.commonpath({outcome.directory for outcome in self.all}))


outcomes = Outcomes()
"""Of this process: Hydra calls the task from many places, and only the entry point knows when all is over."""


@contextmanager
def progress(total: int, outcomes: Outcomes) -> Iterator[None]:
    """Prints a line for every outcome that is added inside the block, and at its end the best."""
    start, before = time.monotonic(), len(outcomes.all)

    def tell(outcome: Outcome) -> None:
        done, elapsed_s = len(outcomes.all) - before, time.monotonic() - start
        left_s = elapsed_s / done * (total - done)
        times = f"elapsed {elapsed_s:.0f} s, left {left_s:.0f} s"
        print(f"[{done:>{len(str(total))}}/{total}] {outcome}  ({times})", flush=True)

    outcomes.listener = tell
    try:
        yield
    finally:
        outcomes.listener = print
    best = outcomes.best()
    if best and not outcomes.searching:
        print(f"best    {best.name}  {best.compared}", flush=True)


def tail(log: Path, lines: int, start: int = 0) -> str:
    """Returns the last lines of a log, of any size, from byte `start` on; empty if there is no file."""
    if not log.exists():
        return ""
    with log.open("rb") as content:
        content.seek(max(start, log.stat().st_size - MOST_BYTES))
        text = content.read(MOST_BYTES).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
