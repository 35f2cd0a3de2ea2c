"""One training step after the other, with marks between its parts, which are read when the device has passed them, and
from the steps of this rank the result's, which are of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.timing import Anchor, Mark
from overlap_sweep.workloads.tp_training.implementation import Implementation
from overlap_sweep.workloads.tp_training.inputs import TokenBatches
from overlap_sweep.workloads.tp_training.result import TpTrainingStep

_GB = 1e9


@dataclass(frozen=True)
class Step:
    """What is known of a step when it is enqueued."""

    number: int
    forwards: list[tuple[Mark, Mark]]
    """Begin and end, of each micro batch."""
    backwards: list[tuple[Mark, Mark]]
    end: Mark
    loss: Tensor
    """Mean over this rank's micro batches."""
    grad_norm: Tensor
    allocated_bytes: int | None
    peak_bytes: int | None

    @property
    def begin(self) -> Mark:
        return self.forwards[0][0]

    @property
    def computed(self) -> Mark:
        """The end of its last backward."""
        return self.backwards[-1][1]

    def times_us(self) -> list[float]:
        """Whole step, forward, backward, optimizer. The device must have passed its end."""
        return [
            self.end.after_ns(self.begin) / 1e3,
            sum(end.after_ns(begin) for begin, end in self.forwards) / 1e3,
            sum(end.after_ns(begin) for begin, end in self.backwards) / 1e3,
            self.end.after_ns(self.computed) / 1e3,
        ]


class TrainingSteps:
    """An implementation on its data. `run` is one step."""

    def __init__(
        self, implementation: Implementation, batches: TokenBatches, point: Mapping[str, Any], ranks: Ranks
    ) -> None:
        self._implementation, self._batches, self._device = implementation, batches, ranks.device
        self._micro_batches = point["tp_training"]["gradient_accumulation_steps"]
        self._taken = 0

    def run(self) -> Step:
        """Enqueue one step. Collective."""
        forwards, backwards, losses = [], [], []
        for index in range(self._micro_batches):
            batch, last = self._batches[self._taken * self._micro_batches + index], index == self._micro_batches - 1
            begin = Mark(self._device)
            loss = self._implementation.forward(batch.tokens, batch.labels, last)
            between = Mark(self._device)
            self._implementation.backward(loss, last)
            forwards.append((begin, between))
            backwards.append((between, Mark(self._device)))
            losses.append(loss.detach())
        grad_norm = self._implementation.update()
        end = Mark(self._device)
        self._taken += 1
        return Step(
            number=self._taken - 1,
            forwards=forwards,
            backwards=backwards,
            end=end,
            loss=torch.stack(losses).mean(),
            grad_norm=grad_norm.detach(),
            allocated_bytes=self._of_memory(torch.cuda.memory_allocated),
            peak_bytes=self._of_memory(torch.cuda.max_memory_allocated),
        )

    def _of_memory(self, asked: Any) -> int | None:
        return int(asked(self._device)) if self._device.type == "cuda" else None


class Recording:
    """Keeps steps until it is told to read them: to read a mark is to wait for the device."""

    def __init__(self, ranks: Ranks, dp: dist.ProcessGroup, warmup_steps: int, log_interval: int) -> None:
        self.steps: list[TpTrainingStep] = []
        self.ahead_us: list[float] = []
        """By timed step how much later than the host the device came to the end of the backward, on this rank."""
        self._ranks, self._dp = ranks, dp
        self._warmup_steps, self._log_interval = warmup_steps, log_interval
        self._waiting: list[Step] = []
        self._anchor = self._new_anchor()
        # Of building the model, and of earlier points of the process.
        self._forget_peak()

    def add(self, step: Step) -> None:
        """Reads at the end of the warm-up, whose peak of memory counts for nothing, and every `log_interval` steps.
        Collective."""
        self._waiting.append(step)
        warm = step.number + 1 == self._warmup_steps
        if warm or (step.number + 1) % self._log_interval == 0:
            self.read()
        if warm:
            self._forget_peak()

    def read(self) -> None:
        """What waits to be read. Collective."""
        if not self._waiting:
            return
        self._ranks.synchronize()
        losses = self._mean_losses(self._waiting)
        of_rank = [_of_rank(step) for step in self._waiting]
        slowest = iter(self._ranks.slowest([value for values in of_rank for value in values]))
        for step, loss, values in zip(self._waiting, losses, of_rank, strict=True):
            self._add(step, loss, list(islice(slowest, len(values))))
        self._waiting.clear()
        self._anchor = self._new_anchor()
        last = self.steps[-1]
        if self._ranks.rank == 0:
            print(f"step {last.step}: loss {losses[-1]:.4f}, {last.step_us / 1e3:.2f} ms", flush=True)

    def least_ahead_us(self) -> float | None:
        """`TpTrainingRun.host_ahead_us`. Collective."""
        if self._ranks.device.type != "cuda":
            return None
        median = torch.tensor(self.ahead_us).median().item()
        return -self._ranks.slowest([-median])[0]

    def _add(self, step: Step, loss: float, slowest: Sequence[float]) -> None:
        step_us, forward_us, backward_us, optimizer_us, grad_norm, allocated, peak = slowest
        on_gpu = step.allocated_bytes is not None
        timed = step.number >= self._warmup_steps
        self.steps.append(
            TpTrainingStep(
                step=step.number,
                warmup=not timed,
                loss=loss if math.isfinite(loss) else None,
                grad_norm=grad_norm if math.isfinite(grad_norm) else None,
                step_us=step_us,
                forward_us=forward_us,
                backward_us=backward_us,
                optimizer_us=optimizer_us,
                memory_allocated_gb=allocated / _GB if on_gpu else None,
                memory_peak_gb=peak / _GB if on_gpu else None,
            )
        )
        if timed:
            self.ahead_us.append(self._anchor.lead_ns(step.computed) / 1e3)

    def _mean_losses(self, steps: Sequence[Step]) -> list[float]:
        mean = torch.stack([step.loss for step in steps]).double() / dist.get_world_size(self._dp)
        dist.all_reduce(mean, group=self._dp)
        found: list[float] = mean.tolist()
        return found

    def _forget_peak(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._ranks.device)

    def _new_anchor(self) -> Anchor:
        self._ranks.synchronize()
        return Anchor(self._ranks.device)


def _of_rank(step: Step) -> list[float]:
    memory = (float(step.allocated_bytes or 0), float(step.peak_bytes or 0))
    return [*step.times_us(), float(step.grad_norm), *memory]
