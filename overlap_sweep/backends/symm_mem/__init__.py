"""PyTorch's symmetric-memory operators, which `torch.compile` uses for tensor parallelism under async TP.

Its methods have no knobs:

- `ring_exchange`: the fused operators `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`: each rank's chunk
  is copied peer to peer while another is multiplied. Chunks go directly from rank to rank instead of around a ring.
- `bulk`: the low-contention collectives by copy engines, next to a GEMM that does not need them.

The async-TP pass (`torch._inductor.config._micro_pipeline_tp`) uses the fused operators wherever an all-gather is the
left input of a GEMM or a reduce-scatter takes a GEMM's product, in the whole model. That is the default here. It does
not change the all-gather of a saved input, which is the right input of its GEMM, wgrad. A training step under the pass
differs from what runs here in three ways (read in torch 2.13, inductor's fx_passes/micro_pipeline_tp.py):

- A GEMM with a bias is fused only if inductor has split off the bias, which it does before elementwise operators.
- Unless activations are checkpointed, a gathered input is kept for backward. Here it is gathered again, as in
  Megatron-LM, with and without overlap.
- An input of up to 2048 rows that nothing else needs may be gathered by NVLink multicast. Here it never is.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import overlap_sweep.backends.torch as plain
from overlap_sweep.backends import (
    KnobsPoint,
    LayerPoint,
    LinearPoint,
    ParallelLayer,
    ParallelLinear,
    Purpose,
    lacks_cublasmp,
    lacks_precision,
    needs_gpus,
)
from overlap_sweep.config import TensorParallelPoint
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.space import OperatorPoint, Setting

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure import Ranks

LAYER_HAS_DEFAULT = True
attention, default_knobs = plain.attention, plain.default_knobs

METHODS = ("ring_exchange", "bulk")

ASYNC_TP: dict[str, Setting] = {
    slot: {"method": "ring_exchange"} for slot, methods in space.SLOTS.items() if "ring_exchange" in methods
}
"""Settings of the slots that the async-TP pass overlaps; it overlaps all of them or none."""


def refusal(point: LinearPoint, operator: str, settings: Mapping[str, Setting]) -> str | None:
    if reason := needs_gpus(point) or lacks_precision(point, plain.PRECISIONS) or lacks_cublasmp(point):
        return reason
    for slot, setting in settings.items():
        if setting["method"] not in METHODS:
            return f"{slot}: backend=symm_mem has no {setting['method']}; it has {' and '.join(METHODS)}"
    absent = {slot: space.absent_knobs("symm_mem", aggregate=s.get("aggregate")) for slot, s in settings.items()}
    if used := {k for slot, s in settings.items() for k in s.keys() - {"method"} - absent[slot]}:
        return f"backend=symm_mem has no {', '.join(sorted(used))}; its methods have no knobs"
    return None


def knobs(point: KnobsPoint) -> Collection[str]:
    return ()


def has_default(point: OperatorPoint) -> bool:
    return point.tp_size > 1


def parameter_shapes(point: TensorParallelPoint, shape: LinearShape) -> Mapping[str, tuple[int, ...]]:
    """Returns the parameters' shapes, with a bias only if the model has one: the fused operators take none, so adding
    it costs an extra kernel."""
    shapes: dict[str, tuple[int, ...]] = {"weight": shape.weight_shape}
    return {**shapes, "bias": shape.weight_shape[:1]} if point.model.bias else shapes


def prepare(point: OperatorPoint, purpose: Purpose) -> None:
    """Does nothing: the operators allocate shared memory at their first call, before any timing."""


def build(point: OperatorPoint, purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]) -> ParallelLinear:
    from overlap_sweep.backends.symm_mem.operators import SymmetricMemory, group_name
    from overlap_sweep.backends.torch import modules, overlap

    settings = {"point": space.settings(point), "default": ASYNC_TP}.get(purpose, {})
    memory, collectives = SymmetricMemory(group_name()), overlap.by_collectives(ranks)
    return modules.build_operator(point, purpose, settings, parameters, collectives, overlapped=lambda _: memory)


def close() -> None:
    operators = sys.modules.get(f"{__name__}.operators")
    if operators:
        operators.close()


def layer_slots(config: OverlapConfig, operators: Collection[str]) -> dict[str, Setting]:
    """Returns the settings of these operators' slots that overlap.

    A slot that is switched on but not configured overlaps as under async TP: by the fused operators if they fit. A
    switch that allows a dgrad only `bulk` applies only to configured slots.
    """
    allowed = overlap_cfg.methods_allowed(config.switches)
    unset = {
        slot: setting
        for slot, setting in ASYNC_TP.items()
        if slot not in config.slots and slot.partition("_")[0] in operators and allowed[slot]
    }
    return unset | plain.overlapped_slots(config, operators)


def layer_refusal(point: LayerPoint, config: OverlapConfig, operators: Collection[str]) -> str | None:
    overlapped = layer_slots(config, operators)
    if not overlapped:
        return "the switches leave no slot of this layer to overlap"
    set_slots = plain.overlapped_slots(config, operators)
    return overlap_cfg.methods_refusal(overlapped) or plain.slots_refusal(point, config, set_slots, refusal)


def build_layer(point: LayerPoint, purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    from overlap_sweep.backends.symm_mem.operators import SymmetricMemory, group_name
    from overlap_sweep.backends.torch import modules
    from overlap_sweep.measure import parallel_groups

    settings = layer_slots(config, space.OPERATORS) if purpose == "point" else {}
    memory = SymmetricMemory(group_name(parallel_groups(point.tp_size, ranks.world_size)[0]))
    return modules.build_layer(point, purpose, settings, ranks, seed, overlapped=lambda _: memory)
