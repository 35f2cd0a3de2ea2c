"""Reads training runs from their telemetry: of whole run directories, of logs alone, and of AORTA's train.py.

A file that cannot be read gives one sentence, and the rest is analysed. AORTA's figures are taken as they are: its
communication is the streams `allreduce` and `reducescatter`, while all-gathers are on `aux`, together with copies of
batches, clipping and the optimizer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import find_metrics, find_points, find_telemetry
from overlap_sweep.workloads.fsdp.runs import Run
from overlap_sweep.workloads.fsdp.telemetry import AortaStep, RankStep

MOST_BYTES = 1 << 30
"""Largest size of a file, which is read line by line; a line has about 10 kB."""

_AORTA_STREAMS = {
    "compute": "compute",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "aux": "auxiliary",
}
"""Our names of its streams."""
_AORTA_COMM = {"allreduce", "reducescatter"}
_NO_JSON = re.compile(rb'": (NaN|-?Infinity)')
"""Undefined numbers as Python writes them."""
_ROCM_SMI = re.compile(r"^GPU\[(\d+)\]\s*: (.+?): (\d+(?:\.\d+)?)\s*$", re.MULTILINE)
"""A GPU's number, and the name and value of one of its readings."""
_ROCM_SMI_READINGS = {"power_w": ("Package Power (W)",), "temperature_c": ("junction", "edge", "Temperature")}
"""What the names of a reading contain, the best first: the second die of an MI250 has no power, MI300s no edge."""


@dataclass(frozen=True)
class Dataset:
    """All runs at or below a directory that have at least two steps that count."""

    label: str
    path: Path
    runs: list[Run]
    problems: list[str]
    """A sentence for each file that could not be read completely, and for each run that is too short."""
    warnings: list[str]
    """Caveats for the reader: missing ranks, failed runs that are left out."""


def read_dataset(label: str, path: Path) -> Dataset:
    """Returns the runs at or below `path`. UserError if there is none."""
    directories = find_telemetry(path)
    # Logs that were copied alone have no results.
    results = read_points(path) if find_points(path) else None
    points = {point.directory: point for point in results.points if point.workload == "fsdp"} if results else {}
    own_names = {directory: directory.resolve().name or "run" for directory in directories}
    often = Counter(own_names.values())
    runs: list[Run] = []
    short: list[Run] = []
    problems, warnings = list(results.problems) if results else [], []
    for directory, own_name in own_names.items():
        name = own_name if often[own_name] == 1 else directory.relative_to(path).as_posix()
        point = points.get(directory)
        if point and point.status not in ("ok", "missing"):
            warnings.append(f"{name} is left out: {point.status}: {point.why_not_ok}")
            continue
        read = {rank: _read_rank(file, path, rank) for rank, file in find_metrics(directory).items()}
        problems += [problem for _, problem in read.values() if problem]
        if by_rank := {rank: steps for rank, (steps, _) in read.items() if steps}:
            run = Run(name, directory, by_rank, point)
            warnings += _cautions(run)
            (runs if len(run.counted) > 1 else short).append(run)
    problems += [
        f"{run.directory} has fewer than two steps of all ranks after warm-up, not profiled; train for more steps."
        for run in short
    ]
    if not runs and not short:
        reason = [*problems, *warnings, "no rank_<r>_metrics.jsonl found; give a run directory."][0]
        raise UserError(f"{path} has no telemetry to compare: {reason}")
    if not runs:
        raise UserError(problems[0])
    warnings += [run.describe_dips() for run in runs if run.dips]
    return Dataset(label, path, runs, problems, [f"{label}: {warning}" for warning in warnings])


