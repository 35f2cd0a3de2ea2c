"""PyTorch's symmetric-memory operators on a CPU, which it has for CUDA alone: by its own fallbacks, on gloo."""

from functools import cache

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory, distributed_c10d

called: list[str] = []
"""The operators that ran, in order."""


def _all_gather(tensor: Tensor, group_name: str) -> Tensor:
    world_size = distributed_c10d._get_group_size_by_name(group_name)
    gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(tensor, world_size, group_name)
    return gathered


def _reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    world_size = distributed_c10d._get_group_size_by_name(group_name)
    shard: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(tensor, reduce_op, world_size, group_name)
    return shard


OPERATORS = {
    "fused_all_gather_matmul": _symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": _symmetric_memory._fused_matmul_reduce_scatter_fallback,
    "_low_contention_all_gather": _all_gather,
    "_low_contention_reduce_scatter": _reduce_scatter,
}


@cache
def stand_in() -> torch.library.Library:
    """Give this process the operators, once."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name, function in OPERATORS.items():

        def noted(*arguments: object, name: str = name, function: object = function, **options: object) -> object:
            called.append(name)
            # With a multicast kernel where this is not asked for.
            assert options.get("return_A", True)
            return function(*arguments, **options)  # type: ignore[operator]

        library.impl(name, noted, "CPU")
    return library
