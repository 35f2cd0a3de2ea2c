"""The contract of a training run's telemetry: a file per rank in the run directory, with a line per step.

Times are in milliseconds, since that is what the field's telemetry is in; everything else here is in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from overlap_sweep.trace.intervals import Intervals, intersect, length, merge, subtract

COMPUTE, ALL_REDUCE, REDUCE_SCATTER, AUXILIARY = "compute", "all_reduce", "reduce_scatter", "auxiliary"
STREAMS = (COMPUTE, ALL_REDUCE, REDUCE_SCATTER, AUXILIARY)
"""What a span is counted as. `auxiliary`: all-gathers of parameters."""


class Segment(msgspec.Struct, kw_only=True):
    """A part of the step in which the same streams, at least one, were active. From the step's start."""

    start_ms: float
    end_ms: float
    streams: list[str]


class StepRecord(msgspec.Struct, kw_only=True):
    """One line: one step of one rank."""

    step: int
    """Counted through over the run; those under the profiler that it throws away have no line."""
    rank: int
    started: float
    """When the host began it: seconds since 1970, UTC."""
    profiled: bool = False
    """torch.profiler was on: its spans are the same, its times are longer."""
    step_ms: float
    """From its start to the end of its optimizer, on the device."""
    streams_ms: dict[str, float]
    """For how long each of STREAMS was active: unions of its spans."""
    compute_allreduce_ms: float
    """Computation and an all-reduce at once; likewise the next two."""
    compute_reducescatter_ms: float
    compute_auxiliary_ms: float
    overlap_ms: float
    """Computation and any communication at once."""
    exposed_comm_ms: float
    """Communication without computation beside it."""
    overlap_ratio: float | None
    """overlap / min(computation, communication); null without either."""
    utilisation: dict[str, float]
    """By stream, the share of the step in which it was active."""
    mean_concurrency: float
    """Streams that were active at a time, averaged over the time in which any was."""
    max_concurrency: int
    active_segments: list[Segment]
    loss: float | None
    """Mean over all ranks' samples; null where it is no number."""
    learning_rate: float
    grad_norm: float | None
    """Before clipping, over all ranks; null where it is infinite (fp16, whose step is then left out)."""
    loss_scale: float | None = None
    """Of fp16."""
    device: dict[str, float] = {}
    """The sample that was taken last before the step ended: `sm_clock_mhz`, `memory_clock_mhz`, `power_w`,
    `temperature_c`, `throttle_reasons` (NVML's bits), as far as the device tells."""
    rocm_smi_output: str | None = None
    """The same as rocm-smi put it."""


def write_metrics(path: Path, records: Iterable[StepRecord]) -> None:
    """Append; each line is whole on disk or cut off."""
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def overlap_of(spans_ns: Mapping[str, Sequence[tuple[int, int]]], step_ns: int) -> dict[str, Any]:
    """The fields of a StepRecord that follow from its spans: by stream (start, end) in nanoseconds, from the step's
    start. What reaches beyond the step is counted, too."""
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
    """Where the same streams, at least one, are active, in order."""
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
