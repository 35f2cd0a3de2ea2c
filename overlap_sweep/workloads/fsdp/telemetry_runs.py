"""Read the telemetry of training runs: of whole run directories, or of logs that were copied alone.

Whoever wrote the files: what cannot be read becomes one sentence for each file, and the rest is analysed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.run_directory import find_metrics, find_points, find_telemetry
from overlap_sweep.trace.directories import links_out
from overlap_sweep.workloads.fsdp.result import TrainingRun

MOST_BYTES = 1 << 30
"""Of one file, which is read line by line: a line has some 10 kB."""
MOST_LINE_BYTES = 64 << 20
MOST_WRONG_LINES = 1000
"""After so many the rest of a file is not looked at."""
FEW_NAMES = 3
"""Of runs, in a sentence about many."""

Ms = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""Up to 11 days."""
_Number = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Sample = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] | None


class Device(msgspec.Struct, frozen=True):
    """What the device told last before the step ended, as far as analysis relies on it; None is not told."""

    sm_clock_mhz: _Sample = None
    power_w: _Sample = None
    temperature_c: _Sample = None


class Step(msgspec.Struct, kw_only=True, frozen=True):
    """The part of a telemetry.StepRecord that analysis relies on: without its segments, which are most of a line."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    rank: int
    profiled: bool = False
    step_ms: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
    streams_ms: dict[str, Ms]
    compute_allreduce_ms: Ms | None = None
    compute_reducescatter_ms: Ms | None = None
    compute_auxiliary_ms: Ms | None = None
    overlap_ms: Ms
    exposed_comm_ms: Ms
    overlap_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.001)] | None
    utilisation: dict[str, _Number] = {}
    mean_concurrency: _Number | None = None
    max_concurrency: _Number | None = None
    loss: float | None = None
    """None where it is no number any more."""
    grad_norm: float | None = None
    device: Device = Device()

    @property
    def hidden_share(self) -> float | None:
        """The share of its communication that has computation beside it; None without communication."""
        comm_ms = self.overlap_ms + self.exposed_comm_ms
        return self.overlap_ms / comm_ms if comm_ms else None


@dataclass(frozen=True)
class Run:
    """One training run: its telemetry, and its result where that lies beside it."""

    name: str
    """Its directory's; with those above it where several have the same."""
    directory: Path
    steps: dict[int, dict[int, Step]]
    """By rank and number of the step, none empty."""
    point: Point | None = None

    @property
    def ranks(self) -> list[int]:
        return sorted(self.steps)

    @property
    def measured(self) -> TrainingRun | None:
        """What was measured besides; None where that is not recorded."""
        measured = self.point.result.measured if self.point and self.point.result else None
        return measured if isinstance(measured, TrainingRun) else None

    @property
    def environment(self) -> dict[str, Any]:
        """Of the machine; empty where it is not recorded."""
        return self.point.result.environment if self.point and self.point.result else {}


@dataclass(frozen=True)
class TelemetryReading:
    """All runs at or below a directory."""

    root: Path
    runs: list[Run]
    problems: list[str]
    """A sentence for each file that could not be read, or not whole."""
    warnings: list[str]
    """What a reader must know: ranks that are missing, runs that failed and are left out."""


def read_telemetry(root: Path) -> TelemetryReading:
    """Read all runs at or below `root`. UserError when there is no telemetry, or none of it can be read."""
    directories = find_telemetry(root)
    points, problems, warnings = _points(root)
    problems += [
        f"{link} is a link that leads out of {root}, so it is not read; copy the directory there."
        for link in links_out(root)
        if link.is_dir() and find_metrics(link)
    ]
    names = _names(directories, root)
    runs: list[Run] = []
    for directory in directories:
        point = points.get(directory)
        if not directory.relative_to(root).as_posix().isprintable():
            problems.append(f"{str(directory)!a} has a name that cannot be shown, so it is not read; rename it.")
            continue
        if point and point.status not in ("ok", "missing"):
            warnings.append(f"{names[directory]} is left out: {point.status}: {point.why_not_ok}")
            continue
        steps, damaged = _read_run(directory, root)
        problems += damaged
        if steps:
            runs.append(Run(names[directory], directory, steps, point))
            warnings += _cautions(runs[-1])
    warnings += _launch_bound(runs)
    warnings += [
        f"{point.name} is left out: it has no telemetry beside its result; copy its rank_<r>_metrics.jsonl, too."
        for directory, point in points.items()
        if point.workload == "fsdp" and point.status == "ok" and directory not in names
    ]
    if not runs:
        reason = [*problems, *warnings][:1] or ["it holds no rank_<r>_metrics.jsonl; give a run's directory."]
        raise UserError(f"{root} has no telemetry to compare: {reason[0]}")
    return TelemetryReading(root, runs, problems, warnings)