def _read_rank(path: Path, root: Path, rank: int) -> tuple[dict[int, RankStep], str]:
    """Returns the steps of a file by number, and what is wrong with it in a sentence; empty if nothing. An incomplete
    last line is ignored, since runs may be killed."""
    steps: dict[int, RankStep] = {}
    wrong: list[str] = []
    try:
        check_place(path, root, MOST_BYTES)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    step = read_step(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    wrong.append(f"line {number} is not a telemetry record ({error})")
                    continue
                if step.rank != rank or step.step in steps:
                    wrong.append(f"line {number} (rank {step.rank}, step {step.step}) is another rank's or a duplicate")
                else:
                    steps[step.step] = step
    except (UserError, OSError) as error:
        return {}, str(error)
    if wrong:
        more = f", and {len(wrong) - 1} more lines" if len(wrong) > 1 else ""
        return steps, f"{path}: {wrong[0]}{more}; left out."
    return steps, "" if steps else f"{path} has no complete step; left out."


def read_step(line: bytes) -> RankStep:
    """Returns the step of a line, in our form or in AORTA's. DecodeError, of msgspec, if it is in neither."""
    if b'"profile"' not in line or b'"streams_ms"' in line:
        return msgspec.json.decode(line, type=RankStep)
    return _from_aorta(msgspec.json.decode(_NO_JSON.sub(b'": null', line), type=_AortaLine))


def _cautions(run: Run) -> Iterator[str]:
    if run.num_ranks > len(run.ranks):
        yield f"{run.name} has telemetry of only {len(run.ranks)} of {run.num_ranks} ranks."
    if run.result and run.result.launch_bound:
        yield f"{run.name} is launch-bound: the host could not enqueue as fast as the GPU ran."
    if run.aorta_ranks:
        yield (
            f"{run.name} is AORTA's log: its communication is all-reduces and reduce-scatters alone; auxiliary has "
            "all-gathers, copies of batches, clipping and the optimizer; the loss is rank 0's."
        )
    for warning in run.result.warnings if run.result else []:
        yield f"{run.name}: {warning}"


class _AortaSegment(msgspec.Struct):
    """A time in which the active streams did not change, perhaps none."""

    start_ms: float
    end_ms: float
    active_streams: list[str]


class _AortaOverlap(msgspec.Struct):
    per_stream_ms: dict[str, float]
    overlap_ms: dict[str, float]
    """Without the combinations that did not occur."""
    active_segments: list[_AortaSegment]


class _AortaProfile(msgspec.Struct):
    total_ms: float
    overlap: _AortaOverlap


class _AortaLine(msgspec.Struct):
    rank: int
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=2**20)]
    global_step: int
    profile: _AortaProfile
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    rocm_smi_output: str = ""
    """What rocm-smi prints of all GPUs of the machine."""


def _from_aorta(line: _AortaLine) -> AortaStep:
    """Returns the step. ValidationError, of msgspec, for values that no step has."""
    overlap = line.profile.overlap
    compute_ms, overlap_ms = overlap.per_stream_ms.get("compute", 0.0), overlap.overlap_ms.get("compute_comm", 0.0)
    exposed_ms = sum(
        segment.end_ms - segment.start_ms
        for segment in overlap.active_segments
        if _AORTA_COMM.intersection(segment.active_streams) and "compute" not in segment.active_streams
    )
    shorter_ms = min(compute_ms, overlap_ms + exposed_ms)
    fields = {
        "step": line.global_step,
        "rank": line.rank,
        "step_ms": line.profile.total_ms,
        "streams_ms": {ours: overlap.per_stream_ms.get(theirs, 0.0) for theirs, ours in _AORTA_STREAMS.items()},
        "compute_allreduce_ms": overlap.overlap_ms.get("compute_allreduce", 0.0),
        "compute_reducescatter_ms": overlap.overlap_ms.get("compute_reducescatter", 0.0),
        "overlap_ms": overlap_ms,
        "exposed_comm_ms": exposed_ms,
        "overlap_ratio": overlap_ms / shorter_ms if shorter_ms > 0 else None,
        "loss": line.loss,
        "learning_rate": line.lr,
        "grad_norm": line.grad_norm,
        "device": _rocm_smi_readings(line.rocm_smi_output, line.rank),
        "world_size": line.world_size,
    }
    return msgspec.convert(fields, AortaStep)


def _rocm_smi_readings(text: str, rank: int) -> dict[str, float]:
    """Returns power and temperature of the rank's GPU. Each GPU of the machine has a rank, in the order of numbers."""
    lines = _ROCM_SMI.findall(text)
    numbers = sorted({int(number) for number, _, _ in lines})
    own = [(name, value) for number, name, value in lines if int(number) == numbers[rank % len(numbers)]]
    found = {
        reading: [value for word in words for name, value in own if word in name]
        for reading, words in _ROCM_SMI_READINGS.items()
    }
    return {reading: float(values[0]) for reading, values in found.items() if values}
