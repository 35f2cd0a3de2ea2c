"""The layer's variants, each a module of its own with the same weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap_sweep.backends.transformer_engine import userbuffers
from overlap_sweep.backends.transformer_engine.layers import build_layer, run_layer
from overlap_sweep.backends.transformer_engine.precision import autocast, calibrate, freeze, kept_apart
from overlap_sweep.backends.transformer_engine.silent_group import SilentGroup
from overlap_sweep.backends.transformer_engine.userbuffers import Userbuffers
from overlap_sweep.errors import Refused
from overlap_sweep.measure.variant import Variant
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.ranks import Ranks
from overlap_sweep.workloads.seeding import stream, stream_seed

INPUTS = 2
"""A layer's activations leave nothing of an input in any cache."""
LEARNING_RATE = 1e-4


def layer_bench(
    point: Mapping[str, Any], names: Sequence[str], configs: Mapping[str, OverlapConfig], ranks: Ranks
) -> tuple[dict[str, Variant], dict[str, str]]:
    """By name, the variants, and why the library refuses the others. Collective."""
    tp_group, dp_group = parallel_groups(point["tp_size"], ranks.world_size)
    tp_rank = ranks.rank % point["tp_size"]
    variants, refused = {}, {}
    for name in names:
        config = configs.get(name)
        prepare = _prepare(point, config)
        try:
            prepare()
        except Refused as reason:
            if not config:
                raise
            refused[name] = str(reason)
            continue
        torch.manual_seed(stream_seed(point["workload"]["seed"], "parameters", tp_rank))
        group = SilentGroup(tp_rank, point["tp_size"]) if name == "floor" else tp_group
        module, input_shape = build_layer(point, group, config.switches if config else {})
        replicas = None if name == "floor" else dp_group
        variants[name] = _variant(point, module, input_shape, group, replicas, prepare, ranks)
    return variants, refused


@cache
def parallel_groups(tp_size: int, world_size: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's tensor-parallel group, of neighbours, and its data-parallel group; None for that of one replica."""
    if tp_size == world_size:
        return dist.group.WORLD, None
    replicas = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    tensor, _ = dist.new_subgroups_by_enumeration(replicas)
    data, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*replicas, strict=True)])
    return tensor, data


def _prepare(point: Mapping[str, Any], config: OverlapConfig | None) -> Callable[[], None]:
    """Before each of the variant's turns: initialise the userbuffers anew.

    Those that overlap nothing do it too, though they use none of it: the pause lets the GPU cool and its clocks rise,
    and must be the same for all.
    """
    wanted = Userbuffers.of(point, config.slots if config else {})

    def prepare() -> None:
        if point["tp_size"] > 1:
            userbuffers.destroy()
            userbuffers.initialize(wanted)

    return prepare


def _variant(
    point: Mapping[str, Any],
    layer: torch.nn.Module,
    input_shape: tuple[int, int, int],
    group: dist.ProcessGroup | None,
    replicas: dist.ProcessGroup | None,
    prepare: Callable[[], None],
    ranks: Ranks,
) -> Variant:
    training, precision = point["layer"]["training"], point["precision"]
    generator = stream(ranks.device, point["workload"]["seed"], "inputs", ranks.rank)
    inputs = [_draw(input_shape, generator).requires_grad_() for _ in range(INPUTS)]
    parameters = dict(layer.named_parameters())
    module = DistributedDataParallel(layer, process_group=replicas) if replicas is not None else layer
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE) if training else None
    gradients: list[Tensor] = []
    # Training updates the scales in every step; without it they are frozen once found.
    select_scales = kept_apart() if training else None

    def forward(repeat: int, first: bool = training) -> Tensor:
        if select_scales:
            select_scales()
        x = inputs[repeat % INPUTS]
        for tensor in (x, *parameters.values()):
            tensor.grad = None
        with autocast(precision, group):
            output = run_layer(module, x, first)
        if not gradients:
            gradients.extend(_draw(tuple(output.shape), generator) for _ in range(INPUTS))
        return output

    def backward(repeat: int, output: Tensor) -> dict[str, Tensor]:
        x = inputs[repeat % INPUTS]
        torch.autograd.backward(output, gradients[repeat % INPUTS])
        found = {"input": x.grad, **{name: parameter.grad for name, parameter in parameters.items()}}
        return {f"{name}_grad": gradient for name, gradient in found.items() if gradient is not None}

    calibrate(precision, lambda: backward(0, forward(0, first=True)))
    if not training:
        freeze()
    return Variant(forward, backward, optimizer.step if optimizer else None, prepare)


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
