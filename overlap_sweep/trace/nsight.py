"""Reads one rank of an SQLite export of Nsight Systems into the columns of a `Trace`.

Tables and columns are those of NVIDIA's "SQLite Export Schema Reference". Versions differ: what an export does not have
is left out. Rows are fetched some thousands at a time.
"""

import re
import sqlite3
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.errors import UserError
from overlap_sweep.trace import MOST_RANKS, nvtx
from overlap_sweep.trace.activity import launches_of
from overlap_sweep.trace.columns import (
    MOST_ELEMENTS,
    NO_CORRELATION,
    NO_DETAIL,
    Detail,
    Events,
    Numbering,
    ProcessGroup,
    Trace,
    check_number,
    concatenated,
)
from overlap_sweep.trace.disk import RECORD_AGAIN, rank_in_name
from overlap_sweep.trace.nsight_files import (
    KERNELS,
    STRINGS,
    Source,
    columns_of,
    export_of,
    file_of,
    opened,
    process_in,
    rank_on_node,
    source_of,
    sources_of,
)

_ROWS = 1 << 14
"""Rows that are fetched at a time."""

_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
"""Kinds of copies as Kineto calls them; the last three are of managed memory."""
_MEMORY = dict(enumerate(("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")))
_UNKNOWN = "Unknown"
_WHOLE_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
"""CUDA graphs of which nsys recorded no kernels."""

_NESTED, _ANYWHERE = (59, 70), (60, 71)
"""Event types of NVTX ranges that are pushed and popped on one thread, and of those that start and end anywhere."""

_VERSION = re.compile(r"(_ptsz)?_v\d+$")
"""What calls of CUDA have at their end, such as cudaLaunchKernel_v7000."""
_AUTOGRAD_THREAD = "pt_autograd_"
_NCCL_KERNEL = re.compile(r"nccl(Sym\w*?)?(Dev)?Kernel")
_RANK_VARIABLES = {
    **{"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"},
    **{"PMI_RANK": "PMI_SIZE", "SLURM_PROCID": "SLURM_NTASKS"},
}
"""Variables with the rank of a process and with the number of ranks, what says most first."""

_NOTHING = Events(*(np.empty(0, column) for column in (*[np.int32] * 2, *[np.int64] * 4, np.int32)))


@dataclass
class _Reading:
    """An export that is being read, and the numbers that labels, lanes and details have got so far."""

    path: Path
    database: sqlite3.Connection
    source: Source
    labels: Numbering[tuple[str, str]] = field(default_factory=Numbering)
    lanes: Numbering[tuple[str, str]] = field(default_factory=Numbering)
    details: Numbering[Detail] = field(default_factory=Numbering)

    def columns(self, table: str) -> frozenset[str]:
        return columns_of(self.database, table)

    def strings(self, query: str) -> list[str]:
        return [text for (text,) in self.database.execute(query)]

    def name(self, string: int) -> str:
        found = self.database.execute(f"SELECT value FROM {STRINGS} WHERE id = ?", (string,)).fetchone()
        return found[0] if found else ""

    def thread(self, serialized: int, kind: str = "") -> int:
        """Returns the lane of a globalTid."""
        return self.lanes[str(serialized >> 24 & 0xFFFFFF), f"{serialized & 0xFFFFFF}{kind}"]

    def check(self) -> None:
        check_number(self.path, self.labels, "names of kernels and ranges", "fewer steps")
        check_number(self.path, self.lanes, "threads and streams", "fewer steps")
        check_number(self.path, self.details, "sizes of kernels and copies", "fewer steps")


@dataclass(frozen=True)
class _Ranges:
    """What NVTX says of a process."""

    host: Events
    is_numbered: NDArray[np.bool_]
    """Mask of `host`: what autograd numbered."""
    nccl: list[nvtx.NcclRange]
    has_steps: bool


def read_nsight(path: Path) -> Trace:
    """Returns a rank of a recording. UserError where it cannot be read or has no kernels."""
    try:
        with opened(export_of(file_of(path))) as database:
            return _trace(_Reading(path, database, source_of(path)))
    except (sqlite3.Error, ValueError, OverflowError) as error:
        # The last two: not a number, or one that no column holds.
        raise UserError(f"{file_of(path)} is damaged ({error}); {RECORD_AGAIN}.") from None


