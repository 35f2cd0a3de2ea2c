"""Finds where the host was while it started nothing for long: in a function, an annotation, or between two operators.

A host that launches many small kernels starts one every some microseconds. One that starts none for a millisecond is
busy with something else: it loads data, writes, sleeps, or collects garbage.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LOADING, PAUSE_NS
from overlap_sweep.diagnosis.places import Nested, is_no_place
from overlap_sweep.diagnosis.waits import SYNC
from overlap_sweep.trace.columns import Trace, concatenated
from overlap_sweep.trace.intervals import Intervals
from overlap_sweep.trace.kineto import MODULE

COVERS = 0.8
"""Least share of a pause that a function or annotation covers for the pause to be in it."""

MAINLY = 0.5
"""Least share of a function that a pause takes for the function alone to tell where it is."""

_BUILT_IN = re.compile(r"<built-in (?:function|method) (\w+).*>")
_PYTHON = re.compile(r"(?P<file>[^<>]+)\(\d+\): ")
_COLLECTIVE = re.compile(r"c10d::|_c10d_functional::wait_tensor")
"""On a CPU they wait for other ranks, which is no pause of the host's own."""
_TORCHS = re.compile(r"(DistributedDataParallel|FullyShardedDataParallel)\.|FSDP::|Optimizer\.step#")
"""Torch's own annotations, in which all of a pass or an optimizer runs: they name nothing that the program does."""
_LIBRARIES = sys.stdlib_module_names | {"torch"}


@dataclass(frozen=True)
class Pause:
    """Time in which no thread that launches or computes started or ended anything. Nanoseconds."""

    start_ns: int
    end_ns: int
    place: str
    """Such as `in sleep(), called by train.py(12): load`, `inside aten::mm`, or `between aten::mul and aten::add`."""
    loads: bool = False
    """Whether a DataLoader makes the next batch in it."""


def pauses_of(trace: Trace, threads: NDArray[np.int32]) -> Iterator[Pause]:
    """Yields the host's pauses, by start. `threads`: those that launch or compute."""
    is_operator = np.array([category == "cpu_op" for category, _ in trace.labels], bool)
    own = concatenated(trace.host[is_operator[trace.host.label]], trace.launches)
    own = own[np.isin(own.lane, threads)]
    moments = np.concatenate((own.start_ns, own.end_ns))
    order = np.argsort(moments, kind="stable")
    scopes = _Scopes(trace, threads)
    for place in np.flatnonzero(np.diff(moments[order]) >= PAUSE_NS).tolist():
        before, after = (int(order[at]) for at in (place, place + 1))
        name_before, name_after = (trace.labels[own.label[at % len(own)]][1] for at in (before, after))
        span = int(moments[before]), int(moments[after])
        if pause := scopes.pause(span, int(own.lane[after % len(own)]), name_before, name_after):
            yield pause


def paused_ns(pauses: list[Pause], spans: Intervals) -> Counter[str]:
    """Returns how long the host paused within the spans (a union), by place. The longest is `most_common(1)`."""
    found: Counter[str] = Counter()
    for pause in pauses:
        first, beyond = np.searchsorted(spans[:, 1], pause.start_ns), np.searchsorted(spans[:, 0], pause.end_ns)
        here = np.clip(spans[first:beyond], pause.start_ns, pause.end_ns)
        if common := int((here[:, 1] - here[:, 0]).sum()):
            found[pause.place] += common
    return found


class _Scopes:
    """What ran on the host for long: functions, modules, annotations, operators, and calls of the runtime."""

    def __init__(self, trace: Trace, threads: NDArray[np.int32]) -> None:
        every = concatenated(trace.host, trace.launches, trace.modules, trace.functions)
        is_place = np.array([not (is_no_place(name) or _TORCHS.match(name)) for _, name in trace.labels], bool)
        long = every.end_ns - every.start_ns >= COVERS * PAUSE_NS
        self._scopes = Nested(every[long & is_place[every.label] & np.isin(every.lane, threads)])
        self._names = [name for _, name in trace.labels]
        self._is_operator = [category not in ("user_annotation", "python_function") for category, _ in trace.labels]

    def pause(self, span: tuple[int, int], thread: int, before: str, after: str) -> Pause | None:
        """Returns the pause between what ended or started `before` and `after`, on the `thread` of the latter; None if
        the host waited for the device."""
        start_ns, end_ns = span
        # What covers most of the pause contains its middle.
        around = [
            (label, end - start)
            for label, start, end in self._scopes.around(thread, (start_ns + end_ns) // 2)
            if min(end, end_ns) - max(start, start_ns) >= COVERS * (end_ns - start_ns)
        ]
        names = [self._names[label] for label, _ in around]
        between = f"between {f'{_short(before)} and' if before != after else 'two'} {_short(after)}"
        place = between
        if names:
            if SYNC.match(names[0]) or _COLLECTIVE.match(names[0]):
                return None
            innermost, took = around[0]
            place = f"{'inside' if self._is_operator[innermost] else 'in'} {_short(names[0])}{_caller(names)}"
            if end_ns - start_ns < MAINLY * took and not LOADING.match(names[0]):
                place = f"{place}, {between}"
        return Pause(start_ns, end_ns, place, any(LOADING.match(name) for name in names))


def _caller(names: list[str]) -> str:
    """Returns who called the innermost function, as far as it is built in or of a library: the program's own function
    nearest to it. `names`: from the innermost outwards."""
    if _is_own(names[0]):
        return ""
    caller = next((name for name in names[1:] if _is_own(name)), "")
    return f", called by {caller}" if caller else ""


def _is_own(name: str) -> bool:
    python = _PYTHON.match(name)
    return python is not None and re.split(r"[/\\.]", python["file"].lstrip("./"))[0] not in _LIBRARIES


def _short(name: str) -> str:
    built_in = _BUILT_IN.match(name)
    if built_in:
        return f"{built_in[1]}()"
    return name.removeprefix("autograd::engine::evaluate_function: ").removeprefix(MODULE)
