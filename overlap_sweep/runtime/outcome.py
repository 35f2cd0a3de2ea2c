"""How the points of this process went: for the progress display, the last lines and the exit status."""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from overlap_sweep.overlap import space
from overlap_sweep.overlap.kernel_shape import SEQUENTIAL
from overlap_sweep.results.run_directory import Result, Status

LONGEST_REASON = 200
"""In a line of progress; result.json has it whole."""


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
        speedup, measured = None, result.measured
        workload = result.point["workload"]["name"] if measured else None
        if workload == "layer":
            none = measured.variants.get("none")
            speedup = none.times["all"].median_us / result.objective_us if none and result.objective_us else None
        elif workload == "kernel":
            sequential_us = measured.implementations[SEQUENTIAL].time.median_us
            speedup = sequential_us / result.objective_us if result.objective_us else None
        elif workload == "fsdp":
            return cls._of_training(result, directory)
        elif workload == "tp_training":
            return cls._of_tp_training(result, directory)
        elif workload == "copy_engine":
            times = measured.times
            speedup = times["sequential"].median_us / times["overlapped"].median_us
        elif measured:
            touched = space.passes(result.point)
            whole_us = {name: measured.times[name].none.median_us for name in space.PASSES}
            overlapped_us = sum(
                measured.times[name].point.median_us if name in touched else us for name, us in whole_us.items()
            )
            speedup = sum(whole_us.values()) / overlapped_us
        workload = result.point["workload"]["name"]
        return cls(directory, result.status, result.error, result.objective_us, speedup, workload)

    @classmethod
    def _of_training(cls, result: Result, directory: Path) -> Outcome:
        run = result.measured
        step_us, none_us = run.step["point"].median_us, run.step["none"].median_us
        return cls(
            directory,
            result.status,
            result.error,
            result.objective_us,
            speedup=none_us / step_us,
            workload=result.point["workload"]["name"],
            samples_per_s=run.samples_per_step / step_us * 1e6,
        )

    @classmethod
    def _of_tp_training(cls, result: Result, directory: Path) -> Outcome:
        run = result.measured
        step_us = statistics.median(step.step_us for step in run.timed_steps)
        return cls(
            directory,
            result.status,
            result.error,
            result.objective_us,
            speedup=None,
            workload=result.point["workload"]["name"],
            tokens_per_s=run.tokens_per_step / step_us * 1e6,
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