def _trace(reading: _Reading) -> Trace:
    reading.details[NO_DETAIL]
    device, launches = _device(reading), _launches(reading)
    ranges = _ranges(reading, {*np.unique(launches.lane).tolist()})
    communicators = nvtx.communicators_of(ranges.nccl)
    operators = {name for category, name in reading.labels if category == "cpu_op"}
    host, is_numbered = ranges.host, ranges.is_numbered
    if not any(name.startswith(nvtx.BACKWARD) for name in operators):
        backward = _on_autograd_threads(reading, launches)
        host, is_numbered = concatenated(host, backward), np.append(is_numbered, np.zeros(len(backward), bool))
    reading.check()
    # Where operators were recorded, so was autograd.
    has_passes = any(name.startswith((nvtx.BACKWARD, "aten::")) for _, name in reading.labels)
    # What autograd runs backward has the number of the operator in the forward pass.
    functions = {name.removeprefix(nvtx.BACKWARD) for name in operators if name.startswith(nvtx.BACKWARD)}
    is_backward = np.array([name.startswith(nvtx.BACKWARD) or name in functions for _, name in reading.labels], bool)
    rank, world_size = _rank(reading, communicators)
    trace = Trace(
        rank=rank,
        world_size=world_size,
        base_time_ns=_base_time_ns(reading),
        labels=list(reading.labels),
        lanes=list(reading.lanes),
        details=list(reading.details),
        groups={name: ProcessGroup(name=name, size=one.ranks) for name, one in communicators.items()},
        device=device,
        launches=launches,
        host=host,
        forward=is_numbered & ~is_backward[host.label],
        modules=_NOTHING,
        functions=_NOTHING,
        warnings=_warnings(reading, ranges, has_steps=ranges.has_steps or bool(is_backward.any())),
        has_passes=has_passes,
        passes_by_thread=len(host) > len(ranges.host),
        device_name=_device_name(reading),
    )
    return _with_collectives(trace, nvtx.collectives_of(ranges.nccl, communicators))


def _device(reading: _Reading) -> Events:
    def lane(device: int, stream: int) -> int:
        return reading.lanes[str(device), str(stream)]

    def kernel(name: int) -> int:
        # As other demanglers write it.
        return reading.labels["kernel", reading.name(name).replace("<unnamed>", "(anonymous namespace)")]

    def copy(kind: int, source: int, target: int) -> int:
        memory = f"{_MEMORY.get(source, _UNKNOWN)} -> {_MEMORY.get(target, _UNKNOWN)}"
        return reading.labels["gpu_memcpy", f"Memcpy {_COPIES.get(kind, _UNKNOWN)} ({memory})"]

    def memset(kind: int) -> int:
        return reading.labels["gpu_memset", f"Memset ({_MEMORY.get(kind, _UNKNOWN)})"]

    def size(count: int) -> int:
        return reading.details[Detail(bytes=count if 0 <= count < MOST_ELEMENTS else None)]

    def shape(*sizes: int) -> int:
        return reading.details[Detail(shape=f"{[*sizes[:3]]} {[*sizes[3:]]}")]

    stream = lane, "deviceId", "streamId"
    copied = copy, "copyKind", "srcKind", "dstKind"
    blocks = shape, "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"
    return concatenated(
        _events(reading, KERNELS, stream, (kernel, "demangledName"), blocks),
        _events(reading, "CUPTI_ACTIVITY_KIND_MEMCPY", stream, copied, (size, "bytes")),
        _events(reading, "CUPTI_ACTIVITY_KIND_MEMSET", stream, (memset, "memKind"), (size, "bytes")),
        _events(reading, _WHOLE_GRAPHS, stream, (lambda: reading.labels["kernel", "CUDA graph"],), (lambda: 0,)),
    )


def _launches(reading: _Reading) -> Events:
    def call(name: int) -> int:
        called = _VERSION.sub("", reading.name(name))
        return reading.labels["cuda_runtime" if called.startswith("cuda") else "cuda_driver", called]

    thread, called = (reading.thread, "globalTid"), (call, "nameId")
    return _events(reading, "CUPTI_ACTIVITY_KIND_RUNTIME", thread, called, (lambda: 0,))


