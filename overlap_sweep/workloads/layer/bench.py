"""The layer's variants, each a module of its own with the same weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap_sweep import backends
from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.errors import Refused
from overlap_sweep.measure.ranks import Ranks, parallel_groups, stream, stream_seed
from overlap_sweep.measure.timing import Variant
from overlap_sweep.overlap.overlap_cfg import OverlapConfig

INPUTS = 2
"""A layer's activations leave nothing of an input in any cache."""
LEARNING_RATE = 1e-4


def layer_bench(
    point: Mapping[str, Any], names: Sequence[str], configs: Mapping[str, OverlapConfig], ranks: Ranks
) -> tuple[dict[str, Variant], dict[str, str]]:
    """By name, the variants, and why the library refuses the others. Collective."""
    backend = backends.load(point["backend"])
    _, dp_group = parallel_groups(point["tp_size"], ranks.world_size)
    seed = stream_seed(point["workload"]["seed"], "parameters", ranks.rank % point["tp_size"])
    variants, refused = {}, {}
    for name in names:
        config = configs.get(name, OverlapConfig(switches={}))
        try:
            layer = backend.build_layer(point, _purpose(name), config, ranks, seed)
        except Refused as reason:
            if name not in configs:
                raise
            refused[name] = str(reason)
            continue
        variants[name] = _variant(point, layer, None if name == "floor" else dp_group, ranks)
    return variants, refused


def _purpose(name: str) -> Purpose:
    return "none" if name == "none" else "floor" if name == "floor" else "point"


def _variant(
    point: Mapping[str, Any], layer: ParallelLayer, replicas: dist.ProcessGroup | None, ranks: Ranks
) -> Variant:
    training = point["layer"]["training"]
    parameters = dict(layer.module.named_parameters())
    module = DistributedDataParallel(layer.module, process_group=replicas) if replicas is not None else layer.module
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE) if training else None
    generator = stream(ranks.device, point["workload"]["seed"], "inputs", ranks.rank)
    dtype = next(iter(parameters.values())).dtype
    inputs = [_draw(layer.input_shape, generator, dtype).requires_grad_() for _ in range(INPUTS)]
    gradients: list[Tensor] = []

    def forward(repeat: int, first: bool = training) -> Tensor:
        x = inputs[repeat % INPUTS]
        for tensor in (x, *parameters.values()):
            tensor.grad = None
        output = layer.forward(module, x, first)
        if not gradients:
            gradients.extend(_draw(tuple(output.shape), generator, dtype) for _ in range(INPUTS))
        return output

    def backward(repeat: int, output: Tensor) -> dict[str, Tensor]:
        x = inputs[repeat % INPUTS]
        torch.autograd.backward(output, gradients[repeat % INPUTS])
        found = {"input": x.grad, **{name: parameter.grad for name, parameter in parameters.items()}}
        return {f"{name}_grad": gradient for name, gradient in found.items() if gradient is not None}

    if layer.calibrate:
        layer.calibrate(lambda: backward(0, forward(0, first=True)))
    return Variant(forward, backward, optimizer.step if optimizer else None, layer.prepare)


def _draw(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
