"""Reads the JSON of AMD's rocprofv3 into the columns of a `Trace`: kernels and copies with their times.

It has no operators, passes or steps, so all of a file is one iteration. The text is mapped instead of loaded, and only
what is used of it is decoded. The format is that of ROCprofiler-SDK's documentation ("JSON output schema").
"""

import mmap
import re
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np

from overlap_sweep.errors import UserError
from overlap_sweep.trace.columns import (
    MOST_ELEMENTS,
    NO_CORRELATION,
    NO_DETAIL,
    Detail,
    Events,
    Numbering,
    Trace,
    check_number,
)
from overlap_sweep.trace.disk import NO_JSON, RECORD_AGAIN, ROCPROFV3, beginning, blocks, is_gzip, is_over, position_of

_BEGINS = re.compile(rb'(\xef\xbb\xbf)?\s*\{\s*"%s"' % ROCPROFV3.encode())
_OTHER_FORMATS = {
    ".pftrace": "rocprofv3's Perfetto trace",
    ".otf2": "rocprofv3's OTF2 trace",
    ".db": "rocprofv3's database",
    ".csv": "a table",
}
_GPU = 2
"""Type of an agent."""
_ENDING = re.compile(r"( \[clone .*\]|\.kd)$")

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""A time in nanoseconds or a correlation that a column holds."""


class _Handle(msgspec.Struct, gc=False, frozen=True):
    handle: int = 0


class _Correlation(msgspec.Struct, gc=False):
    internal: _Number = NO_CORRELATION


class _Size(msgspec.Struct, gc=False):
    x: int = 0
    y: int = 0
    z: int = 0

    def __str__(self) -> str:
        return f"[{self.x}, {self.y}, {self.z}]"


class _DispatchInfo(msgspec.Struct, gc=False):
    kernel_id: int
    agent_id: _Handle = _Handle()
    queue_id: _Handle = _Handle()
    grid_size: _Size = msgspec.field(default_factory=_Size)
    workgroup_size: _Size = msgspec.field(default_factory=_Size)


class _Record(msgspec.Struct, gc=False):
    start_timestamp: _Number
    end_timestamp: _Number
    correlation_id: _Correlation = msgspec.field(default_factory=_Correlation)
    stream_id: _Handle | None = None
    """Only of later versions."""

    @property
    def times(self) -> tuple[int, int, int]:
        return self.start_timestamp, max(self.start_timestamp, self.end_timestamp), self.correlation_id.internal


class _Dispatch(_Record, gc=False, kw_only=True):
    dispatch_info: _DispatchInfo


class _Copy(_Record, gc=False):
    src_agent_id: _Handle = _Handle()
    dst_agent_id: _Handle = _Handle()
    bytes: Annotated[int, msgspec.Meta(ge=0, lt=MOST_ELEMENTS)] | None = None


class _Symbol(msgspec.Struct):
    kernel_id: int
    kernel_name: str = ""
    demangled_kernel_name: str = ""


class _Agent(msgspec.Struct):
    id: _Handle
    type: int = 0


class _Records(msgspec.Struct):
    kernel_dispatch: list[msgspec.Raw] = []
    memory_copy: list[msgspec.Raw] = []


class _Process(msgspec.Struct):
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []
    buffer_records: _Records = msgspec.field(default_factory=_Records)


class _File(msgspec.Struct):
    processes: list[_Process] | _Process = msgspec.field(name=ROCPROFV3)


def is_rocprofv3(path: Path) -> bool:
    """Returns whether the file is rocprofv3's JSON. UserError for a format that is not read, by its name."""
    if what := _OTHER_FORMATS.get(path.suffix):
        raise UserError(
            f"{path} is {what}, which is not read; record with rocprofv3 --output-format json, or give a trace of "
            "torch.profiler."
        )
    return _BEGINS.match(beginning(path)[0]) is not None


def read_rocprofv3(path: Path) -> Trace:
    """Returns the kernels and copies of the only process in the file that has any. UserError if it is damaged, has
    none, or has those of several processes."""
    with _mapped(path) as text:
        try:
            found = msgspec.json.decode(text, type=_File).processes
        except NO_JSON as error:
            raise UserError(f"{path} {_damage(error, len(text))}; {RECORD_AGAIN}.") from None
        read = ((one, one.buffer_records) for one in (found if isinstance(found, list) else [found]))
        processes = [one for one, records in read if records.kernel_dispatch or records.memory_copy]
        if not processes:
            raise UserError(
                f"{path} has neither kernels nor copies; record with rocprofv3 --kernel-trace --memory-copy-trace."
            )
        if len(processes) > 1:
            raise UserError(
                f"{path} has kernels of {len(processes)} processes, of which only one can be read; have rocprofv3 "
                "write a file for each (its default)."
            )
        return _trace(path, processes[0])


