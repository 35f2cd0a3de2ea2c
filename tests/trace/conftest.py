import json
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.trace import TraceRow
from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.iterations import overlap_rows
from overlap_sweep.trace.kineto import read_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"


class HandMadeTrace:
    """Builds a Kineto trace event by event. Times are microseconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._launches = 0
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "args": {}}]

    def add(self, cat: str, name: str, start: float, end: float, pid: Any, tid: Any, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": pid, "tid": tid}
        self.events.append(event | ({"args": args} if args else {}))

    def kernel(self, name: str, start: float, end: float, correlation: int | None = None, stream: int = 7) -> None:
        args = {} if correlation is None else {"correlation": correlation}
        self.add("kernel", name, start, end, 0, stream, **args)

    def copy(self, name: str, start: float, end: float, correlation: int, stream: int = 7) -> None:
        self.add("gpu_memcpy", name, start, end, 0, stream, correlation=correlation)

    def launch(self, at: float, correlation: int, thread: int = 1, name: str = "cudaLaunchKernel") -> None:
        self.add("cuda_runtime", name, at, at + 1, 100, thread, correlation=correlation)

    def work(
        self, name: str, at: float, start: float | None = None, end: float | None = None, thread: int = 1, **event: Any
    ) -> None:
        """A kernel and its launch at `at`: it starts a millisecond later and takes 5 us by default."""
        self._launches += 1
        start = at + 1000 if start is None else start
        self.launch(at, 900_000 + self._launches, thread)
        self.kernel(name, start, start + 5 if end is None else end, 900_000 + self._launches, **event)

    def op(self, name: str, start: float, end: float, thread: int = 1) -> None:
        self.add("cpu_op", name, start, end, 100, thread)

    def forward_op(self, name: str, start: float, end: float, thread: int = 1) -> None:
        """An operator that autograd numbered, as it numbers those of a forward computation."""
        self.add("cpu_op", name, start, end, 100, thread, **{"Sequence number": 7, "Fwd thread id": 0})

    def annotation(self, name: str, start: float, end: float, thread: int = 1) -> None:
        self.add("user_annotation", name, start, end, 100, thread)

    def backward(self, start: float, end: float, thread: int = 2) -> None:
        self.op("autograd::engine::evaluate_function: MmBackward0", start, end, thread)

    def write(self, **document: Any) -> Path:
        self.path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events, **document}))
        return self.path


@pytest.fixture
def trace(tmp_path: Path) -> HandMadeTrace:
    return HandMadeTrace(tmp_path / "trace.json")


@pytest.fixture(params=sorted(path.name for path in TRACES.glob("h200x4_*.json.gz")))
def gpu_trace(request: pytest.FixtureRequest) -> Path:
    return TRACES / request.param


def analyse_trace(path: Path | str) -> list[TraceRow]:
    """Reads a trace; one row per iteration and phase that has any work, in order. UserError when there is none."""
    trace = read_trace(path)
    return overlap_rows(activity_of(trace), str(path), trace.rank)
