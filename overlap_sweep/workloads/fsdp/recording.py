"""What a training run records of its steps: what ran when, on which stream, and the lines of a rank's telemetry.

Marks are read when the device has passed them; nothing waits for one until `resolve`. An idle stream passes the mark
before a collective some tenths of a millisecond before the host has launched it, so a span also knows about when the
host launched it, and an `Anchor` what the device's clock said then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from overlap_sweep.measure import Ranks
from overlap_sweep.measure.environment import DeviceSampler
from overlap_sweep.measure.timing import Anchor, Mark
from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.workloads.fsdp.telemetry import COMPUTE, StepRecord, overlap_of, write_metrics

if TYPE_CHECKING:
    from overlap_sweep.workloads.fsdp.steps import Step

Spans = dict[str, list[tuple[int, int]]]
"""By stream, in nanoseconds from the step's start."""

LAUNCHED_AT = 0.7
"""When an idle stream begins a collective, as a share of the host's time from the mark before it to its call's return.
By the profiler's kernels it is 0.63 to 0.77, in calls of 135 to 240 us. When the call returns, the kernel has been
running for 35 to 80 us, and for longer where another thread took the interpreter."""


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
    launched_ns: int | None = None
    """About when the host launched the collective, by its clock; None for what has many launches."""

    def resolve(self, origin: Mark, anchor: Anchor) -> tuple[int, int]:
        """Returns (start, end) in nanoseconds. What was queued began when it was handed over and a server was free."""
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
    """The spans of the step that runs, while `on`."""

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
        """The call that launches the collective has returned. On a CPU gloo's thread takes it then or later, which is
        told by nobody."""
        if self.device.type == "cuda":
            span.launched_ns = launch_between(span.start.host_ns, time.perf_counter_ns())

    def end(self, span: Span) -> None:
        span.end = self.mark()

    def begin_computing(self) -> None:
        self._computing = self.begin(COMPUTE)

    def end_computing(self) -> None:
        assert self._computing is not None
        self.end(self._computing)
        self._computing = None

    @contextmanager
    def not_computing(self) -> Iterator[None]:
        """Leave out of a unit's computation what its stream does instead."""
        computing = self._computing is not None
        if computing:
            self.end_computing()
        yield
        if computing:
            self.begin_computing()

    def end_with(self, span: Span, work: Future[Any]) -> None:
        """When the work is done: gloo's thread calls back then."""
        span.ended = work.then(lambda _: self.end(span))

    def take(self) -> list[Span]:
        """Returns the spans of the step that is over."""
        taken, self.spans = self.spans, []
        return taken


def launch_between(begun_ns: int, returned_ns: int) -> int:
    """Returns about when a collective was launched, if it was marked and its call returned then."""
    return begun_ns + round(LAUNCHED_AT * (returned_ns - begun_ns))


def resolve(spans: list[Span], origin: Mark, anchor: Anchor) -> Spans:
    """Returns when the spans were, all of which the device must have passed."""
    found: Spans = {}
    for span in spans:
        found.setdefault(span.stream, []).append(span.resolve(origin, anchor))
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
        self.forward_ended: Callable[[], object] = _nothing
        self.backward_ended: Callable[[], object] = _nothing
        """Called on the host where that is enqueued."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(_Entry.apply(x, self._recorder.begin_computing, self._end_backward))
        self._recorder.end_computing()
        self.forward_ended()
        assert output.grad_fn is not None
        # It runs after the hooks of the tensor, of which FSDP2's waits for the parameters.
        output.grad_fn.register_prehook(self._begin_backward)
        return output

    def _begin_backward(self, _gradients: tuple[Tensor, ...]) -> None:
        self._recorder.begin_computing()

    def _end_backward(self) -> None:
        self._recorder.end_computing()
        self.backward_ended()


def _nothing() -> None:
    pass


class Recording:
    """Writes a rank's telemetry, some steps at once: to read a mark is to wait for the device."""

    def __init__(self, directory: Path, ranks: Ranks, sampler: DeviceSampler, log_interval: int) -> None:
        self.losses: list[float | None] = []
        """Of the steps that were not profiled, mean over all ranks; None where it is no number."""
        self._path, self._ranks, self._sampler = directory / metrics_file(ranks.rank), ranks, sampler
        self._log_interval = log_interval
        self._waiting: list[tuple[Step, bool]] = []
        self._anchor = self._new_anchor()

    def add(self, step: Step, profiled: bool = False) -> None:
        """Writes every `log_interval` steps. Collective."""
        self._waiting.append((step, profiled))
        if (step.number + 1) % self._log_interval == 0:
            self.write()

    def write(self) -> None:
        """What waits to be written. Collective."""
        if not self._waiting:
            return
        self._ranks.synchronize()
        steps = [step for step, _ in self._waiting]
        losses = _means([step.loss for step in steps], self._ranks)
        records = [
            self._record(step, loss, profiled) for (step, profiled), loss in zip(self._waiting, losses, strict=True)
        ]
        write_metrics(self._path, records)
        self.losses += [record.loss for record in records if not record.profiled]
        self._waiting.clear()
        self._anchor = self._new_anchor()
        last = records[-1]
        if self._ranks.rank == 0:
            print(
                f"step {last.step}: loss {losses[-1]:.4f}, {last.step_ms:.2f} ms, "
                f"{last.exposed_comm_ms:.2f} ms of communication exposed",
                flush=True,
            )

    def _new_anchor(self) -> Anchor:
        self._ranks.synchronize()
        return Anchor(self._ranks.device)

    def _record(self, step: Step, loss: float, profiled: bool) -> StepRecord:
        step_ns = step.end.after_ns(step.begin)
        sample = self._sampler.last_before(step.started + step_ns / 1e9)
        norm = float(step.grad_norm)
        return StepRecord(
            step=step.number,
            rank=self._ranks.rank,
            started=step.started,
            profiled=profiled,
            loss=loss if math.isfinite(loss) else None,
            learning_rate=step.learning_rate,
            grad_norm=norm if math.isfinite(norm) else None,
            loss_scale=step.loss_scale,
            device=sample.values,
            rocm_smi_output=sample.rocm_smi_output,
            **overlap_of(resolve(step.spans, step.begin, self._anchor), step_ns),
        )


def _means(losses: Sequence[Tensor], ranks: Ranks) -> list[float]:
    mean = torch.stack(list(losses)).double() / ranks.world_size
    if ranks.world_size > 1:
        dist.all_reduce(mean)
    found: list[float] = mean.tolist()
    return found
