"""A parallel linear operator made of Transformer Engine's modules: the same for its own and Megatron-Core's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import Tensor

from overlap_sweep.backends import ParallelLinear, Purpose
from overlap_sweep.backends.transformer_engine.precision import autocast, calibrate, freeze
from overlap_sweep.backends.transformer_engine.silent_group import SilentGroup
from overlap_sweep.backends.transformer_engine.switches import Switches, operator_switches
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.models import LinearShape

MakeModule = Callable[
    [Mapping[str, Any], LinearShape, dist.ProcessGroup | None, Switches], tuple[torch.nn.Module, Callable[..., Tensor]]
]
"""(point, shape, tensor-parallel group, switches) -> the module, and its forward(x, first) -> output.

`first` has FP8 weights quantised; later calls use them again, as in the microbatches of a training step."""


def build(
    point: Mapping[str, Any],
    purpose: Purpose,
    ranks: Ranks,
    parameters: Mapping[str, Tensor],
    make_module: MakeModule,
) -> ParallelLinear:
    shape = models.linear_shape(point["model"], point["operator"], point["workload"]["tokens"], point["tp_size"])
    if purpose == "tp1":
        shape = shape.unsharded()
    group = None
    if shape.tp_size > 1:
        group = silent_group(ranks) if purpose == "floor" else dist.group.WORLD
    settings = space.settings(point) if purpose == "point" else {}
    module, module_forward = make_module(point, shape, group, operator_switches(point["operator"], purpose, settings))
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    assert {name for name, _ in module.named_parameters()} == set(parameters)

    def forward(x: Tensor, first: bool = False) -> Tensor:
        with autocast(point["precision"], group):
            return module_forward(x, first)

    linear = ParallelLinear(forward, parameters, shape.input_shape, shape.output_shape)
    seed = point["workload"]["seed"] + ranks.rank
    calibrate(point["precision"], _step(linear, partial(forward, first=True), seed))
    freeze()
    return linear


def _step(linear: ParallelLinear, forward: Callable[[Tensor], Tensor], seed: int) -> Callable[[], object]:
    """A forward and backward on random input."""

    def step() -> object:
        weight = linear.parameters["weight"]
        generator = torch.Generator(weight.device).manual_seed(seed)
        draw: dict[str, Any] = {"generator": generator, "device": weight.device, "dtype": weight.dtype}
        x = torch.randn(linear.input_shape, **draw).requires_grad_()
        gradient = torch.randn(linear.output_shape, **draw)
        return torch.autograd.grad(forward(x), (x, *linear.parameters.values()), gradient)

    return step


@cache
def silent_group(ranks: Ranks) -> SilentGroup:
    return SilentGroup(ranks.rank, ranks.world_size)


def transformer_engine_module(
    point: Mapping[str, Any], shape: LinearShape, group: dist.ProcessGroup | None, switches: Switches
) -> tuple[torch.nn.Module, Callable[..., Tensor]]:
    """`te.LayerNormLinear` for column-parallel operators, `te.Linear` for row-parallel ones, as in its layers."""
    model = point["model"]
    arguments: dict[str, Any] = {
        "bias": model["bias"],
        "params_dtype": torch.bfloat16,
        "tp_group": group,
        "tp_size": shape.tp_size,
        "sequence_parallel": shape.tp_size > 1,
        "parallel_mode": shape.parallel if shape.tp_size > 1 else None,
        **({"ub_name": point["operator"], **switches} if any(switches.values()) else {}),
    }
    if shape.parallel == "column":
        arguments["normalization"] = model["normalization"]
    make = te.LayerNormLinear if shape.parallel == "column" else te.Linear
    module = make(shape.in_features, shape.out_features, **arguments)
    return module, lambda x, first: module(x, is_first_microbatch=first)
