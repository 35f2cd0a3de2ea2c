"""Kernels on plain torch.distributed: NCCL or gloo, overlapped by chunks; and the baselines of all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlap_sweep.backends import Outputs, Problem
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import COLLECTIVES, COMM_ONLY, GEMM_ONLY, SEQUENTIAL, KernelPoint
from overlap_sweep.overlap.space import Setting

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure import Ranks

SPANS_NODES = True
NUM_SPLITS = (2, 4)
SHARES = {"cuda": (4, 8, 16), "cpu": (1, 2)}
"""num_sm of overlapped implementations: CTAs that NCCL may take from the GEMM, or chunks that gloo moves at once."""
SHARES_ALONE = {"cuda": (1, 2, 4, 8, 16, 32), "cpu": (1, 2)}
"""num_sm of collectives that are measured by themselves."""
_KNOBS = {"ring_exchange": {"aggregate", "num_sm"}, "pipeline": {"num_splits", "num_sm"}, "bulk": {"num_sm"}}


def refusal(point: KernelPoint) -> str | None:
    return None


def implementations(point: KernelPoint) -> dict[str, Setting]:
    if point.kernel in COLLECTIVES:
        alone = [point.num_sm] if point.num_sm else SHARES_ALONE[point.runtime.device]
        return {f"bulk_sm{share}": {"method": "bulk", "num_sm": share} for share in alone}
    shares = SHARES[point.runtime.device]
    rings: list[Setting] = [{"method": "ring_exchange"}]
    if _pairs(point):
        rings.append({"method": "ring_exchange", "aggregate": True})
    pipelines: list[Setting] = [{"method": "pipeline", "num_splits": splits} for splits in NUM_SPLITS]
    pipelines += [{"method": "pipeline", "num_splits": NUM_SPLITS[0], "num_sm": share} for share in shares]
    bulk: list[Setting] = [{"method": "bulk", "num_sm": share} for share in shares]
    settings = pipelines if point.kernel == "gemm_ar" else rings + pipelines + bulk
    return {space.setting_name(setting): setting for setting in settings}


def _pairs(point: KernelPoint) -> bool:
    """Returns whether pairing ranks leaves anything to overlap."""
    return bool(point.kernel == "ag_gemm" and point.tp_size > 2 and point.tp_size % 2 == 0)


def named(point: KernelPoint, name: str) -> Setting | None:
    setting = space.setting_of(name)
    if setting is None:
        return None
    method = space.method_of(setting)
    if point.kernel in COLLECTIVES:
        return setting if set(setting) == {"method", "num_sm"} and method == "bulk" else None
    if set(setting) - {"method", *_KNOBS[method]} or (method != "pipeline" and point.kernel == "gemm_ar"):
        return None
    if method == "pipeline":
        return {**setting, "num_splits": setting.get("num_splits", NUM_SPLITS[0])}
    if setting.get("aggregate"):
        return setting if _pairs(point) else None
    return {name: value for name, value in setting.items() if name != "aggregate"}


def gather(shard: Tensor, ranks: Ranks) -> Tensor:
    """Returns [world_size * rows, columns] from [rows, columns] of every rank, also for FP8."""
    from overlap_sweep.backends.communicator import all_gather, as_bytes

    moving = as_bytes(shard)
    full = moving.new_empty(ranks.world_size * shard.shape[0], *shard.shape[1:])
    all_gather(full, moving)
    return full.view(shard.dtype)


def baselines_of(problem: Problem, ranks: Ranks) -> dict[str, Callable[[int], Outputs]]:
    """Returns `models.BASELINES`, by the library's own collectives, with no overlap."""
    import torch.distributed as dist

    from overlap_sweep.backends.communicator import reduce_scatter
    from overlap_sweep.backends.torch.overlap import multiplied

    shape = problem.shape
    # An in-place all-reduce would make `whole` grow with every call. Zeros stay zeros.
    idle = problem.whole[0].data.new_zeros(shape.output_shape) if shape.kernel == "gemm_ar" else None

    def gemm_only(at: int) -> Outputs:
        return Outputs(multiplied(problem, at, (problem.whole if shape.gathers else problem.inputs)[at].data))

    def communicated(tensor: Tensor) -> Tensor:
        if shape.gathers:
            return gather(tensor, ranks)
        if shape.kernel == "gemm_ar":
            dist.all_reduce(tensor)
            return tensor
        shard = tensor.new_empty(shape.output_shape)
        reduce_scatter(shard, tensor)
        return shard

    def comm_only(at: int) -> Outputs:
        moving = (problem.inputs if shape.gathers else problem.whole)[at].data
        return Outputs(communicated(moving if idle is None else idle))

    def sequential(at: int) -> Outputs:
        if shape.gathers:
            return Outputs(multiplied(problem, at, comm_only(at).output))
        return Outputs(communicated(gemm_only(at).output))

    return {SEQUENTIAL: sequential, GEMM_ONLY: gemm_only, COMM_ONLY: comm_only}


def build(point: KernelPoint, setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
    from overlap_sweep.backends.communicator import as_bytes
    from overlap_sweep.backends.torch.overlap import by_collectives, multiply_beside, multiply_by

    overlap, shape, method = by_collectives(ranks)(setting), problem.shape, setting["method"]
    if method == "bulk":
        return lambda at: multiply_beside(problem, at, overlap)

    def call(at: int) -> Outputs:
        rows, multiply = problem.inputs[at].data, multiply_by(problem.weight, problem.inputs[at].scale)
        if shape.kernel == "gemm_rs":
            return Outputs(overlap.scatter(rows, shape.n, multiply, problem.out_dtype))
        output = rows.new_empty(shape.output_shape, dtype=problem.out_dtype)
        if shape.kernel == "gemm_ar":
            return Outputs(overlap.reduce_into(rows, output, multiply))
        gather = overlap.pipelined_gather_into if method == "pipeline" else overlap.gather_into
        gather(as_bytes(rows), output, multiply)
        return Outputs(output)

    return call


def close() -> None:
    """Does nothing: its communicators end with the process group."""
