"""Trainings in this process, and what is recorded of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from overlap_sweep.recorder.recording import Recording, read_recordings
from overlap_sweep.recorder.step_recorder import StepRecorder

Recorded = Callable[..., StepRecorder]


class Model:
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        self.layer = torch.nn.Linear(4, 4)
        self.optimizer = optimizer(self.layer.parameters(), lr=0.1, **options)  # type: ignore[call-arg]

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.layer(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    def step(self) -> None:
        self.loss()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def recording(directory: Path) -> Recording:
    (found,) = read_recordings(directory)
    return found
