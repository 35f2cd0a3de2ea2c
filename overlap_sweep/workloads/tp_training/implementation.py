"""What a tensor-parallel stack is to the benchmark: three calls that a training step is made of.

Each is a module of this package with `build(point, ranks, groups) -> Implementation`, called on every rank. It returns
the model in training, with the weights of `initial_weights`. Refused from it skips the point with that reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

MODULES = {
    "autotp": "overlap_sweep.workloads.tp_training.autotp",
    "fsdp_dtensor": "overlap_sweep.workloads.tp_training.fsdp_dtensor",
    "async_tp": "overlap_sweep.workloads.tp_training.async_tp",
    "megatron": "overlap_sweep.workloads.tp_training.megatron",
}


@dataclass(frozen=True)
class Facts:
    """What only the implementation knows of how it trains."""

    details: dict[str, Any] = field(default_factory=dict)
    """Of result.json, such as who computes attention. JSON."""
    warnings: list[str] = field(default_factory=list)
    """What a reader must know before believing the numbers, one sentence each."""


class Implementation(Protocol):
    """A model in training on this rank. Nothing here waits for the device unless the stack itself does."""

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        """The loss of one micro batch, mean over this data-parallel rank's tokens, float32, the same on all its
        tensor-parallel ranks. tokens, labels: [batch, sequence], int64; labels are those of the next token already.
        `last`: of the step's micro batches."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Of the loss that `forward` returned. Gradients are averaged over micro batches and data-parallel ranks; they
        are reduced with the last one, unless the stack reduces each."""
        ...

    def update(self) -> Tensor:
        """Clip, take the optimizer's step, clear the gradients. Returns the norm of the gradients before, over all
        parameters and ranks: a scalar on any device; not finite where the step was left out (float16)."""
        ...

    def facts(self) -> Facts:
        """Asked once, after the last step."""
        ...

    def close(self) -> None:
        """Free what outlives the object: process groups of its own, buffers, state of the library's. Collective."""
        ...


def load(name: str) -> Any:
    """The implementation's module."""
    return import_module(MODULES[name])