def _events(reading: _Reading, table: str, *numbers: tuple[Callable[..., int], *tuple[str, ...]]) -> Events:
    """Returns the rank's events in a table; none if there is no such table. `numbers`: lane, label and detail, each as
    a function, which is asked once for equal values, and the columns that it is given: -1 for missing ones."""
    columns = reading.columns(table)
    if not columns:
        return _NOTHING
    names = ("start", "end", "correlationId", *(name for _, *own in numbers for name in own))
    wanted = ", ".join(f"COALESCE({name}, -1)" if name in columns else "-1" for name in names)
    is_device = "deviceId" in columns
    cursor = reading.database.execute(
        f"SELECT {wanted} FROM {table} WHERE ? IN (0, {process_in(columns)}){' AND deviceId = ?' * is_device}",
        reading.source[: 1 + is_device],
    )
    parts = [_NOTHING]
    memories = [cache(number) for number, *_ in numbers]
    while rows := cursor.fetchmany(_ROWS):
        values = iter([*zip(*rows, strict=True)])
        start_ns, end_ns, correlation = (np.array(next(values), np.int64) for _ in range(3))
        lane, label, detail = (
            np.fromiter(map(memory, *(next(values) for _ in own)), np.int32, len(rows))
            if own
            else np.full(len(rows), memory(), np.int32)
            for memory, (_, *own) in zip(memories, numbers, strict=True)
        )
        external = np.full(len(rows), NO_CORRELATION)
        parts.append(Events(label, lane, start_ns, np.maximum(start_ns, end_ns), correlation, external, detail))
        reading.check()
    return concatenated(*parts)


def _ranges(reading: _Reading, launching: set[int]) -> _Ranges:
    """Returns what NVTX recorded. `launching`: lanes of the threads that launch: others may load batches meanwhile."""
    numbers, is_numbered = array("q"), array("b")
    nccl: list[nvtx.NcclRange] = []
    steps: dict[int, nvtx.StepRange] = {}
    schemas, thread = _schemas(reading), cache(reading.thread)
    for start_ns, end_ns, serialized, event_type, text, domain, blob in _range_rows(reading):
        what = nvtx.named(text)
        lane = thread(serialized, " ranges" if event_type in _ANYWHERE else "")
        if nvtx.is_nccl(what.name):
            nccl.append(nvtx.NcclRange(lane, start_ns, end_ns, what.name, nvtx.payload_of(blob, domain, schemas)))
            if not what.name.startswith("nccl:"):
                continue
        if like_step := nvtx.step_of(what.name):
            steps[len(is_numbered)] = nvtx.StepRange(lane, start_ns, end_ns, *like_step)
        numbers.extend((reading.labels[what.category, what.name], lane, start_ns, end_ns))
        is_numbered.append(what.is_numbered)
    columns = np.array(numbers, np.int64).reshape(-1, 4).T
    label, lane_column = columns[:2].astype(np.int32)
    start_column, end_column = columns[2:]
    own_steps = {i: step for i, step in steps.items() if step.thread in launching} or steps
    for i, number in nvtx.step_numbers(own_steps).items():
        label[i] = reading.labels["user_annotation", f"ProfilerStep#{number}"]
    none = np.full(len(label), NO_CORRELATION)
    detail = np.zeros(len(label), np.int32)
    host = Events(label, lane_column, start_column, np.maximum(start_column, end_column), none, none, detail)
    return _Ranges(host, np.array(is_numbered, bool), nccl, bool(steps))


def _range_rows(reading: _Reading) -> Iterator[tuple[int, int, int, int, str, int, bytes | None]]:
    columns = reading.columns("NVTX_EVENTS")
    if not columns:
        return
    text = "COALESCE(n.text, s.value)" if "textId" in columns else "n.text"
    payload = "COALESCE(n.domainId, 0), " + ("CAST(n.binaryData AS BLOB)" if "binaryData" in columns else "NULL")
    cursor = reading.database.execute(
        f"SELECT n.start, n.end, n.globalTid, n.eventType, {text}, {payload} FROM NVTX_EVENTS n"
        + (f" LEFT JOIN {STRINGS} s ON s.id = n.textId" if "textId" in columns else "")
        + f" WHERE n.eventType IN {_NESTED + _ANYWHERE} AND n.end IS NOT NULL AND {text} IS NOT NULL"
        + f" AND ? IN (0, {process_in(columns)})",
        (reading.source.process,),
    )
    while rows := cursor.fetchmany(_ROWS):
        yield from rows
        reading.check()


def _schemas(reading: _Reading) -> nvtx.Schemas:
    table = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
    if not reading.columns(table):
        return {}
    return nvtx.schemas_of(
        reading.database.execute(f"SELECT domainId, schemaId, name, type, COALESCE(offset, 0) FROM {table}")
    )


