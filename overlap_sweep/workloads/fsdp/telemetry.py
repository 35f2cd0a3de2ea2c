"""The format of a training run's telemetry, one file per rank in the run directory with one line per step, and its
reader, for whole run directories, for logs alone, and for those of AORTA.

Times are in milliseconds, as usual for telemetry; the rest of the package has microseconds. A file that cannot be read
gives one sentence, and the rest is analysed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.run_directory import Result, find_metrics, find_points, find_telemetry
from overlap_sweep.workloads.fsdp import aorta

if TYPE_CHECKING:
    from overlap_sweep.trace.intervals import Intervals

COMPUTE, ALL_REDUCE, REDUCE_SCATTER, AUXILIARY = "compute", "all_reduce", "reduce_scatter", "auxiliary"
STREAMS = (COMPUTE, ALL_REDUCE, REDUCE_SCATTER, AUXILIARY)
"""Kinds of spans. `auxiliary`: all-gathers of parameters."""

MOST_BYTES = 1 << 30
"""Largest size of a file, which is read line by line; a line has about 10 kB."""

Ms = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""A time in milliseconds, up to 11 days."""
_Sample = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] | None


class Device(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The last sample of a GPU before the step ended; None for values that it does not report."""

    sm_clock_mhz: _Sample = None
    memory_clock_mhz: _Sample = None
    power_w: _Sample = None
    temperature_c: _Sample = None
    throttle_reasons: float | None = None
    """NVML's bit mask."""


class Step(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of one step of one rank that analysis reads. None for undefined values, and for those that another
    recorder does not report."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    """Number of the step in the run; profiled steps that are discarded have no line."""
    rank: int
    profiled: bool = False
    """Whether torch.profiler was on: the spans are the same, but take longer."""
    step_ms: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
    """Time on the device from the step's start to the end of its optimizer."""
    streams_ms: dict[str, Ms]
    """Time in which each of STREAMS was active, as the union of its spans."""
    compute_allreduce_ms: Ms | None = None
    """Time in which computation and an all-reduce overlap; likewise the next two."""
    compute_reducescatter_ms: Ms | None = None
    compute_auxiliary_ms: Ms | None = None
    overlap_ms: Ms
    """Time in which computation and any communication overlap."""
    exposed_comm_ms: Ms
    """Time of communication with no concurrent computation."""
    overlap_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.001)] | None
    """overlap / min(computation, communication); None without either."""
    loss: float | None = None
    """Mean over all ranks' samples; None if it is NaN or infinite."""
    device: Device = Device()

    @property
    def hidden_comm_fraction(self) -> float | None:
        """Returns the share of communication that overlaps computation; None without communication."""
        comm_ms = self.overlap_ms + self.exposed_comm_ms
        return self.overlap_ms / comm_ms if comm_ms else None


class Segment(msgspec.Struct, kw_only=True):
    """A part of the step, in ms from its start, in which the active streams (at least one) did not change."""

    start_ms: float
    end_ms: float
    streams: list[str]


class StepRecord(Step, kw_only=True, frozen=True):
    """One line as it is written."""

    started: float
    """Time at which the host began the step: seconds since 1970, UTC."""
    active_segments: list[Segment]
    utilisation: dict[str, float]
    """Share of the step in which each stream was active."""
    mean_concurrency: float
    """Mean number of active streams, over the time in which any was active."""
    max_concurrency: int
    learning_rate: float
    grad_norm: float | None
    """Norm of the gradients over all ranks, before clipping; None if it is infinite (fp16 then skips the step)."""
    loss_scale: float | None = None
    """Loss scale of fp16; None for other precisions."""
    rocm_smi_output: str | None = None
    """The device's sample as printed by rocm-smi."""


