"""The format of a training run's telemetry: one file per rank in the run directory, with one line per step.

Times are in milliseconds, as usual for telemetry; the rest of the package has microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

if TYPE_CHECKING:
    from overlap_sweep.trace.intervals import Intervals

COMPUTE, ALL_REDUCE, REDUCE_SCATTER, AUXILIARY = "compute", "all_reduce", "reduce_scatter", "auxiliary"
STREAMS = (COMPUTE, ALL_REDUCE, REDUCE_SCATTER, AUXILIARY)
"""Kinds of spans. `auxiliary`: all-gathers of parameters."""

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


class RankStep(msgspec.Struct, kw_only=True, frozen=True):
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
    learning_rate: float | None = None
    grad_norm: float | None = None
    """Norm of the gradients over all ranks, before clipping; None if it is infinite (fp16 then skips the step)."""
    device: Device = Device()

    @property
    def comm_ms(self) -> float:
        return self.overlap_ms + self.exposed_comm_ms

    @property
    def hidden_comm_fraction(self) -> float | None:
        """Returns the share of communication that overlaps computation; None without communication."""
        return self.overlap_ms / self.comm_ms if self.comm_ms else None


class AortaStep(RankStep, kw_only=True, frozen=True):
    """A step that AORTA's train.py recorded; the loss is rank 0's."""

    world_size: int


class Segment(msgspec.Struct, kw_only=True):
    """A part of the step, in ms from its start, in which the active streams (at least one) did not change."""

    start_ms: float
    end_ms: float
    streams: list[str]


class StepRecord(RankStep, kw_only=True, frozen=True):
    """One line as it is written."""

    started: float
    """Time at which the host began the step: seconds since 1970, UTC."""
    active_segments: list[Segment]
    utilisation: dict[str, float]
    """Share of the step in which each stream was active."""
    mean_concurrency: float
    """Mean number of active streams, over the time in which any was active."""
    max_concurrency: int
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
