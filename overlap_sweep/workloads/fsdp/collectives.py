"""Issues every collective of a training step in one of three modes: as configured, alone on the device, or not at all.
So one model serves the point and its baselines. Records when collectives and computation ran.

Marks are read when the device has passed them; nothing waits for one until `resolve`. An idle stream passes the mark
before a collective some tenths of a millisecond before the host launches it, so a span also has the approximate time of
the launch, and an `Anchor` relates the host's clock to the device's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from overlap_sweep.measure import Ranks
from overlap_sweep.measure.timing import STREAM_PRIORITY, Anchor, Mark
from overlap_sweep.workloads.fsdp.telemetry import COMPUTE

POINT, NONE, FLOOR = "point", "none", "floor"
"""The modes: as configured; each collective while nothing computes; no communication."""

GATHERED_LAYERS = 2
"""Number of layers that may be gathered and not yet computed, with fsdp.limit_all_gathers."""

GLOO_THREADS = 2
"""Threads of each of torch's gloo groups: the number of collectives that run concurrently."""

WAITING = "waiting"
"""Stream that runs nothing and only waits for collectives on NCCL's own stream."""

Issue = Callable[..., dist.Work | None]
"""Calls a collective, with `async_op`."""


Spans = dict[str, list[tuple[int, int]]]
"""(start, end) by stream, in nanoseconds from the step's start."""

LAUNCHED_AT = 0.7
"""Time at which an idle stream begins a collective, as a share of the host's time from the mark to the call's return.
By the profiler's kernels it is 0.63 to 0.77, in calls of 135 to 240 us. When the call returns, the kernel has been
running for 35 to 80 us, and for longer where another thread took the interpreter."""


@dataclass
class Queue:
    """A queue that runs collectives in order: NCCL's stream, or gloo's threads."""

    servers: int
    """Number of collectives that run concurrently."""
    spans: list[Span] = field(default_factory=list)
    """Spans of the current step."""


@dataclass(eq=False)
class Span:
    """Work on a stream. `end` is set after `start`, from another thread if the work runs by itself."""

    stream: str
    start: Mark
    end: Mark | None = None
    queue: Queue | None = None
    ended: Future[None] | None = None
    """Future that completes when `end` is set; None if it is set by the caller."""
    launched_ns: int | None = None
    """Approximate launch time by the host's clock; None for computation, which has many launches."""

    def resolve(self, origin: Mark, anchor: Anchor) -> tuple[int, int]:
        """Returns (start, end) in nanoseconds. Queued work began when it was handed over and a server was free."""
        if self.ended is not None:
            self.ended.wait()
        assert self.end is not None
        start, end = self.start.after_ns(origin), self.end.after_ns(origin)
        if self.queue is not None:
            earlier = self.queue.spans[: self.queue.spans.index(self)]
            ends = sorted((span.end.after_ns(origin) for span in earlier if span.end), reverse=True)
            start = max([start, *ends[self.queue.servers - 1 : self.queue.servers]])
        if self.launched_ns is not None:
            start = max(start, anchor.host_after_ns(self.launched_ns, origin))
        return min(start, end), end


@dataclass
class Recorder:
    """Records the spans of the current step while `on`."""

    device: torch.device
    on: bool = False
    spans: list[Span] = field(default_factory=list)
    _computing: Span | None = None

    def mark(self) -> Mark:
        return Mark(self.device)

    def begin(self, stream: str, queue: Queue | None = None) -> Span:
        span = Span(stream, self.mark(), queue=queue)
        if self.on:
            self.spans.append(span)
        if queue is not None:
            queue.spans.append(span)
        return span

    def launched(self, span: Span) -> None:
        """Records that the launching call has returned. On a CPU gloo's thread starts unobserved, then or later."""
        if self.device.type == "cuda":
            span.launched_ns = launch_between(span.start.host_ns, time.perf_counter_ns())

    def end(self, span: Span) -> None:
        span.end = self.mark()

    def begin_computing(self) -> None:
        self._computing = self.begin(COMPUTE)

    def end_computing(self) -> bool:
        """Returns whether a computation was being marked."""
        computing, self._computing = self._computing, None
        if computing is not None:
            self.end(computing)
        return computing is not None

    def take(self) -> list[Span]:
        taken, self.spans = self.spans, []
        return taken


