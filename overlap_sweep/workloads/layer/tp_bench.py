"""The variants of a tensor-parallel layer: each is a module of its own with the same weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap_sweep import backends
from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks, parallel_groups, stream, stream_seed
from overlap_sweep.measure.instruments import say, say_groups, say_loss
from overlap_sweep.measure.timing import Variant
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import layer as workload
from overlap_sweep.workloads.layer.run import INPUTS, Bench, draw

LEARNING_RATE = 1e-4
WITH_ATTENTION = ("multihead_attention", "transformer_layer")
"""The kinds of layers that have attention."""


def build(point: Mapping[str, Any], ranks: Ranks) -> Bench:
    """Returns the point's variants. Collective."""
    refused, configs = workload.refused_variants(point), workload.overlap_configs(point)
    names = [name for name in workload.names(point) if name not in refused]
    # The others are checked against `none`, even if the user did not ask for its time.
    variants, refused_there = _variants(point, list(dict.fromkeys(["none", *names])), configs, ranks)
    backend, has_attention = backends.load(point["backend"]), point["layer"]["kind"] in WITH_ATTENTION
    return Bench(
        variants,
        {
            name: {"settings": config.slots, "switches": config.switches}
            for name, config in configs.items()
            if name in variants
        },
        refused | refused_there,
        none_is_timed="none" in names,
        **({"attention": partial(backend.attention, point, ranks)} if has_attention else {}),
    )


def _variants(
    point: Mapping[str, Any], names: Sequence[str], configs: Mapping[str, OverlapConfig], ranks: Ranks
) -> tuple[dict[str, Variant], dict[str, str]]:
    """Returns the variants by name, and the reasons of those that the library refuses. Collective."""
    backend = backends.load(point["backend"])
    tp_group, dp_group = parallel_groups(point["tp_size"], ranks.world_size)
    say_groups({"tensor-parallel": tp_group, "data-parallel": dp_group})
    seed = stream_seed(point["workload"]["seed"], "parameters", ranks.rank % point["tp_size"])
    variants, refused = {}, {}
    for name in names:
        config = configs.get(name, OverlapConfig(switches={}))
        try:
            purpose: Purpose = "none" if name == "none" else "floor" if name == "floor" else "point"
            say(f"builds {point['layer']['kind']} {name}: slots {config.slots}, switches {config.switches}")
            layer = backend.build_layer(point, purpose, config, ranks, seed)
        except Refused as reason:
            say(f"{name} is refused: {reason}")
            if name not in configs:
                raise
            refused[name] = str(reason)
            continue
        variants[name] = _variant(point, layer, None if name == "floor" else dp_group, ranks)
    return variants, refused


def _variant(
    point: Mapping[str, Any], layer: ParallelLayer, replicas: dist.ProcessGroup | None, ranks: Ranks
) -> Variant:
    training = point["layer"]["training"]
    parameters = dict(layer.module.named_parameters())
    say(
        f"built: input {list(layer.input_shape)}, parameters "
        + ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in parameters.items())
    )
    module = DistributedDataParallel(layer.module, process_group=replicas) if replicas is not None else layer.module
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE) if training else None
    generator = stream(ranks.device, point["workload"]["seed"], "inputs", ranks.rank)
    dtype = next(iter(parameters.values())).dtype
    inputs = [draw(layer.input_shape, generator, dtype).requires_grad_() for _ in range(INPUTS)]
    gradients: list[Tensor] = []

    def forward(repeat: int, first: bool = training) -> Tensor:
        x = inputs[repeat % INPUTS]
        for tensor in (x, *parameters.values()):
            tensor.grad = None
        output = layer.forward(module, x, first)
        if not gradients:
            gradients.extend(draw(tuple(output.shape), generator, dtype) for _ in range(INPUTS))
        return output

    def backward(repeat: int, output: Tensor) -> dict[str, Tensor]:
        x, gradient = inputs[repeat % INPUTS], gradients[repeat % INPUTS]
        say_loss(output, gradient)
        torch.autograd.backward(output, gradient)
        found = {"input": x.grad, **{name: parameter.grad for name, parameter in parameters.items()}}
        return {f"{name}_grad": gradient for name, gradient in found.items() if gradient is not None}

    if layer.calibrate:
        layer.calibrate(lambda: backward(0, forward(0, first=True)))
    return Variant(forward, backward, optimizer.step if optimizer else None, layer.prepare)