def write_metrics(path: Path, records: Iterable[StepRecord]) -> None:
    """Appends the records; each line is whole on disk or cut off."""
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def overlap_of(spans_ns: Mapping[str, Sequence[tuple[int, int]]], step_ns: int) -> dict[str, Any]:
    """Returns the fields of a StepRecord that follow from its spans. `spans_ns`: (start, end) by stream, in nanoseconds
    from the step's start. Spans beyond the end of the step count, too."""
    import numpy as np

    from overlap_sweep.trace.intervals import intersect, length, merge, subtract

    unions = {name: merge(np.array(spans_ns.get(name, ()), np.int64).reshape(-1, 2)) for name in STREAMS}
    compute = unions[COMPUTE]
    comm = merge(np.concatenate([unions[name] for name in STREAMS if name != COMPUTE]))
    together = {name: length(intersect(compute, unions[name])) for name in STREAMS if name != COMPUTE}
    overlap_ns = length(intersect(compute, comm))
    shorter_ns = min(length(compute), length(comm))
    segments = list(_segments(unions))
    active_ns = sum(end - start for start, end, _ in segments)
    stream_ns = sum((end - start) * len(streams) for start, end, streams in segments)
    return {
        "step_ms": step_ns / 1e6,
        "streams_ms": {name: length(union) / 1e6 for name, union in unions.items()},
        "compute_allreduce_ms": together[ALL_REDUCE] / 1e6,
        "compute_reducescatter_ms": together[REDUCE_SCATTER] / 1e6,
        "compute_auxiliary_ms": together[AUXILIARY] / 1e6,
        "overlap_ms": overlap_ns / 1e6,
        "exposed_comm_ms": length(subtract(comm, compute)) / 1e6,
        "overlap_ratio": overlap_ns / shorter_ns if shorter_ns else None,
        "utilisation": {name: length(union) / step_ns for name, union in unions.items()},
        "mean_concurrency": stream_ns / active_ns if active_ns else 0.0,
        "max_concurrency": max((len(streams) for _, _, streams in segments), default=0),
        "active_segments": [
            Segment(start_ms=start / 1e6, end_ms=end / 1e6, streams=streams) for start, end, streams in segments
        ],
    }


def _segments(unions: Mapping[str, Intervals]) -> Iterator[tuple[int, int, list[str]]]:
    """Yields in order the intervals with unchanged active streams, at least one: (start, end, streams)."""
    moments = sorted({int(moment) for union in unions.values() for moment in union.ravel()})
    at = dict.fromkeys(unions, 0)
    for start, end in pairwise(moments):
        active = []
        for name, union in unions.items():
            while at[name] < len(union) and union[at[name], 1] <= start:
                at[name] += 1
            if at[name] < len(union) and union[at[name], 0] <= start:
                active.append(name)
        if active:
            yield start, end, active


@dataclass(frozen=True)
class Run:
    """One training run: its telemetry, and its result if that is in the same directory."""

    name: str
    """Name of its directory, or the relative path if several have the same name."""
    directory: Path
    steps: dict[int, dict[int, Step]]
    """Steps by rank and number; no rank is empty."""
    point: Point | None = None
    aorta_ranks: int | None = None
    """Number of ranks by AORTA's log; None for our own."""

    @property
    def ranks(self) -> list[int]:
        return sorted(self.steps)

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks, including those without telemetry if that is recorded."""
        if self.point:
            return int(self.point.config["distributed"]["dp_size"])
        return max(self.ranks[-1] + 1, self.aorta_ranks or 0)

    @property
    def result(self) -> Result | None:
        """Returns the point's result; None if it is not recorded."""
        return self.point.result if self.point else None

    @property
    def environment(self) -> dict[str, Any]:
        """Returns the machine's environment; empty if it is not recorded."""
        return self.result.environment if self.result else {}


@dataclass(frozen=True)
class TelemetryReading:
    """All runs at or below a directory."""

    runs: list[Run]
    problems: list[str]
    """A sentence for each file that could not be read completely."""
    warnings: list[str]
    """Caveats for the reader: missing ranks, failed runs that are left out."""


