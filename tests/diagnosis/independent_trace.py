"""Reads a trace by other means than the product: kernels with the operators above their launch, steps on the device.

Shares no code and no method with overlap_sweep. Times come from counting what runs between all boundaries, in
microseconds.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

Spans = np.ndarray
"""[[start, end]], of any order, of which some may overlap."""

OPERATORS = {
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "barrier": "all_reduce",
    "send": "send_recv",
    "recv": "send_recv",
    "coalesced": "send_recv",
}
"""What a name contains, and the collective that it then is; the first that fits."""


@dataclass(kw_only=True)
class Event:
    name: str
    start: float
    end: float
    stream: Any
    launched: tuple[float, float] | None
    """When the host's call began and returned."""
    operators: list[str]
    """Operators and annotations that the call lies in, the outermost first."""
    args: dict[str, Any]

    @property
    def communicates(self) -> bool:
        return bool(re.search("nccl|rccl", self.name, re.IGNORECASE)) and not self.name.startswith("Mem")

    @property
    def computes(self) -> bool:
        return not self.communicates and not self.name.startswith(("Memcpy", "Memset"))

    @property
    def collective(self) -> str:
        """Returns the kernel's own word, else that of the innermost operator, else what the kernel's name contains.

        A SendRecv kernel may be an all-to-all: with no other word, as when it was launched before the recording, it is
        unknown.
        """
        own = str(self.args.get("Collective name", ""))
        said = [name for name in reversed(self.operators) if name.startswith(("nccl:", "c10d::"))]
        by_name = "" if "sendrecv" in self.name.lower() else self.name
        for name in [own, *said, by_name]:
            for part, collective in OPERATORS.items():
                if part in name.lower():
                    return collective
        return "unknown"

    @property
    def group(self) -> str:
        args = self.args
        return f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}".strip()


@dataclass(kw_only=True)
class Rank:
    number: int | None
    world_size: int | None
    events: list[Event]
    cuts: list[tuple[int, float, float]]
    """Number, start and end of each step on the device: from its first kernel to that of the next, or the last end."""

    @cached_property
    def computing(self) -> Spans:
        return spans(event for event in self.events if event.computes)

    @cached_property
    def communicating(self) -> Spans:
        return spans(event for event in self.events if event.communicates)

    @cached_property
    def busy(self) -> Spans:
        return spans(self.events)


def spans(events: Iterable[Event]) -> Spans:
    return np.array([(event.start, event.end) for event in events], dtype=float).reshape(-1, 2)


def covered(start: float, end: float, *, by: Spans, but: Spans | None = None) -> float:
    """Returns for how long of the window something of `by` runs, and nothing of `but`."""
    other = np.empty((0, 2)) if but is None else but
    by, other = (some[(some[:, 0] < end) & (some[:, 1] > start)] for some in (by, other))
    edges = np.unique(
        np.concatenate(([start, end], np.clip(by, start, end).ravel(), np.clip(other, start, end).ravel()))
    )
    if len(edges) < 2:
        return 0.0
    inside = _running(by, edges) > 0
    if len(other):
        inside &= _running(other, edges) == 0
    return float(np.diff(edges)[inside].sum())


def _running(some: Spans, edges: np.ndarray) -> np.ndarray:
    """Returns how many of the spans run between each edge and the next."""
    begun = np.searchsorted(np.sort(some[:, 0]), edges[:-1], side="right")
    ended = np.searchsorted(np.sort(some[:, 1]), edges[:-1], side="right")
    return begun - ended


def read(path: Path) -> Rank:
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    recorded = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    info = trace.get("distributedInfo") or {}
    host: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    calls: dict[int, tuple[float, float, Any]] = {}
    for event in recorded:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        category = event.get("cat", "").lower()
        if category in ("cpu_op", "user_annotation", "operator"):
            host[event["tid"]].append((start, end, event["name"]))
        elif category in ("cuda_runtime", "cuda_driver", "runtime"):
            calls[event["args"].get("correlation", 0)] = (start, end, event["tid"])
    around = _around(host, calls)
    events = []
    for event in recorded:
        if event.get("cat", "").lower() not in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"):
            continue
        args = event.get("args", {})
        call = calls.get(args.get("correlation", -1))
        start = float(event["ts"])
        events.append(
            Event(
                name=event["name"],
                start=start,
                end=start + float(event["dur"]),
                stream=args.get("stream", event.get("tid")),
                launched=call[:2] if call else None,
                operators=around.get(args.get("correlation", -1), []),
                args=args,
            )
        )
    events.sort(key=lambda event: event.start)
    annotated = sorted(
        {
            (int(event["name"].rpartition("#")[2]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            for event in recorded
            if event["name"].startswith("ProfilerStep#") and event.get("cat") != "gpu_user_annotation"
        }
    )
    return Rank(
        number=info.get("rank"), world_size=info.get("world_size"), events=events, cuts=_cuts(events, annotated)
    )


def _around(
    host: dict[Any, list[tuple[float, float, str]]], calls: dict[int, tuple[float, float, Any]]
) -> dict[int, list[str]]:
    """Returns by correlation the names that are open on the call's thread when it is made."""
    found = {}
    for thread in {thread for _, _, thread in calls.values()}:
        opened = sorted(host[thread], key=lambda each: (each[0], -each[1]))
        at = sorted((start, correlation) for correlation, (start, _, own) in calls.items() if own == thread)
        stack: list[tuple[float, float, str]] = []
        next_one = 0
        for moment, correlation in at:
            while next_one < len(opened) and opened[next_one][0] <= moment:
                stack.append(opened[next_one])
                next_one += 1
            stack = [each for each in stack if each[1] >= moment]
            found[correlation] = [name for _, _, name in stack]
    return found


def _cuts(events: Sequence[Event], annotated: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    if not events:
        return []
    last = max(event.end for event in events)
    computed: Counter[Any] = Counter()
    for event in events:
        computed[event.stream] += event.computes * (event.end - event.start)
    main = max(computed, key=lambda stream: computed[stream])
    first: dict[int, float] = {}
    recorded = annotated[0][1] if annotated else 0.0
    earlier = (each for each in events if each.stream == main and not (each.launched and each.launched[0] >= recorded))
    until = max((event.end for event in earlier), default=0.0)
    for number, start, end in annotated:
        own = [event for event in events if event.launched and start <= event.launched[0] < end]
        # Copies and gathers of other streams may run a step ahead: what starts beside the computation of the step
        # before is counted to that.
        if begun := [event.start for event in own if event.start >= until]:
            first[number] = min(begun)
            until = max([until, *(event.end for event in own if event.stream == main)])
    if not first:
        return [(0, events[0].start, last)]
    numbers = sorted(first)
    ends = [*(first[number] for number in numbers[1:]), last]
    return [(number, first[number], end) for number, end in zip(numbers, ends, strict=True)]
