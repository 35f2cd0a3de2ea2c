"""How the points of this process went: for the progress display (a bar on a terminal, plain lines elsewhere), the last
lines and the exit status."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.overlap import space
from overlap_sweep.overlap.kernel_shape import SEQUENTIAL
from overlap_sweep.results.run_directory import Result, Status

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_REASON = 200
"""In a line of progress; result.json has it whole."""

MOST_BYTES = 2**16


@dataclass(frozen=True)
class Outcome:
    directory: Path
    status: Status
    reason: str | None
    objective_us: float | None
    speedup: float | None
    """Over the same without overlap, of an operator in the passes that the point is about."""
    workload: str
    samples_per_s: float | None = None
    """Of a training step."""
    tokens_per_s: float | None = None
    """Of a language model's training step."""

    @property
    def name(self) -> str:
        return self.directory.name

    @classmethod
    def of(cls, result: Result, directory: Path) -> Outcome:
        samples_per_s = tokens_per_s = None
        if training := result.training:
            samples_per_s = training.samples_per_step / training.step["point"].median_us * 1e6
        if run := result.tp_training:
            # Of a failed one there may be no timed step.
            step_us = statistics.median([step.step_us for step in run.steps if not step.warmup] or [math.inf])
            tokens_per_s = run.tokens_per_step / step_us * 1e6
        return cls(
            directory,
            result.status,
            result.error,
            result.objective_us,
            _speedup(result),
            result.point["workload"]["name"],
            samples_per_s,
            tokens_per_s,
        )

    @property
    def compared(self) -> str:
        """With what it is, where it has a speedup; of a language model's step the rate."""
        if self.tokens_per_s:
            return f"{self.tokens_per_s:,.0f} tokens/s"
        reference = "sequential" if self.workload in ("kernel", "copy_engine") else "none"
        rate = f"  {self.samples_per_s:,.0f} samples/s" if self.samples_per_s else ""
        return f"{self.speedup:.3f}x {reference}{rate}"

    def __str__(self) -> str:
        if self.objective_us is not None:
            compared = f"  {self.compared}" if self.speedup or self.tokens_per_s else ""
            return f"{self.status:<8}{self.name}  {self.objective_us / 1e3:.3f} ms{compared}"
        reason = (self.reason or "").splitlines()[0]
        return f"{self.status:<8}{self.name}  {textwrap.shorten(reason, LONGEST_REASON, placeholder=' ...')}"


def _speedup(result: Result) -> float | None:
    """Over the same without overlap; None where that was not measured."""
    if result.training:
        return result.training.step["none"].median_us / result.training.step["point"].median_us
    if result.copies:
        return result.copies.times["sequential"].median_us / result.copies.times["overlapped"].median_us
    if not result.objective_us or result.tp_training:
        return None
    if result.variants:
        none = result.variants.get("none")
        return none.times["all"].median_us / result.objective_us if none else None
    if result.implementations:
        return result.implementations[SEQUENTIAL].time.median_us / result.objective_us
    touched = space.passes(result.point)
    whole_us = {name: result.times[name].none.median_us for name in space.PASSES}
    overlapped_us = sum(result.times[name].point.median_us if name in touched else us for name, us in whole_us.items())
    return sum(whole_us.values()) / overlapped_us


