"""Levers of FSDP2: its methods, called on the units at the end of the first step; and of FSDP1: arguments.

Each checks all that it needs before it changes anything, and raises NotApplicable otherwise.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlap_sweep.levers import Value, typed
from overlap_sweep.levers.ddp import counted, synchronise_last
from overlap_sweep.levers.process import Later, NotApplicable, NotHere, live

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_PART_NUMBERS = 8
"""Numbers of 2 bytes in 16 bytes: NCCL's kernels for symmetric memory (seen with 2.28.9) gather other parts wrongly."""


def prefetch(units_ahead: int) -> None:
    forward_prefetch(units_ahead)
    backward_prefetch(units_ahead)


def forward_prefetch(units_ahead: int) -> None:
    for units in units_by_root().values():
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + units_ahead])


def backward_prefetch(units_ahead: int) -> None:
    for units in units_by_root().values():
        for i, unit in enumerate(units):
            unit.set_modules_to_backward_prefetch(units[max(0, i - units_ahead) : i][::-1])


def reshard_after_forward(value: Value, arguments: Mapping[str, Any]) -> bool | int:
    """Returns the argument of a unit; it leaves the root as it is, which needs its parameters first in the backward
    pass."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    given = arguments["module"]
    modules = given if isinstance(given, (list, tuple)) else [given]
    if any(isinstance(inner, FSDPModule) for module in modules for inner in module.modules()):
        raise NotHere("this training has no units of FSDP2 (fully_shard) below its root")
    wanted, mesh = typed(str(value)), arguments["mesh"]
    if isinstance(wanted, bool):
        return wanted
    # Of a mesh with replicas its last dimension shards; without a mesh all ranks do.
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    ranks = world if mesh is None else mesh.size(mesh.ndim - 1)
    if not 1 <= wanted <= ranks or ranks % wanted:
        raise NotApplicable(f"{wanted} is no factor of the {ranks} ranks that share a unit's parameters")
    # As FSDP2 takes it.
    return True if wanted == ranks else wanted


def separate_reduce_scatter_group(_: bool) -> None:
    for root in roots_with_groups():
        root.set_separate_reduce_scatter_group(True)


def roots_with_groups(_: object = None) -> list[Any]:
    roots = units_by_root()
    _check(roots, "set_separate_reduce_scatter_group", "2.13")
    return [*roots]


def symmetric_memory(_: str) -> None:
    for unit in units_for_symmetric_memory():
        unit.set_symm_mem_for_comm()


def units_for_symmetric_memory(_: object = None) -> list[Any]:
    import torch

    roots = units_by_root()
    _check(roots, "set_symm_mem_for_comm", "2.13")
    count = torch.cuda.device_count()
    own = torch.cuda.current_device() if count else 0
    if count < 2 or not all(torch.cuda.can_device_access_peer(own, peer) for peer in range(count) if peer != own):
        raise NotApplicable("symmetric memory needs GPUs with peer access to each other")
    all_units = [unit for root, units in roots.items() for unit in (root, *units)]
    # Units within a unit come after it, and have their parameters to themselves.
    unit_of = {parameter: unit for unit in all_units for parameter in unit.parameters()}
    numbers: Counter[Any] = Counter()
    for parameter, unit in unit_of.items():
        numbers[unit] += parameter.to_local().numel()
    if wrong := next((number for number in numbers.values() if number % _PART_NUMBERS), 0):
        raise NotApplicable(
            f"a rank's part of a unit has {wrong} numbers, no multiple of {_PART_NUMBERS}, which NCCL's kernels for "
            "symmetric memory gather wrongly"
        )
    return all_units


def no_sync(_: bool) -> Later:
    return synchronise_last([*units_by_root()], lambda root, is_last: root.set_requires_gradient_sync(is_last))


def several_microbatches(_: bool) -> Later:
    return counted([*units_by_root()])


def backward_prefetch_of_fsdp1(value: str, _: Mapping[str, Any]) -> object:
    from torch.distributed.fsdp import BackwardPrefetch

    return None if value == "none" else BackwardPrefetch[value]


def units_by_root(_: object = None) -> dict[Any, list[FSDPModule]]:
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


def _check(units: Mapping[Any, object], method: str, version: str) -> None:
    import torch

    if not all(hasattr(unit, method) for unit in units):
        raise NotApplicable(f"{method} needs PyTorch {version}; this is {torch.__version__}")
