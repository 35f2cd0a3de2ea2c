"""A GPU and its host on paper: a clock that waits for nobody, and a queue that the GPU works off in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from overlap_sweep.measure.variant import Variant


@dataclass
class SimulatedStream:
    """`measure.clock.Stream` without a GPU; every time is in microseconds and exact."""

    host_us: float = 0.0
    idle_us: float = 0.0
    """When the GPU will have worked off its queue."""
    slowest_us: float = 0.0
    """What the slowest of the other ranks says."""
    spins: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def now_us(self) -> float:
        return self.host_us

    def wait(self) -> None:
        self.calls.append("wait")
        self.host_us = max(self.host_us, self.idle_us)

    def spin(self, us: float) -> None:
        self.calls.append("spin")
        self.spins.append(us)
        self._enqueue(us)

    def meet(self) -> None:
        self.calls.append("meet")

    def mark(self) -> float:
        self.calls.append("mark")
        return max(self.idle_us, self.host_us)

    def between_us(self, start: Any, end: Any) -> float:
        return float(end - start)

    def slowest(self, value: float) -> float:
        return max(value, self.slowest_us)

    def run(self, kernels: int, launch_us: float, kernel_us: float) -> None:
        """Launch kernels one after the other; the host takes `launch_us` for each, the GPU `kernel_us`."""
        for _ in range(kernels):
            self.host_us += launch_us
            self._enqueue(kernel_us)

    def _enqueue(self, us: float) -> None:
        self.idle_us = max(self.idle_us, self.host_us) + us


def kernels(stream: SimulatedStream, launch_us: float, fwd_us: float = 10.0, bwd_us: float = 20.0) -> Variant:
    """Four kernels forward and four backward, of so much GPU time each."""

    def forward(repeat: int) -> int:
        stream.calls.append("fwd")
        stream.run(4, launch_us, fwd_us)
        return repeat

    def backward(repeat: int, kept: int) -> dict[str, Any]:
        assert kept == repeat
        stream.calls.append("bwd")
        stream.run(4, launch_us, bwd_us)
        return {}

    return Variant(forward, backward)
