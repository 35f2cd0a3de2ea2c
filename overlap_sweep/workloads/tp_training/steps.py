"""One training step after the other, with marks between its parts, which are read when the device has passed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.timing import Mark
from overlap_sweep.workloads.tp_training.batches import TokenBatches
from overlap_sweep.workloads.tp_training.implementation import Implementation


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
        for index, last in self._next_micro_batches():
            batch = self._batches[index]
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

    def _next_micro_batches(self) -> Iterator[tuple[int, bool]]:
        """Their numbers, and whether each is the step's last."""
        first = self._taken * self._micro_batches
        for index in range(self._micro_batches):
            yield first + index, index == self._micro_batches - 1

    def _of_memory(self, asked: Any) -> int | None:
        return int(asked(self._device)) if self._device.type == "cuda" else None