def _on_autograd_threads(reading: _Reading, launches: Events) -> Events:
    """Returns the launches on the threads that run autograd's backward passes, as what autograd evaluates."""
    if not reading.columns("ThreadNames"):
        return _NOTHING
    threads = reading.database.execute(
        f"SELECT globalTid FROM ThreadNames JOIN {STRINGS} ON id = nameId WHERE value LIKE '{_AUTOGRAD_THREAD}%'"
    )
    own = launches[np.isin(launches.lane, [reading.thread(serialized) for (serialized,) in threads])]
    if not len(own):
        return own
    return replace(own, label=np.full(len(own), reading.labels["cpu_op", nvtx.BACKWARD], np.int32))


def _with_collectives(trace: Trace, collectives: Mapping[int, Sequence[tuple[int, int, Detail]]]) -> Trace:
    """Returns the trace with what NCCL says of each of its kernels: of the call that launched it."""
    launch, detail = launches_of(trace), trace.device.detail.copy()
    details = Numbering[Detail]()
    for known in trace.details:
        details[known]
    for i in np.flatnonzero(trace.is_named(trace.device, _NCCL_KERNEL) & (launch >= 0)).tolist():
        calls = collectives.get(int(trace.launches.lane[launch[i]]), ())
        moment_ns = int(trace.launches.start_ns[launch[i]])
        place = bisect_right(calls, moment_ns, key=lambda call: call[0]) - 1
        if place >= 0 and moment_ns <= calls[place][1]:
            said = nvtx.with_type(calls[place][2], trace.name(trace.device, i))
            detail[i] = details[said._replace(shape=trace.details[detail[i]].shape)]
    return replace(trace, device=replace(trace.device, detail=detail), details=list(details))


def _rank(reading: _Reading, communicators: Mapping[str, nvtx.Communicator]) -> tuple[int | None, int | None]:
    """Returns rank and number of ranks, each None where it is unknown: of a file of one rank what its environment says,
    else NCCL's largest communicator; of others NCCL's if all ranks of the file fit into it, else their order."""
    place, knows_node = rank_on_node(reading.path)
    largest = max(communicators.values(), key=lambda one: one.ranks, default=None)
    if place is None:
        variables = _environment(reading)
        for rank, size in _RANK_VARIABLES.items():
            if 0 <= (own := variables.get(rank, -1)) < MOST_RANKS:
                return own, variables.get(size)
        if rank_in_name(reading.path) is not None or largest is None:
            return None, None
        return largest.rank, largest.ranks
    if largest is None or largest.ranks < len(sources_of(file_of(reading.path))):
        return place, None
    return (place if knows_node else largest.rank), largest.ranks


def _environment(reading: _Reading) -> dict[str, int]:
    """Returns the numbers in the environment that nsys was started in."""
    if not reading.columns("META_DATA_CAPTURE"):
        return {}
    written = reading.strings("SELECT value FROM META_DATA_CAPTURE WHERE name LIKE '%:ENVIRONMENT_VARIABLE'")
    found = (re.fullmatch(r'(\w+)="?(\d{1,9})"?', text) for text in written)
    return {one[1]: int(one[2]) for one in found if one}


def _base_time_ns(reading: _Reading) -> int:
    """Returns the time from which others count, in nanoseconds since 1970; 0 where that is unknown, or is what they
    count from."""
    if "utcEpochNs" not in reading.columns("TARGET_INFO_SESSION_START_TIME"):
        return 0
    exported = "SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_PARAM_TIME_NORMALIZE'"
    if reading.columns("META_DATA_EXPORT") and "true" in reading.strings(exported):
        return 0
    started = reading.database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    return (started[0] or 0) if started else 0


def _device_name(reading: _Reading) -> str:
    if not reading.columns("TARGET_INFO_GPU"):
        return ""
    names = reading.strings("SELECT DISTINCT name FROM TARGET_INFO_GPU")
    return names[0] if len(names) == 1 else ""


def _warnings(reading: _Reading, ranges: _Ranges, *, has_steps: bool) -> list[str]:
    """Returns a sentence for each thing that the recording lacks, with what would record it."""
    path, found = file_of(reading.path), list[str]()
    if reading.source != sources_of(path)[0]:
        # The same holds for all ranks of a file.
        return found
    if reading.columns(_WHOLE_GRAPHS):
        found.append(f"{path}: CUDA graphs are recorded as a whole; record with nsys profile --cuda-graph-trace=node.")
    if not has_steps:
        found.append(
            f"{path} has no steps: all of it is one, unless CUDA graphs repeat; put each step into "
            "torch.cuda.nvtx.range(f'step {number}')."
        )
    calls = [one for one in ranges.nccl if not one.name.startswith("nccl:")]
    if calls and not any(one.payload for one in calls):
        found.append(f"{path} has no sizes of collectives; export with nsys export --include-blobs=true.")
    return found
