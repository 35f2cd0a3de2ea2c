"""Reads the traces that torch.profiler (Kineto) exports into numpy columns.

Only complete events (`ph` X) of devices, of launches and of CPU operators are kept. Times become integer nanoseconds
at once: Kineto writes microseconds with three decimals, and sums of floats would not be exact.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.errors import UserError

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation"})
LAUNCH_SUFFIXES = ("_runtime", "_driver")
"""cuda_runtime, cuda_driver, and what other devices call theirs. HIP's calls are filed under cuda_runtime."""

OLD_CATEGORIES = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
}
"""How older versions of PyTorch called them."""

NO_CORRELATION = -1

RECORD_AGAIN = "copy it again or record the trace again"


@dataclass(frozen=True)
class Events:
    """Events as columns of equal length, in the order of the file."""

    label: NDArray[np.int32]
    """Index into Trace.labels."""
    lane: NDArray[np.int32]
    """A number for each pair of process and thread on the host, of device and stream on a device."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    correlation: NDArray[np.int64]
    """Joins device events to the launch that caused them; NO_CORRELATION where there is none."""

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Events:
        return Events(
            self.label[chosen],
            self.lane[chosen],
            self.start_ns[chosen],
            self.end_ns[chosen],
            self.correlation[chosen],
        )

    @property
    def intervals(self) -> NDArray[np.int64]:
        return np.stack((self.start_ns, self.end_ns), axis=1)


@dataclass(frozen=True)
class Trace:
    """One rank's trace."""

    rank: int | None
    world_size: int | None
    labels: list[tuple[str, str]]
    """The different pairs of category and name."""
    lanes: list[tuple[str, str]]
    """The different pairs of process and thread, or of device and stream."""
    device: Events
    """Kernels, copies and sets. NCCL's annotations on the GPU are left out: they repeat its kernels."""
    launches: Events
    """Calls of the runtime or driver that may have caused device events."""
    host: Events
    """CPU operators and annotations."""


class _Args(msgspec.Struct, gc=False):
    correlation: int | float | str | None = None


class _Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    args: _Args | None = None


class _DistributedInfo(msgspec.Struct):
    rank: int | str | None = None
    world_size: int | str | None = None


class _Document(msgspec.Struct, rename="camel"):
    trace_events: list[_Event]
    distributed_info: _DistributedInfo | None = None


class _Columns:
    """Grows one Events."""

    def __init__(self) -> None:
        self.label: list[int] = []
        self.lane: list[int] = []
        self.start_us: list[float] = []
        self.duration_us: list[float] = []
        self.correlation: list[int] = []

    def events(self) -> Events:
        start_ns = _nanoseconds(self.start_us)
        return Events(
            np.array(self.label, np.int32),
            np.array(self.lane, np.int32),
            start_ns,
            # A damaged file may hold negative durations, which are no intervals.
            start_ns + np.maximum(_nanoseconds(self.duration_us), 0),
            np.array(self.correlation, np.int64),
        )


def read_trace(path: Path | str) -> Trace:
    """Read a trace, `.json` or gzipped. UserError when it is missing, cut short, no trace, or without events."""
    content = _read_bytes(Path(path))
    try:
        document = _decode(content)
        trace = _to_trace(document)
    except msgspec.ValidationError as error:
        raise UserError(f"{path} is JSON but no profiler trace ({error}); give one of torch.profiler's.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        damage = "is cut short" if "truncated" in str(error) else f"is no valid JSON ({error})"
        raise UserError(f"{path} {damage}; {RECORD_AGAIN}.") from None
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path} holds a malformed number ({error}); {RECORD_AGAIN}.") from None
    if not len(trace.device) and not len(trace.host):
        raise UserError(
            f"{path} holds neither GPU kernels nor CPU operators; record the trace with the activities CPU and CUDA."
        )
    return trace


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        # The suffix is no help: files get renamed, and some tools gzip without saying so.
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a trace (.json or .json.gz) of torch.profiler.") from None
    except EOFError:
        raise UserError(f"{path} is cut short; {RECORD_AGAIN}.") from None
    except (OSError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path} cannot be read ({reason}); {RECORD_AGAIN}.") from None
    if not content.strip():
        raise UserError(f"{path} is empty; {RECORD_AGAIN}.")
    return content


def _decode(content: bytes) -> _Document:
    if content.lstrip()[:1] == b"[":
        return _Document(msgspec.json.decode(content, type=list[_Event]))
    return msgspec.json.decode(content, type=_Document)


def _to_trace(document: _Document) -> Trace:
    labels: dict[tuple[str, str], int] = {}
    lanes: dict[tuple[str, str], int] = {}
    device, launches, host = _Columns(), _Columns(), _Columns()
    for event in document.trace_events:
        if event.ph != "X" or event.cat is None or event.ts is None:
            continue
        category = OLD_CATEGORIES.get(event.cat, event.cat)
        if category in HOST_CATEGORIES:
            columns = host
        elif category in DEVICE_CATEGORIES:
            columns = device
        elif category.endswith(LAUNCH_SUFFIXES):
            columns = launches
        else:
            continue
        label, lane = (category, event.name or ""), (str(event.pid), str(event.tid))
        correlation = event.args.correlation if event.args else None
        columns.label.append(labels.setdefault(label, len(labels)))
        columns.lane.append(lanes.setdefault(lane, len(lanes)))
        columns.start_us.append(float(event.ts))
        columns.duration_us.append(float(event.dur or 0))
        columns.correlation.append(NO_CORRELATION if correlation is None else int(correlation))
    info = document.distributed_info or _DistributedInfo()
    return Trace(
        rank=None if info.rank is None else int(info.rank),
        world_size=None if info.world_size is None else int(info.world_size),
        labels=list(labels),
        lanes=list(lanes),
        device=device.events(),
        launches=launches.events(),
        host=host.events(),
    )


def _nanoseconds(microseconds: list[float]) -> NDArray[np.int64]:
    """Rounded to integers; exact for three decimals up to 2^43 us (100 days) and for whole numbers at any time."""
    values = np.array(microseconds, np.float64)
    if not np.all(np.abs(values) < 2**53):
        raise ValueError("a time beyond 285 years")
    whole = np.floor(values)
    # Multiplying the whole number as a float would lose digits of times that count from 1970.
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
