"""Norms and sums of a rank's gradients and parameters and its loss at the end of a step: whether another setting
computes the same can be seen by them.

They are launched like any other work of a GPU and read when everything is recorded, so no step waits for them. Of
sharded tensors it is the rank's own shard: no collective is called.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from overlap_sweep.recorder.recording import NOT_FINITE, Number, TrainingState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_SHORT = (torch.float16, torch.bfloat16)
SIGNED_SUMS = 8
"""Sums of all gradients, each with other signs."""
_LENGTH = 1 << 14
"""Elements of a tensor after which the same signs come again, all of them turned or not."""
_AT_ONCE = 1 << 24
"""Elements that are multiplied at once, of which there is a copy."""


class PendingState:
    """The state at the end of a step, which a GPU may still be computing."""

    def __init__(self, step: int, optimizers: Iterable[Optimizer], loss: Any = None, rank: int = 0) -> None:
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
            self._signed = _signed_sums(gradients, rank)
            self._layout = _layout(gradients)
        self._is_short = bool(on_gpu) or any(one.dtype in _SHORT for one in (*parameters, *gradients))

    def read(self) -> TrainingState:
        """Waits for the values. RuntimeError if the GPU has failed meanwhile."""
        numbers: list[float] = [] if self._stacked is None else self._stacked.tolist()
        values: dict[str, Number] = {
            name: number if math.isfinite(number) else NOT_FINITE
            for name, number in zip(self._values, numbers, strict=True)
        }
        signed = [] if self._signed is None else self._signed.tolist()
        return TrainingState(
            step=self._step,
            is_short=self._is_short,
            layout=self._layout,
            signed_sums=[number if math.isfinite(number) else NOT_FINITE for number in signed],
            **values,
        )


def _parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Returns each parameter once, though optimizers within others have the same."""
    return list(dict.fromkeys(one for each in optimizers for group in each.param_groups for one in group["params"]))


def _norm(tensors: Sequence[Tensor]) -> Tensor | None:
    norms = _stacked([torch.linalg.vector_norm(one, dtype=_precise(one)) for one in map(_values, tensors)])
    return None if norms is None else torch.linalg.vector_norm(norms)


def _sum(tensors: Sequence[Tensor]) -> Tensor | None:
    sums = _stacked([one.sum(dtype=_precise(one)) for one in map(_values, tensors)])
    return None if sums is None else sums.sum()


def _signed_sums(tensors: Sequence[Tensor], rank: int) -> Tensor | None:
    """Returns SIGNED_SUMS sums over all elements with random signs, the same in every run; None of no tensors.

    By how much two of them differ is normally distributed around 0, with the norm of the difference of all elements as
    its deviation, whatever these are: a plain sum hides what adds up to nothing, and exaggerates a small error that all
    elements share. Equal tensors of different ranks have other signs, so that sums over ranks are as good.
    """
    found, columns = [], {}
    for number, tensor in enumerate(map(_values, tensors)):
        flat = tensor.reshape(-1)
        key = flat.device, _precise(flat)
        if key not in columns:
            signs = _signs(0, _LENGTH * SIGNED_SUMS, flat.device)
            columns[key] = signs.view(_LENGTH, SIGNED_SUMS).to(_precise(flat))
        for start in range(0, len(flat), _AT_ONCE):
            part = flat[start : start + _AT_ONCE].to(_precise(flat))
            whole = len(part) // _LENGTH * _LENGTH
            with torch.autocast(flat.device.type, enabled=False):
                rows = part[:whole].view(-1, _LENGTH) @ columns[key]
                rest = part[None, whole:] @ columns[key][: len(part) - whole]
            sums = torch.cat([rows, rest]).double()
            first = ((rank * 1_000_003 + number) << 28) + start // _LENGTH * SIGNED_SUMS
            found.append((sums * _signs(first, sums.numel(), flat.device).view(sums.shape)).sum(0))
    together = _stacked(found)
    return None if together is None else together.sum(0)


def _signs(first: int, count: int, device: torch.device) -> Tensor:
    """Returns the signs of the numbers from `first` on: a hash of them, which leaves the script's random numbers."""
    number = torch.arange(first, first + count, device=device)
    for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D):
        number = (number ^ (number >> 15)) * factor
        number = (number ^ (number >> 32)) & ((1 << 48) - 1)
    return (number >> 20 & 1) * 2 - 1


def _layout(tensors: Sequence[Tensor]) -> str:
    """Returns a digest of the tensors' sizes: with others, signs are those of other elements."""
    sizes = [tuple(_values(one).shape) for one in tensors]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:8]


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