@dataclass
class Outcomes:
    """All of them, in the order in which they came."""

    all: list[Outcome] = field(default_factory=list)
    listener: Callable[[Outcome], None] = print
    """Hears of each that is measured."""
    say: Callable[[str], None] = print
    """For what else is to be told meanwhile."""
    expected: set[Path] = field(default_factory=set)
    """The directories of all points that were to be measured."""
    given_up: dict[Path, str] = field(default_factory=dict)
    """Why some of those have no outcome."""
    searching: bool = False
    """A search tries what may fail: that some points did is no failure of the run."""
    answered: bool = False
    """The search came to an answer, of points of this run or of an earlier one."""

    def add(self, outcome: Outcome) -> None:
        self.all.append(outcome)
        self.listener(outcome)

    def keep(self, outcome: Outcome) -> None:
        """Of a point that was measured before. A search may ask for one again and again."""
        if outcome.directory not in {other.directory for other in self.all}:
            self.all.append(outcome)

    def expect(self, directories: Iterable[Path]) -> None:
        self.expected.update(directories)

    @property
    def missing(self) -> set[Path]:
        return self.expected - {outcome.directory for outcome in self.all}

    def best(self) -> Outcome | None:
        """The largest speedup: times of different operators or TP sizes cannot be compared. Kernels, training steps and
        copies are compared by the answers that are printed about them."""
        told = ("kernel", "fsdp", "copy_engine")
        compared = [o for o in self.all if o.speedup is not None and o.workload not in told]
        return max(compared, key=lambda o: o.speedup or 0.0, default=None)

    def counts(self) -> Counter[str]:
        return Counter(outcome.status for outcome in self.all)

    def counts_line(self) -> str:
        counts: Counter[str] = self.counts()
        counts["missing"] = len(self.missing)
        shown = ("ok", "failed", "timeout", "skipped", "missing")
        return ", ".join(f"{counts[status]} {status}" for status in shown if counts[status] or status == "ok")

    def conclude(self) -> int:
        """Print the last lines of a run; the exit status: 0 when all that makes sense was measured."""
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
            reasons = dict.fromkeys(outcome.reason for outcome in self.all)
            print(f"error: no point makes sense: {'; '.join(map(str, reasons))}", file=sys.stderr)
            return 1
        print(f"{self.counts_line()}; analyse with: python analyze.py {self.directory()}")
        return int(not self.searching and counts["failed"] + counts["timeout"] > 0)

    def resume_command(self) -> str:
        """What measures only what is missing or failed."""
        given = [argument for argument in sys.argv if not argument.startswith("resume=")]
        named = any(argument.startswith("hydra.sweep.dir=") for argument in given)
        return shlex.join(["python", *given, *([] if named else [f"resume={self.directory()}"])])

    def directory(self) -> Path:
        """Where the results lie, as the user would type it."""
        if self.expected:
            return Path(os.path.relpath(next(iter(self.expected)).parent))
        directories = {outcome.directory for outcome in self.all}
        where = directories.pop() if len(directories) == 1 else Path(os.path.commonpath(directories))
        return Path(os.path.relpath(where))


outcomes = Outcomes()
"""Of this process: Hydra calls the task from many places, and only the entry point knows when all is over."""


@contextmanager
def progress(total: int, outcomes: Outcomes, console: Console | None = None) -> Iterator[None]:
    """Show every outcome that is added inside the block."""
    from rich.console import Console

    console = console or Console()
    show = _bar if console.is_terminal else _lines
    with show(total, outcomes, console):
        yield


@contextmanager
def _bar(total: int, outcomes: Outcomes, console: Console) -> Iterator[None]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total} {task.fields[counts]}"),
        TimeElapsedColumn(Column(min_width=7)),
        TextColumn("[dim]left"),
        TimeRemainingColumn(table_column=Column(min_width=7)),
        # What gives way on a narrow terminal.
        TextColumn("{task.fields[best]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("points", total=total, counts=outcomes.counts_line(), best="")

        def heard(outcome: Outcome) -> None:
            console.print(str(outcome), highlight=False, markup=False, soft_wrap=True)
            best = outcomes.best()
            shown = f"best {best.speedup:.3f}x {best.name}" if best else ""
            bar.update(task, advance=1, counts=outcomes.counts_line(), best=shown)

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        with _listening(outcomes, heard, say):
            yield


@contextmanager
def _lines(total: int, outcomes: Outcomes, console: Console) -> Iterator[None]:
    start, before = time.monotonic(), len(outcomes.all)

    def heard(outcome: Outcome) -> None:
        done, elapsed_s = len(outcomes.all) - before, time.monotonic() - start
        left_s = elapsed_s / done * (total - done)
        times = f"elapsed {elapsed_s:.0f} s, left {left_s:.0f} s"
        print(f"[{done:>{len(str(total))}}/{total}] {outcome}  ({times})", file=console.file, flush=True)

    with _listening(outcomes, heard, lambda text: print(text, file=console.file, flush=True)):
        yield
    best = outcomes.best()
    if best and not outcomes.searching:
        print(f"best    {best.name}  {best.compared}", file=console.file, flush=True)


@contextmanager
def _listening(outcomes: Outcomes, listener: Callable[[Outcome], None], say: Callable[[str], None]) -> Iterator[None]:
    before = outcomes.listener, outcomes.say
    outcomes.listener, outcomes.say = listener, say
    try:
        yield
    finally:
        outcomes.listener, outcomes.say = before


def tail(log: Path, lines: int, start: int = 0) -> str:
    """Returns the last lines of a log, of any size, from byte `start` on; empty if there is no file."""
    if not log.exists():
        return ""
    with log.open("rb") as content:
        content.seek(max(start, log.stat().st_size - MOST_BYTES))
        text = content.read(MOST_BYTES).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
