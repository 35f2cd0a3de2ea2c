"""From the steps of this rank to the result's, which are of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.timing import Anchor
from overlap_sweep.workloads.tp_training.result import TpTrainingStep
from overlap_sweep.workloads.tp_training.steps import Step

_GB = 1e9


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
        slowest = self._ranks.slowest([value for step in self._waiting for value in _of_rank(step)])
        count = len(slowest) // len(self._waiting)
        for index, (step, loss) in enumerate(zip(self._waiting, losses, strict=True)):
            self._add(step, loss, slowest[index * count : (index + 1) * count])
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
    return [
        *step.times_us(),
        float(step.grad_norm),
        float(step.allocated_bytes or 0),
        float(step.peak_bytes or 0),
    ]