def read_steps(path: Path, rank: int) -> tuple[dict[int, Step], str | None]:
    """By number; and in one sentence what of the file could not be read: lines that are damaged, or all from a too long
    one on. A last line without its end is left out without a word, since runs are killed."""
    steps: dict[int, Step] = {}
    wrong: list[str] = []
    unread = ""
    for number, line in _lines(path):
        if len(line) > MOST_LINE_BYTES:
            unread = f"line {number} has more than {MOST_LINE_BYTES >> 20} MiB: it and what follows is not read"
            break
        if len(wrong) == MOST_WRONG_LINES:
            unread = f"line {number} and what follows is not read"
            break
        if not line.endswith(b"\n"):
            break
        step = _step(line)
        if isinstance(step, str):
            wrong.append(f"line {number} is no telemetry of a step ({step})")
        elif step.rank != rank:
            wrong.append(f"line {number} is of rank {step.rank}")
        elif step.step in steps:
            wrong.append(f"line {number} has step {step.step} once more")
        else:
            steps[step.step] = step
    more = f", and {len(wrong) - 1} more lines" if len(wrong) > 1 else ""
    said = [*(f"{first}{more}: left out" for first in wrong[:1]), *filter(None, [unread])]
    return steps, f"{path}: {'; '.join(said)}." if said else None


def _step(line: bytes) -> Step | str:
    """Or why it is none."""
    try:
        return msgspec.json.decode(line, type=Step)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """With their numbers; of one that is too long no more than shows that it is."""
    with path.open("rb") as file:
        for number in count(1):
            line = file.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            yield number, line


def _read_run(directory: Path, root: Path) -> tuple[dict[int, dict[int, Step]], list[str]]:
    """By rank; and what could not be read."""
    found, problems = {}, []
    for rank, path in find_metrics(directory).items():
        try:
            check_place(path, root, MOST_BYTES)
            steps, problem = read_steps(path, rank)
        except UserError as error:
            problems.append(str(error))
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read ({error.strerror}); copy it again.")
            continue
        if problem:
            problems.append(problem)
        if steps:
            found[rank] = steps
        elif not problem:
            problems.append(f"{path} has no whole step; remove it.")
    return found, problems


def _points(root: Path) -> tuple[dict[Path, Point], list[str], list[str]]:
    """By directory, of whatever workload; problems and warnings. Logs that were copied alone have none."""
    if not find_points(root):
        return {}, [], []
    reading = read_points(root)
    others = Counter(point.workload for point in reading.points if point.workload != "fsdp")
    warnings = [
        f"{root} also has {number} result{'s' if number > 1 else ''} of workload={workload}, left out; "
        "give directories without telemetry to compare them."
        for workload, number in others.items()
    ]
    return {point.directory: point for point in reading.points}, list(reading.problems), warnings


def _names(directories: list[Path], root: Path) -> dict[Path, str]:
    """`root` may be `.`."""
    own = {directory: directory.resolve().name or "run" for directory in directories}
    often = Counter(own.values())
    return {
        directory: name if often[name] == 1 else directory.relative_to(root).as_posix()
        for directory, name in own.items()
    }


def _launch_bound(runs: Sequence[Run]) -> list[str]:
    """At most one sentence."""
    names = [run.name for run in runs if run.point and run.point.result and run.point.result.launch_bound]
    if not names:
        return []
    why = "the host could not enqueue as fast as the GPU ran"
    if len(names) == 1:
        return [f"{names[0]} is launch-bound: {why}."]
    more = f", and {len(names) - FEW_NAMES} more" if len(names) > FEW_NAMES else ""
    return [f"{len(names)} runs are launch-bound, {why}: {', '.join(names[:FEW_NAMES])}{more}."]


def _cautions(run: Run) -> list[str]:
    found = []
    expected = run.ranks[-1] + 1
    if run.point and run.point.workload == "fsdp":
        expected = int(run.point.config["distributed"]["dp_size"])
    missing = expected - len(run.ranks)
    if missing > 0:
        found.append(f"{run.name} has the telemetry of {len(run.ranks)} of {expected} ranks.")
    if run.point and run.point.status == "missing":
        found.append(f"{run.name} has no result: it was given up, or is still running.")
    if run.point and run.point.result:
        found += [f"{run.name}: {warning}" for warning in run.point.result.warnings]
    return found
