"""What ran when, on which stream: marks on the device that are read when the device has passed them.

On a GPU a mark is an event on the stream that is current; on a CPU it is the host's clock. Nothing waits for a mark
until `resolve`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

Spans = dict[str, list[tuple[int, int]]]
"""By stream, in nanoseconds from the step's start."""


class Mark:
    """A moment on the current stream, or on a CPU now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_ns = 0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._host_ns = time.perf_counter_ns()

    def after_ns(self, origin: Mark) -> int:
        """Time since the origin; the device must have passed both."""
        if self._event is None or origin._event is None:
            return self._host_ns - origin._host_ns
        return round(origin._event.elapsed_time(self._event) * 1e6)

    def wait(self) -> None:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()


@dataclass
class Queue:
    """What runs collectives in the order in which it is handed them: NCCL's stream, or gloo's threads."""

    servers: int
    """How many it runs at once."""
    spans: list[Span] = field(default_factory=list)
    """Those of the step."""


@dataclass(eq=False)
class Span:
    """Of work on a stream. `end` comes later than `start`, for what runs by itself from another thread."""

    stream: str
    start: Mark
    end: Mark | None = None
    queue: Queue | None = None
    ended: Future[None] | None = None
    """When `end` is there, if not at once."""

    def resolve(self, origin: Mark) -> tuple[int, int]:
        """(start, end) in nanoseconds. What was queued began when it was handed over and a server was free."""
        if self.ended is not None:
            self.ended.wait()
        assert self.end is not None
        start, end = self.start.after_ns(origin), self.end.after_ns(origin)
        if self.queue is not None:
            earlier = self.queue.spans[: self.queue.spans.index(self)]
            ends = sorted((span.end.after_ns(origin) for span in earlier if span.end), reverse=True)
            start = max([start, *ends[self.queue.servers - 1 : self.queue.servers]])
        return min(start, end), end


@dataclass
class Recorder:
    """The spans of the step that runs, while `on`."""

    device: torch.device
    on: bool = False
    spans: list[Span] = field(default_factory=list)

    def mark(self) -> Mark:
        return Mark(self.device)

    def begin(self, stream: str, queue: Queue | None = None) -> Span:
        span = Span(stream, self.mark(), queue=queue)
        if self.on:
            self.spans.append(span)
        if queue is not None:
            queue.spans.append(span)
        return span

    def end(self, span: Span) -> None:
        span.end = self.mark()

    def end_with(self, span: Span, work: Future[Any]) -> None:
        """When the work is done: gloo's thread calls back then, and on a GPU at once, on a stream that waits for it."""
        span.ended = work.then(lambda _: self.end(span))

    def take(self) -> list[Span]:
        """Those of the step that is over."""
        taken, self.spans = self.spans, []
        return taken


def resolve(spans: list[Span], origin: Mark) -> Spans:
    """The device must have passed all of them."""
    found: Spans = {}
    for span in spans:
        found.setdefault(span.stream, []).append(span.resolve(origin))
    return found


class _Entry(torch.autograd.Function):
    """An identity that calls on its way forward and on its way back."""

    @staticmethod
    def forward(ctx, x: Tensor, forward, backward) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.backward_call = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        ctx.backward_call()
        return gradient, None, None


class Unit(torch.nn.Module):
    """A part of the model that is sharded and gathered as a whole, with marks where its own computation begins and
    ends, forward and backward: after its parameters are there, and before its gradients are reduced.

    FSDP2's hooks are on this module and so lie outside of the marks, which are in its forward.
    """

    def __init__(self, body: torch.nn.Module, recorder: Recorder) -> None:
        super().__init__()
        self.body = body
        self._recorder = recorder
        self._open: Span | None = None
        self.forward_ended = _nothing
        self.backward_ended = _nothing
        """Called on the host where that is enqueued."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(_Entry.apply(x, self._begin, self._end_backward))
        self._end_forward()
        assert output.grad_fn is not None
        # It runs after the hooks of the tensor, of which FSDP2's waits for the parameters.
        output.grad_fn.register_prehook(self._begin_backward)
        return output

    def _begin(self) -> None:
        self._open = self._recorder.begin("compute")

    def _end(self) -> None:
        assert self._open is not None
        self._recorder.end(self._open)

    def _end_forward(self) -> None:
        self._end()
        self.forward_ended()

    def _begin_backward(self, _gradients: tuple[Tensor, ...]) -> None:
        self._begin()

    def _end_backward(self) -> None:
        self._end()
        self.backward_ended()


def _nothing() -> None:
    pass