def launch_between(begun_ns: int, returned_ns: int) -> int:
    """Returns the approximate launch time of a collective from when it was marked and when its call returned."""
    return begun_ns + round(LAUNCHED_AT * (returned_ns - begun_ns))


def resolve(spans: list[Span], origin: Mark, anchor: Anchor) -> Spans:
    """Returns the times of the spans by stream; the device must have passed them all."""
    found: Spans = {}
    for span in spans:
        found.setdefault(span.stream, []).append(span.resolve(origin, anchor))
    return found


class Streams:
    """The compute stream, and one for each kind of communication; none on a CPU, where gloo's threads run beside it."""

    def __init__(self, priorities: Mapping[str, str], device: torch.device) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {
                name: torch.cuda.Stream(device, priority=STREAM_PRIORITY[priority])
                for name, priority in {**priorities, WAITING: "high"}.items()
            }

    def __getitem__(self, name: str) -> torch.cuda.Stream:
        return self._streams[name]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Runs a step on the compute stream, which waits for the current stream before and is waited for after."""
        if not self._streams:
            yield
            return
        compute, outer = self[COMPUTE], torch.cuda.current_stream()
        compute.wait_stream(outer)
        with torch.cuda.stream(compute):
            yield
        outer.wait_stream(compute)


class Collectives:
    def __init__(self, ranks: Ranks, streams: Streams, recorder: Recorder, own_streams: bool) -> None:
        """`own_streams`: in mode `point`, run every collective on the stream of its kind instead of the library's."""
        self.mode = POINT
        self.blocked_s = 0.0
        """Time for which the host has waited for the device in `wait_for_layers`."""
        self.own_queues: set[str] = set()
        """Streams whose collectives have a process group of their own."""
        self.streams, self.recorder = streams, recorder
        self._ranks, self._own_streams = ranks, own_streams
        self._on_gpu = ranks.device.type == "cuda"
        self.start_step()
        self._unfinished: list[tuple[Callable[[], object], tuple[Tensor, ...]]] = []
        self._thread = ThreadPoolExecutor(1)

    def own_stream(self, name: str) -> torch.cuda.Stream | None:
        return self.streams[name] if self._own_streams and self._on_gpu else None

    def now(self, stream: str, issue: Issue) -> None:
        """Issues a collective that completes before the current stream continues."""
        if self._on_gpu:
            self._on_stream(stream, issue)
        else:
            self._recorded(stream, issue, self._queue(stream))

    def later(self, stream: str, issue: Issue) -> dist.Work | None:
        """Issues a collective. Returns the work to wait for, or None if it is done already."""
        if self.mode == NONE:
            self.now(stream, issue)
            return None
        if self._on_gpu:
            return _StreamWork(self._beside(stream, issue))
        return self._asynchronously(stream, issue)

    def _on_stream(self, stream: str, issue: Issue) -> None:
        current = torch.cuda.current_stream()
        alone, compute = self.mode == NONE, self.streams[COMPUTE]
        if self._own_streams and not alone:
            current.wait_event(self._beside(stream, issue))
            return
        if alone:
            current.wait_stream(compute)
        self._recorded(stream, issue)
        if alone:
            compute.wait_stream(current)

    def _beside(self, stream: str, issue: Issue) -> torch.cuda.Event:
        """Issues a collective on the stream of its kind, after the current one. Returns the event of its end."""
        own = self.streams[stream]
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            self._recorded(stream, issue)
            return own.record_event()

    def _recorded(self, stream: str, issue: Issue, queue: Queue | None = None) -> None:
        span = self.recorder.begin(stream, queue)
        issue(async_op=False)
        self.recorder.launched(span)
        self.recorder.end(span)

    def _asynchronously(self, stream: str, issue: Issue) -> dist.Work:
        span, work = self._handed_over(stream, issue)
        span.ended = work.get_future().then(lambda _: self.recorder.end(span))
        return work

    def _on_nccls_stream(self, stream: str, issue: Issue) -> torch.cuda.Stream:
        """Issues a collective on NCCL's stream. Returns the stream that waits for it."""
        span, work = self._handed_over(stream, issue)
        # Not by Future.then: its callback lets the next of torch's pool of 32 streams wait for the collective, and
        # that one may be the compute stream.
        with torch.cuda.stream(self.streams[WAITING]):
            work.get_future().wait()
            self.recorder.end(span)
        return self.streams[WAITING]

    def _handed_over(self, stream: str, issue: Issue) -> tuple[Span, dist.Work]:
        span = self.recorder.begin(stream, self._queue(stream))
        work = issue(async_op=True)
        assert work is not None
        self.recorder.launched(span)
        return span, work

    def reduced(self, stream: str, issue: Issue, value: Tensor) -> Future[Tensor]:
        """Returns a future of `value`, changed in place; a stream that waits for it waits for the collective."""
        if self.mode == NONE:
            self.alone(stream, issue)
        if self.mode != POINT:
            return self._done(value)
        if not self._on_gpu:
            return self._asynchronously(stream, issue).get_future().then(lambda _: value)
        if self._own_streams:
            self._beside(stream, issue)
            done_on = self.streams[stream]
        else:
            done_on = self._on_nccls_stream(stream, issue)
        with torch.cuda.stream(done_on):
            return self._done(value)

    def alone(self, stream: str, issue: Issue) -> None:
        """Issues a collective that interrupts computation: DDP's in mode `none`, or that of the gradients' norm."""
        computing = self.recorder.end_computing()
        self.now(stream, issue)
        if computing:
            self.recorder.begin_computing()

    def beside_step(self, stream: str, issue: Issue, tensors: tuple[Tensor, ...]) -> None:
        """Issues, in its own group, a collective needed only by the end of the step. Keeps the tensors until then."""
        wait: Callable[[], object]
        if self._on_gpu:
            wait = _StreamWork(self._beside(stream, issue)).wait
        else:
            # gloo's reduce-scatter has no completion callback; only a waiting thread knows when it ends.
            wait = self._thread.submit(self._recorded, stream, issue).result
        self._unfinished.append((wait, tensors))

    def end_step(self) -> None:
        for wait, _ in self._unfinished:
            wait()
        self._unfinished.clear()

    def _done(self, value: Tensor) -> Future[Tensor]:
        """Returns a future that completes with the current stream's work."""
        future: Future[Tensor] = Future(devices=[self._ranks.device] if self._on_gpu else None)
        future.set_result(value)
        return future

    def start_step(self) -> None:
        # New queues: the spans of the last step keep theirs.
        self._queues: dict[str, Queue] = {}
        self._computed: deque[Mark] = deque()

    def _queue(self, stream: str) -> Queue:
        group = stream if stream in self.own_queues else ""
        return self._queues.setdefault(group, Queue(servers=1 if self._on_gpu else GLOO_THREADS))

    def layer_computed(self) -> None:
        """Marks the end of a layer's computation, forward or backward, as it is enqueued."""
        self._computed.append(self.recorder.mark())

    def wait_for_layers(self) -> None:
        """Blocks the host until at most `GATHERED_LAYERS`, with the one to be gathered, are not computed."""
        began_s = time.perf_counter()
        while len(self._computed) >= GATHERED_LAYERS:
            self._computed.popleft().wait()
        self.blocked_s += time.perf_counter() - began_s


class _StreamWork(dist.Work):
    def __init__(self, done: torch.cuda.Event) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        return True
