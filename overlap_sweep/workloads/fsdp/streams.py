"""The streams of a training step: the one that computes, and one for each kind of communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from overlap_sweep.workloads.fsdp.telemetry import COMPUTE

PRIORITY = {"normal": 0, "high": -1}
"""torch's: less is sooner. A high-priority kernel's blocks take the SMs that become free before others'."""

WAITING = "waiting"
"""Runs nothing, and waits for what NCCL does on its own stream."""


class Streams:
    """On a CPU there are none: gloo's threads are what runs beside the computation."""

    def __init__(self, priorities: Mapping[str, str], device: torch.device) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {name: _stream(device, priorities[name]) for name in priorities}
            self._streams[WAITING] = _stream(device, "high")

    def __getitem__(self, name: str) -> torch.cuda.Stream:
        return self._streams[name]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run a step on the stream that computes; what is current waits for it, and it for that."""
        if not self._streams:
            yield
            return
        compute, outer = self[COMPUTE], torch.cuda.current_stream()
        compute.wait_stream(outer)
        with torch.cuda.stream(compute):
            yield
        outer.wait_stream(compute)


def _stream(device: torch.device, priority: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=PRIORITY[priority])
