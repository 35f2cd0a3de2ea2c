"""Levers of FSDP2: its methods, called on the units at the end of the first step; and of FSDP1: arguments.

Each checks all that it needs before it changes anything, and raises NotApplicable otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_sweep.levers.process import NotApplicable, live

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def prefetch(units_ahead: int) -> None:
    for units in _units_by_root().values():
        _forward_prefetch(units, units_ahead)
        _backward_prefetch(units, units_ahead)


def _forward_prefetch(units: list[FSDPModule], ahead: int) -> None:
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])


def _backward_prefetch(units: list[FSDPModule], ahead: int) -> None:
    for i, unit in enumerate(units):
        unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1])


def _units_by_root() -> dict[Any, list[FSDPModule]]:
    """Returns the units of each model by its root, in the order of its modules and without the root. NotApplicable if
    there are none."""
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    roots: list[Any] = [one for one in live(FSDPModule) if isinstance(one, nn.Module)]
    inner = {module for root in roots for module in root.modules() if module is not root}
    found = {
        root: [module for module in root.modules() if isinstance(module, FSDPModule) and module is not root]
        for root in roots
        if root not in inner
    }
    found = {root: units for root, units in found.items() if units}
    if not found:
        raise NotApplicable("this training has no units of FSDP2 (fully_shard) below its root")
    return found