def read_telemetry(root: Path) -> TelemetryReading:
    """Returns all runs at or below `root`. UserError if there is no telemetry, or none of it can be read."""
    directories = find_telemetry(root)
    # Logs that were copied alone have no results.
    results = read_points(root) if find_points(root) else None
    points = {point.directory: point for point in results.points if point.workload == "fsdp"} if results else {}
    problems, warnings = list(results.problems) if results else [], []
    names, runs = _names(directories, root), []
    for directory in directories:
        point = points.get(directory)
        if point and point.status not in ("ok", "missing"):
            warnings.append(f"{names[directory]} is left out: {point.status}: {point.why_not_ok}")
            continue
        steps, aorta_ranks, damaged = _read_run(directory, root)
        problems += damaged
        if steps:
            runs.append(Run(names[directory], directory, steps, point, aorta_ranks))
            warnings += _cautions(runs[-1])
    if not runs:
        reason = [*problems, *warnings, "no rank_<r>_metrics.jsonl found; give a run directory."][0]
        raise UserError(f"{root} has no telemetry to compare: {reason}")
    return TelemetryReading(runs, problems, warnings)


def _read_run(directory: Path, root: Path) -> tuple[dict[int, dict[int, Step]], int | None, list[str]]:
    """Returns the steps by rank, the number of ranks if the logs are AORTA's, and a sentence for each file that could
    not be read completely."""
    found, problems, aorta_ranks = {}, [], None
    for rank, path in find_metrics(directory).items():
        try:
            check_place(path, root, MOST_BYTES)
            steps, wrong, world_size = _read_steps(path, rank)
        except (UserError, OSError) as error:
            problems.append(str(error))
            continue
        if wrong:
            more = f", and {len(wrong) - 1} more lines" if len(wrong) > 1 else ""
            problems.append(f"{path}: {wrong[0]}{more}; left out.")
        elif not steps:
            problems.append(f"{path} has no complete step; left out.")
        if steps:
            found[rank] = steps
            aorta_ranks = world_size or aorta_ranks
    return found, aorta_ranks, problems


def _read_steps(path: Path, rank: int) -> tuple[dict[int, Step], list[str], int | None]:
    """Returns the steps by number, the errors of other lines, and the number of ranks if the log is AORTA's. An
    incomplete last line is ignored, since runs may be killed."""
    steps: dict[int, Step] = {}
    wrong: list[str] = []
    aorta_ranks = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                if aorta.is_aorta(line):
                    fields, aorta_ranks = aorta.read_line(line)
                    step = msgspec.convert(fields, Step)
                else:
                    step = msgspec.json.decode(line, type=Step)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                wrong.append(f"line {number} is not a telemetry record ({error})")
                continue
            if step.rank != rank or step.step in steps:
                wrong.append(f"line {number} (rank {step.rank}, step {step.step}) is another rank's or a duplicate")
            else:
                steps[step.step] = step
    return steps, wrong, aorta_ranks


def _names(directories: list[Path], root: Path) -> dict[Path, str]:
    """Returns a unique name for each directory; `root` may be `.`."""
    own = {directory: directory.resolve().name or "run" for directory in directories}
    often = Counter(own.values())
    return {
        directory: name if often[name] == 1 else directory.relative_to(root).as_posix()
        for directory, name in own.items()
    }


def _cautions(run: Run) -> Iterator[str]:
    if run.num_ranks > len(run.ranks):
        yield f"{run.name} has telemetry of only {len(run.ranks)} of {run.num_ranks} ranks."
    if run.result and run.result.launch_bound:
        yield f"{run.name} is launch-bound: the host could not enqueue as fast as the GPU ran."
    if run.aorta_ranks:
        yield f"{run.name} {aorta.NOTE}"
    for warning in run.result.warnings if run.result else []:
        yield f"{run.name}: {warning}"
