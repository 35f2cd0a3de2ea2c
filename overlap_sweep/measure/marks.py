"""Marks on the device that are read when the device has passed them: on a GPU an event on the current stream, on a CPU
the host's clock. They are for training steps, whose host must not wait."""

from __future__ import annotations

import time

import torch


class Mark:
    """A moment on the current stream, or on a CPU now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self.host_ns = time.perf_counter_ns()

    def after_ns(self, origin: Mark) -> int:
        """Time since the origin; the device must have passed both."""
        if self._event is None or origin._event is None:
            return self.host_ns - origin.host_ns
        return round(origin._event.elapsed_time(self._event) * 1e6)

    def wait(self) -> None:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()


class Anchor(Mark):
    """A mark that an idle device passes when the host makes it: it ties the two clocks together. They drift apart by
    microseconds a second."""

    def host_after_ns(self, host_ns: int, origin: Mark) -> int:
        """A moment of the host's clock, on the device's since the origin."""
        return self.after_ns(origin) + host_ns - self.host_ns

    def lead_ns(self, mark: Mark) -> int:
        """How much later the device passed a later mark than the host made it."""
        return mark.after_ns(self) - (mark.host_ns - self.host_ns)
