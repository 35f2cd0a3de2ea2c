"""Times the steps of a training run by events on its GPU, at little cost for the host, which launches the training's
kernels meanwhile."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

BATCH = 1024
"""Most events that are made at once."""

MOVED = (
    "The script changed its CUDA stream between steps, so only the host's times are known; raise job.skip_steps beyond "
    "the change."
)


class NoGpuTimes(Exception):
    """Why there are no times of the GPU, in one sentence."""


class GpuClock:
    """Marks moments on the stream that is current when this is made.

    For the host, making an event and asking for the current stream each cost as much as recording an event does. So
    events are made beforehand, and the stream is asked for again only after 1, 2, 4, 8... marks and the last one.
    """

    def __init__(self, marks: int) -> None:
        """`marks`: number of moments that will be marked. Must not be called while a CUDA graph is captured."""
        self._cuda = sys.modules["torch"].cuda
        self._stream = self._cuda.current_stream()
        self._marks, self._made = marks, 0
        self._unused: list[Any] = []
        self._marked: list[Any] = []
        self._has_moved = False
        self._make()

    def _make(self) -> None:
        count = min(self._marks - self._made, BATCH)
        assert count > 0, f"more than {self._marks} marks"
        self._unused = [self._cuda.Event(enable_timing=True) for _ in range(count)]
        for event in self._unused:
            # torch makes CUDA's event when it is first recorded.
            event.record(self._stream)
        self._made += count

    def mark(self) -> bool:
        """Marks the end of a step. Returns whether it could: a step that becomes a CUDA graph does not run."""
        if is_capturing():
            return False
        if not self._unused:
            self._make()
        event = self._unused.pop()
        event.record(self._stream)
        self._marked.append(event)
        count = len(self._marked)
        if count == self._marks or not count & (count - 1):
            self._has_moved = self._has_moved or self._cuda.current_stream() != self._stream
        return True

    def times_us(self) -> list[float]:
        """Waits for the last mark, and returns the times between marks. NoGpuTimes if they say nothing."""
        if self._has_moved:
            raise NoGpuTimes(MOVED)
        if not self._marked:
            return []
        try:
            self._marked[-1].synchronize()
            times_us = [start.elapsed_time(end) * 1e3 for start, end in pairwise(self._marked)]
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise NoGpuTimes(f"The GPU's times could not be read ({reason}).") from None
        if any(time_us <= 0 for time_us in times_us):
            raise NoGpuTimes("The GPU had nothing to do in some steps, so only the host's times are known.")
        return times_us


def uses_gpu() -> bool:
    """Returns whether this process has begun to use a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def is_capturing() -> bool:
    """Returns whether what is launched now becomes a CUDA graph and does not run."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
