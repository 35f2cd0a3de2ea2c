"""Reads the telemetry that AORTA's train.py writes (`rank_00_metrics.jsonl`, a line per step) as fields of a `Step`.

Its figures are taken as they are. Its communication is the streams `allreduce` and `reducescatter`: all-gathers are on
`aux`, together with copies of batches, clipping and the optimizer.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

NOTE = (
    "is AORTA's log: its communication is all-reduces and reduce-scatters alone; auxiliary has all-gathers, copies of "
    "batches, clipping and the optimizer; the loss is rank 0's."
)

STREAMS = {"compute": "compute", "allreduce": "all_reduce", "reducescatter": "reduce_scatter", "aux": "auxiliary"}
"""Our names of its streams."""
_COMM = {"allreduce", "reducescatter"}

_Ms = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class _Segment(msgspec.Struct):
    """A time in which the active streams did not change, perhaps none."""

    start_ms: _Ms
    end_ms: _Ms
    active_streams: list[str]


class _Overlap(msgspec.Struct):
    per_stream_ms: dict[str, _Ms]
    overlap_ms: dict[str, _Ms]
    """Without the combinations that did not occur."""
    active_segments: list[_Segment]


class _Profile(msgspec.Struct):
    total_ms: _Ms
    overlap: _Overlap


class _Line(msgspec.Struct):
    rank: int
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=2**20)]
    global_step: int
    profile: _Profile
    loss: float | None = None


class AortaStep(NamedTuple):
    fields: dict[str, Any]
    """The fields of a `Step`, unchecked."""
    world_size: int


def is_aorta(line: bytes) -> bool:
    """Returns whether a line of telemetry is in AORTA's form."""
    return b'"profile"' in line and b'"streams_ms"' not in line


def read_line(line: bytes) -> AortaStep:
    """Returns the step of a line. DecodeError, of msgspec, if it is in another form."""
    # Python writes an undefined loss as NaN, which is not JSON.
    read = msgspec.json.decode(line.replace(b'"loss": NaN', b'"loss": null'), type=_Line)
    overlap = read.profile.overlap
    compute_ms, overlap_ms = overlap.per_stream_ms.get("compute", 0.0), overlap.overlap_ms.get("compute_comm", 0.0)
    exposed_ms = _together_ms(overlap.active_segments, _COMM, without="compute")
    shorter_ms = min(compute_ms, overlap_ms + exposed_ms)
    fields = {
        "step": read.global_step,
        "rank": read.rank,
        "step_ms": read.profile.total_ms,
        "streams_ms": {ours: overlap.per_stream_ms.get(theirs, 0.0) for theirs, ours in STREAMS.items()},
        "compute_allreduce_ms": overlap.overlap_ms.get("compute_allreduce", 0.0),
        "compute_reducescatter_ms": overlap.overlap_ms.get("compute_reducescatter", 0.0),
        "overlap_ms": overlap_ms,
        "exposed_comm_ms": exposed_ms,
        "overlap_ratio": overlap_ms / shorter_ms if shorter_ms > 0 else None,
        "loss": read.loss,
    }
    return AortaStep(fields, read.world_size)


def _together_ms(segments: list[_Segment], streams: set[str], without: str) -> float:
    """Returns the time in which any of the streams was active and `without` was not."""
    return sum(
        segment.end_ms - segment.start_ms
        for segment in segments
        if streams.intersection(segment.active_streams) and without not in segment.active_streams
    )
