"""Norms and sums of a rank's gradients and parameters and its loss at the end of a step: whether another setting
computes the same can be seen by them.

They are launched like any other work of a GPU and read when everything is recorded, so no step waits for them. Of
sharded tensors it is the rank's own shard: no collective is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from overlap_sweep.recorder.recording import NOT_FINITE, Number, TrainingState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_SHORT = (torch.float16, torch.bfloat16)


class PendingState:
    """The state at the end of a step, which a GPU may still be computing."""

    def __init__(self, step: int, optimizers: Iterable[Optimizer], loss: Any = None) -> None:
        """`optimizers`: all that have stepped. `loss`: a tensor or a number."""
        self._step = step
        with torch.no_grad():
            parameters = _parameters(optimizers)
            gradients = [one.grad for one in parameters if one.grad is not None]
            found = {
                "gradients_norm": _norm(gradients),
                "gradients_sum": _sum(gradients),
                "parameters_norm": _norm(parameters),
                "parameters_sum": _sum(parameters),
                "loss": _mean(loss),
            }
            self._values = {name: value for name, value in found.items() if value is not None}
            on_gpu = [one.device for one in self._values.values() if one.is_cuda]
            self._stacked = _stacked([*self._values.values()])
        self._is_short = bool(on_gpu) or any(one.dtype in _SHORT for one in (*parameters, *gradients))

    def read(self) -> TrainingState:
        """Waits for the values. RuntimeError if the GPU has failed meanwhile."""
        numbers: list[float] = [] if self._stacked is None else self._stacked.tolist()
        values: dict[str, Number] = {
            name: number if math.isfinite(number) else NOT_FINITE
            for name, number in zip(self._values, numbers, strict=True)
        }
        return TrainingState(step=self._step, is_short=self._is_short, **values)


def _parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Returns each parameter once, though optimizers within others have the same."""
    return list(dict.fromkeys(one for each in optimizers for group in each.param_groups for one in group["params"]))


def _norm(tensors: Sequence[Tensor]) -> Tensor | None:
    norms = _stacked([torch.linalg.vector_norm(one, dtype=_precise(one)) for one in map(_values, tensors)])
    return None if norms is None else torch.linalg.vector_norm(norms)


def _sum(tensors: Sequence[Tensor]) -> Tensor | None:
    sums = _stacked([one.sum(dtype=_precise(one)) for one in map(_values, tensors)])
    return None if sums is None else sums.sum()


def _precise(tensor: Tensor) -> torch.dtype:
    """Returns the type to add in, to which a GPU converts as it reads: a copy could be too large for its memory."""
    return torch.float32 if tensor.dtype in _SHORT else tensor.dtype


def _values(tensor: Tensor) -> Tensor:
    own = _local(tensor)
    return own.coalesce().values() if own.is_sparse else own


def _mean(loss: Any) -> Tensor | None:
    if loss is None:
        return None
    return (_local(loss) if torch.is_tensor(loss) else torch.tensor(float(loss))).double().mean()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return local


def _stacked(numbers: Sequence[Tensor]) -> Tensor | None:
    """Returns numbers as one tensor, on a GPU if any is there; None without any."""
    if not numbers:
        return None
    device = next((one.device for one in numbers if one.is_cuda), numbers[0].device)
    return torch.stack([one.to(device, torch.float64, non_blocking=True) for one in numbers])
