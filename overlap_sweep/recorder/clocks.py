"""What times the steps of a training: events on its GPU, and how long its Python collects garbage.

torch is only looked for among what the training has imported.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from overlap_sweep.errors import first_line

if TYPE_CHECKING:
    import torch


class GpuClock:
    """Marks moments on the stream that is current when this is made.

    For the host, making an event and asking for the current stream each cost as much as recording an event does. So
    events are made beforehand, and the stream is asked for again only after 1, 2, 4, 8... marks and the last one.
    """

    def __init__(self, marks: int) -> None:
        """`marks`: number of moments that will be marked. Must not be called while a CUDA graph is captured."""
        self._cuda = sys.modules["torch"].cuda
        self._stream = self._cuda.current_stream()
        self._unused = [self._cuda.Event(enable_timing=True) for _ in range(marks)]
        self._marked: list[torch.cuda.Event] = []
        self._has_moved = False
        for event in self._unused:
            # torch makes CUDA's event when it is first recorded.
            event.record(self._stream)

    def mark(self) -> bool:
        """Marks the end of a step. Returns whether it could: a step that becomes a CUDA graph does not run."""
        if is_capturing():
            return False
        event = self._unused.pop()
        event.record(self._stream)
        self._marked.append(event)
        count = len(self._marked)
        if not self._unused or not count & (count - 1):
            self._has_moved = self._has_moved or self._cuda.current_stream() != self._stream
        return True

    def times_us(self) -> tuple[list[float], str]:
        """Waits for the last mark. Returns the times between marks; or none, and why they say nothing."""
        if self._has_moved:
            moved = "The script changed its CUDA stream between steps, so only the host's times are known"
            return [], f"{moved}; raise job.skip_steps beyond the change."
        try:
            for last in self._marked[-1:]:
                last.synchronize()
            times_us = [start.elapsed_time(end) * 1e3 for start, end in pairwise(self._marked)]
        except RuntimeError as error:
            return [], f"The GPU's times could not be read ({first_line(error)})."
        if any(time_us <= 0 for time_us in times_us):
            return [], "The GPU had nothing to do in some steps, so only the host's times are known."
        return times_us, ""


def uses_gpu() -> bool:
    """Returns whether this process has begun to use a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def is_capturing() -> bool:
    """Returns whether what is launched now becomes a CUDA graph and does not run."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())


class CollectionClock:
    """The time that garbage collections of this process have taken since it was made."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._began_s: float | None = None
        gc.callbacks.append(self._collects)

    def stop(self) -> None:
        # A script may have replaced them.
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, _: Mapping[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        elif self._began_s is not None:
            self.spent_s += now_s - self._began_s
            self._began_s = None
