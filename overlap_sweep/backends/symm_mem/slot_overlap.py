"""A parallel linear's slots by PyTorch's symmetric-memory operators."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from overlap_sweep.backends.symm_mem import operators
from overlap_sweep.backends.torch.communicator import Pending


@dataclass(frozen=True)
class SymmetricMemory:
    """`torch.slot_overlap.Overlap` of a process group: the fused operators, and the low-contention collectives beside
    what does not need them."""

    group_name: str

    def gather_multiply(self, shard: Tensor, matrix: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        gathered, product = operators.all_gather_matmul(shard, matrix, self.group_name)
        return gathered, product if bias is None else product.add_(bias)

    def multiply_scatter(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return operators.matmul_reduce_scatter(rows, matrix, self.group_name)

    def all_gather(self, shard: Tensor) -> Pending:
        gathered = operators.all_gather(shard, self.group_name)
        return Pending(gathered, [_Registered(gathered)], [shard])

    def reduce_scatter(self, full: Tensor) -> Pending:
        shard = operators.reduce_scatter(full, self.group_name)
        return Pending(shard, [_Registered(shard)], [full])


@dataclass(frozen=True)
class _Registered:
    """The work that torch has registered for a tensor."""

    result: Tensor

    def wait(self) -> None:
        operators.wait(self.result)
