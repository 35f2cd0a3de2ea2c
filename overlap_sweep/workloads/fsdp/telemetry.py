"""Telemetry of training runs: one file per rank in the run directory, with one line per step, in our form or in that of
AORTA's train.py.

Times are in milliseconds, as usual for telemetry; the rest of the package has microseconds. AORTA's figures are taken
as they are: its communication is the streams `allreduce` and `reducescatter`, while all-gathers are on `aux`, together
with copies of batches, clipping and the optimizer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place

MOST_BYTES = 1 << 30
"""Largest size of a file, which is read line by line; a line has about 10 kB."""
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
    """The fields of a step that analysis reads. None for undefined values, and those that another recorder lacks."""

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
        file.write(msgspec.json.Encoder().encode_lines(records))


def overlap_of(spans_ns: Mapping[str, Sequence[tuple[int, int]]], step_ns: int) -> dict[str, Any]:
    """Returns the fields of a StepRecord that follow from its spans. `spans_ns`: (start, end) by stream, in nanoseconds
    from the step's start. Spans beyond the end of the step count, too."""
    import numpy as np

    from overlap_sweep.trace.intervals import merge

    bounds = {name: merge(np.array(spans_ns.get(name, ()), np.int64).reshape(-1, 2)).ravel() for name in STREAMS}
    moments = np.unique(np.concatenate(list(bounds.values()))).tolist()
    segments = [
        (start, end, streams)
        for start, end in pairwise(moments)
        # Within a span, an odd number of the bounds of all spans has passed.
        if (streams := [name for name in STREAMS if np.searchsorted(bounds[name], start, "right") % 2])
    ]

    def active_ns(*names: str) -> int:
        return sum(end - start for start, end, streams in segments if {*names} <= {*streams})

    busy_ns, compute_ns = active_ns(), active_ns(COMPUTE)
    streams_ns = {name: active_ns(name) for name in STREAMS}
    exposed_ns = busy_ns - compute_ns
    overlap_ns = sum(end - start for start, end, streams in segments if COMPUTE in streams and len(streams) > 1)
    shorter_ns = min(compute_ns, overlap_ns + exposed_ns)
    return {
        "step_ms": step_ns / 1e6,
        "streams_ms": {name: active / 1e6 for name, active in streams_ns.items()},
        "compute_allreduce_ms": active_ns(COMPUTE, ALL_REDUCE) / 1e6,
        "compute_reducescatter_ms": active_ns(COMPUTE, REDUCE_SCATTER) / 1e6,
        "compute_auxiliary_ms": active_ns(COMPUTE, AUXILIARY) / 1e6,
        "overlap_ms": overlap_ns / 1e6,
        "exposed_comm_ms": exposed_ns / 1e6,
        "overlap_ratio": overlap_ns / shorter_ns if shorter_ns else None,
        "utilisation": {name: active / step_ns for name, active in streams_ns.items()},
        "mean_concurrency": sum(streams_ns.values()) / busy_ns if busy_ns else 0.0,
        "max_concurrency": max((len(streams) for _, _, streams in segments), default=0),
        "active_segments": [
            Segment(start_ms=start / 1e6, end_ms=end / 1e6, streams=streams) for start, end, streams in segments
        ],
    }


_AORTA_STREAMS = dict(zip(("compute", "allreduce", "reducescatter", "aux"), STREAMS, strict=True))
"""Our names of its streams."""
_AORTA_COMM = {"allreduce", "reducescatter"}
_NO_JSON = re.compile(rb'": (NaN|-?Infinity)')
"""Undefined numbers as Python writes them."""
_ROCM_SMI = re.compile(r"^GPU\[(\d+)\]\s*: (.+?): (\d+(?:\.\d+)?)\s*$", re.MULTILINE)
"""A GPU's number, and the name and value of one of its readings."""
_ROCM_SMI_READINGS = {"power_w": ("Package Power (W)",), "temperature_c": ("junction", "edge", "Temperature")}
"""What the names of a reading contain, the best first: the second die of an MI250 has no power, MI300s no edge."""


class _AortaSegment(msgspec.Struct):
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


def read_rank(path: Path, root: Path, rank: int) -> tuple[dict[int, RankStep], str]:
    """Returns the steps of a file by number, and what is wrong with it. A last line that is cut off is ignored."""
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
    aorta = msgspec.json.decode(_NO_JSON.sub(b'": null', line), type=_AortaLine)
    overlap = aorta.profile.overlap
    compute_ms, overlap_ms = overlap.per_stream_ms.get("compute", 0.0), overlap.overlap_ms.get("compute_comm", 0.0)
    exposed_ms = sum(
        segment.end_ms - segment.start_ms
        for segment in overlap.active_segments
        if _AORTA_COMM.intersection(segment.active_streams) and "compute" not in segment.active_streams
    )
    shorter_ms = min(compute_ms, overlap_ms + exposed_ms)
    fields = {
        "step": aorta.global_step,
        "rank": aorta.rank,
        "step_ms": aorta.profile.total_ms,
        "streams_ms": {ours: overlap.per_stream_ms.get(theirs, 0.0) for theirs, ours in _AORTA_STREAMS.items()},
        "compute_allreduce_ms": overlap.overlap_ms.get("compute_allreduce", 0.0),
        "compute_reducescatter_ms": overlap.overlap_ms.get("compute_reducescatter", 0.0),
        "overlap_ms": overlap_ms,
        "exposed_comm_ms": exposed_ms,
        "overlap_ratio": overlap_ms / shorter_ms if shorter_ms > 0 else None,
        "loss": aorta.loss,
        "learning_rate": aorta.lr,
        "grad_norm": aorta.grad_norm,
        "device": _rocm_smi_readings(aorta.rocm_smi_output, aorta.rank),
        "world_size": aorta.world_size,
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
