"""Calls on the training's model at its first step: what FSDP2 offers as methods.

Each checks all that it needs before it changes anything, and raises NotApplicable otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_sweep.levers.process import NotApplicable, Training

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def fsdp2_prefetch(units_ahead: int, training: Training) -> None:
    for units in _units(training):
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + units_ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, i - units_ahead) : i][::-1])


def _units(training: Training) -> list[list[FSDPModule]]:
    """Returns the units of each model, in the order of its modules, without the root. NotApplicable if there are
    none."""
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    roots, inner = training.live(FSDPModule), set()
    for one in roots:
        assert isinstance(one, nn.Module)
        inner |= {id(module) for module in one.modules() if module is not one}
    found: list[list[FSDPModule]] = [
        [module for module in root.modules() if isinstance(module, FSDPModule) and module is not root]
        for root in roots
        if id(root) not in inner and isinstance(root, nn.Module)
    ]
    found = [units for units in found if units]
    if not found:
        raise NotApplicable("this training has no units of FSDP2 (fully_shard) below its root")
    return found