def _damage(error: Exception, length: int) -> str:
    if isinstance(error, msgspec.ValidationError):
        return f"is JSON of rocprofv3 but not in a known form ({error})"
    short = not is_over(error) and position_of(error, length) >= length
    return "is cut short" if short else f"is not valid JSON ({error})"


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Yields the text in memory that the system can take back; that of a compressed file from a temporary one."""
    with tempfile.TemporaryFile() as plain:
        if is_gzip(path):
            damage: list[str] = []
            for block in blocks(path, damage.append):
                plain.write(block)
            plain.flush()
            if damage:
                raise UserError(f"{path} {damage[0]}; {RECORD_AGAIN}.")
        with path.open("rb") as file:
            # Not closed here: what was decoded may refer to it for a moment longer.
            yield mmap.mmap((plain if is_gzip(path) else file).fileno(), 0, access=mmap.ACCESS_READ)


class _Row(NamedTuple):
    label: tuple[str, str]
    lane: tuple[str, str]
    detail: Detail
    times: tuple[int, int, int]
    """Start and end in nanoseconds, and the correlation."""


def _trace(path: Path, process: _Process) -> Trace:
    labels, lanes = Numbering[tuple[str, str]](), Numbering[tuple[str, str]]()
    details = Numbering[Detail]()
    details[NO_DETAIL]
    left_out: list[str] = []
    numbers = array("q")
    for row in _rows(process, left_out):
        numbers.extend((labels[row.label], lanes[row.lane], details[row.detail], *row.times))
        check_number(path, labels, "names of kernels", "fewer steps")
        check_number(path, details, "sizes of kernels and copies", "fewer steps")
    if not numbers:
        raise UserError(f"{path} has no usable kernel or copy ({left_out[0]}); {RECORD_AGAIN}.")
    columns = np.array(numbers, np.int64).reshape(-1, 6).T
    label, lane, detail = columns[:3].astype(np.int32)
    start_ns, end_ns, correlation = columns[3:]
    device = Events(label, lane, start_ns, end_ns, correlation, np.full(len(label), NO_CORRELATION), detail)
    nothing = device[np.zeros(len(device), bool)]
    return Trace(
        rank=None,
        world_size=None,
        base_time_ns=0,
        labels=list(labels),
        lanes=list(lanes),
        details=list(details),
        groups={},
        device=device,
        launches=nothing,
        host=nothing,
        forward=np.zeros(0, bool),
        modules=nothing,
        functions=nothing,
        warnings=[f"{path}: {len(left_out)} malformed records were left out ({one})." for one in left_out[:1]],
        has_passes=False,
    )


def _rows(process: _Process, left_out: list[str]) -> Iterator[_Row]:
    gpus = [agent.id.handle for agent in process.agents if agent.type == _GPU]
    names = {symbol.kernel_id: _name(symbol) for symbol in process.kernel_symbols}
    queues = Numbering[int]()

    def lane(agent: _Handle, record: _Record, queue: str) -> tuple[str, str]:
        device = f"GPU {gpus.index(agent.handle)}" if agent.handle in gpus else "host"
        return device, f"stream {record.stream_id.handle}" if record.stream_id else queue

    for kernel in _decoded(process.buffer_records.kernel_dispatch, _Dispatch, left_out):
        info = kernel.dispatch_info
        yield _Row(
            ("kernel", names.get(info.kernel_id, f"kernel {info.kernel_id}")),
            lane(info.agent_id, kernel, f"queue {queues[info.queue_id.handle]}"),
            Detail(shape=f"{info.grid_size} {info.workgroup_size}"),
            kernel.times,
        )
    for copy in _decoded(process.buffer_records.memory_copy, _Copy, left_out):
        source, target = (agent.handle in gpus for agent in (copy.src_agent_id, copy.dst_agent_id))
        peer = source and target and copy.src_agent_id != copy.dst_agent_id
        kind = "PtoP" if peer else f"{'D' if source else 'H'}to{'D' if target else 'H'}"
        agent = copy.src_agent_id if source else copy.dst_agent_id
        where = lane(agent, copy, f"copies {kind}")
        yield _Row(("gpu_memcpy", f"Memcpy {kind}"), where, Detail(bytes=copy.bytes), copy.times)


_T = TypeVar("_T", bound=_Record)


def _decoded(records: Sequence[msgspec.Raw], kind: type[_T], left_out: list[str]) -> Iterator[_T]:
    decoder = msgspec.json.Decoder(kind)
    for record in records:
        try:
            yield decoder.decode(record)
        except msgspec.ValidationError as error:
            left_out.append(str(error))


def _name(symbol: _Symbol) -> str:
    """Returns the whole name of a kernel: what rocprofv3 shows may be cut, by its option --truncate-kernels."""
    return _ENDING.sub("", symbol.demangled_kernel_name or symbol.kernel_name)
