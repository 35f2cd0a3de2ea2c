"""The columns that a trace is read into, whoever recorded it."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.errors import UserError

Key = TypeVar("Key")

NO_CORRELATION = -1

MOST_DIFFERENT = 1 << 16
"""Most names of events, or pairs of process and thread. Traces of torch have some hundreds; this many take seconds, a
million took minutes and a gigabyte."""

MOST_ELEMENTS = 1 << 38
"""Elements or bytes of one collective or copy; even those of MOST_RANKS ranks are a 64-bit number of bytes."""


@dataclass(frozen=True)
class Events:
    """Events as columns of equal length, in the order of the file."""

    label: NDArray[np.int32]
    """Index into Trace.labels."""
    lane: NDArray[np.int32]
    """Number of the pair of process and thread on the host, or of device and stream on a device."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    correlation: NDArray[np.int64]
    """Joins device events to the launch that caused them; NO_CORRELATION where there is none."""
    external: NDArray[np.int64]
    """Joins device events and launches to the operator that called them; NO_CORRELATION where there is none."""
    detail: NDArray[np.int32]
    """Index into Trace.details."""

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Events:
        return Events(*(getattr(self, column.name)[chosen] for column in fields(self)))

    @property
    def intervals(self) -> NDArray[np.int64]:
        return np.stack((self.start_ns, self.end_ns), axis=1)


def concatenated(*parts: Events) -> Events:
    """Returns the events of all, one after the other."""
    return Events(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Events)))


class Detail(NamedTuple):
    """What else the trace records of a kernel, copy or collective, as it is written; None where it is missing."""

    collective: str | None = None
    group: str | None = None
    group_about: str | None = None
    group_ranks: str | None = None
    group_size: int | None = None
    sent: int | None = None
    """Elements that this rank gives."""
    received: int | None = None
    dtype: str | None = None
    shape: str | None = None
    """Grid and block of a kernel, or the dimensions of a collective's arguments on the host."""
    bytes: int | None = None
    peer: int | None = None
    """Global rank that a send or recv is to or from."""


NO_DETAIL = Detail()


class ProcessGroup(msgspec.Struct, frozen=True):
    name: str = msgspec.field(name="pg_name", default="")
    about: str = msgspec.field(name="pg_desc", default="")
    """What the program calls the group; `undefined` if it does not say."""
    backend: str = msgspec.field(name="backend_config", default="")
    size: int = msgspec.field(name="pg_size", default=0)
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One rank's trace."""

    rank: int | None
    world_size: int | None
    base_time_ns: int
    """Origin of all times, in nanoseconds since 1970; 0 if the trace does not record it."""
    labels: list[tuple[str, str]]
    """The distinct pairs of category and name."""
    lanes: list[tuple[str, str]]
    """The distinct pairs of process and thread, or of device and stream."""
    details: list[Detail]
    """The distinct details; the first one is empty."""
    groups: dict[str, ProcessGroup]
    """Process groups by name."""
    device: Events
    """Kernels, copies and sets. NCCL's annotations on the GPU are left out: they repeat those of the host."""
    launches: Events
    """Calls of the runtime or driver that may have caused device events."""
    host: Events
    """CPU operators and annotations."""
    forward: NDArray[np.bool_]
    """Mask of `host`: operators that autograd numbered as part of a forward computation."""
    modules: Events
    """Calls of modules on the host, named `nn.Module: Linear_0`."""
    functions: Events
    """Other functions of Python that ran for long, such as `train.py(12): step`; only in traces with stacks."""
    warnings: list[str]
    """A sentence for each reason why only part of it was read."""
    has_passes: bool = True
    """Whether it can tell which pass and iteration an event belongs to. Profilers of the device alone cannot."""
    passes_by_thread: bool = False
    """Whether only the threads of launches show what is backward, not operators: then what is neither is unknown."""
    device_name: str = ""
    """Kind of GPU, such as NVIDIA H200; empty if unknown, or if the machine has several."""
    nccl_version: str = ""

    def name(self, events: Events, index: int) -> str:
        return self.labels[events.label[index]][1]

    def is_named(self, events: Events, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Returns a mask of the events whose names begin with the pattern."""
        return np.array([pattern.match(name) is not None for _, name in self.labels], bool)[events.label]


class Numbering(defaultdict[Key, int]):
    """Numbers keys in the order of their first lookup."""

    def __init__(self) -> None:
        super().__init__(itertools.count().__next__)


def check_number(path: Path, different: Collection[object], things: str, instead: str) -> None:
    """Raises UserError if there are more of these than any program has."""
    if len(different) > MOST_DIFFERENT:
        raise UserError(f"{path} has more than {MOST_DIFFERENT:,} different {things}; record {instead}.")
