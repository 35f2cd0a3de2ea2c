"""Runs a layer's variants on the workers: each is a module of its own with the same weights and inputs, checked against
`none`, timed in turns with the others, and profiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap_sweep import backends
from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.measure import Ranks, parallel_groups, stream, stream_seed
from overlap_sweep.measure.instruments import say, say_groups, say_loss
from overlap_sweep.measure.profile import capture_each
from overlap_sweep.measure.timing import Enough, Samples, Variant, relative_error, summarise, time_variants
from overlap_sweep.overlap import recipes
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.space import Setting
from overlap_sweep.results.verdict import enough_of_rounds
from overlap_sweep.workloads import layer as workload
from overlap_sweep.workloads.layer.config import Resolved
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes

LEARNING_RATE = 1e-4
WITH_ATTENTION = ("multihead_attention", "transformer_layer")
"""The kinds of layers that have attention."""
INPUTS = 2
"""Two are enough: a layer's activations evict its input from every cache."""


@dataclass(frozen=True)
class Configured:
    """How a variant overlaps, as in VariantTimes."""

    settings: dict[str, Setting] = field(default_factory=dict)
    switches: dict[str, bool] = field(default_factory=dict)
    arguments: dict[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What a kind of layer has to measure."""

    variants: dict[str, Variant]
    """By name, `none` always among them."""
    configured: Mapping[str, Configured]
    """How those overlap that must compute what `none` does."""
    refused: Mapping[str, str]
    """Why other variants cannot run."""
    none_is_timed: bool
    attention: Callable[[], tuple[str | None, list[str]]] | None
    """Returns the implementation of the attention that ran, and warnings about it; None for a layer without."""


def run(point: Resolved, directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns the measured fields of a tensor-parallel layer's `Result`. Collective."""
    return measured(_tensor_parallel(point, ranks), point, directory, ranks)


def measured(bench: Bench, point: Resolved, directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns the measured fields of the point's `Result`. Collective."""
    variants, configured, refused = dict(bench.variants), bench.configured, bench.refused
    if refused and not configured:
        raise Refused("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    reference = variants["none"] if bench.none_is_timed else variants.pop("none")
    errors = {}
    for name in configured:
        # Every variant needs its own userbuffers.
        variants[name].get_ready()
        errors[name] = relative_error(variants[name], reference, ranks, name)
    allowed = workload.tolerance(point)
    wrong = {
        name: f"{name} computes wrong numbers and was not measured: relative error {max(error.values()):.2g} against "
        f"no overlap, tolerance {allowed:g}."
        for name, error in errors.items()
        if max(error.values()) > allowed
    }
    wrong_errors = {f"{name} {tensor}": error for name in wrong for tensor, error in errors[name].items()}
    if wrong and len(wrong) == len(configured):
        raise WrongNumbers(" ".join(wrong.values()), wrong_errors)
    right = {name: variant for name, variant in variants.items() if name not in wrong}
    options = point.workload
    assert options.repeats
    found = {
        name: VariantTimes(
            times={pass_name: summarise(us) for pass_name, us in taken.us.items()},
            **vars(configured.get(name, Configured())),
            relative_error=errors.get(name, {}),
            launch_bound=taken.launch_bound,
        )
        for name, taken in time_variants(right, ranks, options.warmup, options.repeats, enough=_enough(point)).items()
    }
    # The floor does not compute the layer.
    whole_us = {name: one.times["all"].median_us for name, one in found.items() if name != "floor"}
    fastest = min(whole_us, key=whole_us.__getitem__)
    wanted = {"all": set(found), "best": {"none", fastest}, "none": set[str]()}[point.profile]
    profiled = {name: variant for name, variant in right.items() if name in wanted}
    traces = capture_each(profiled, ranks, options.profiled, directory)
    attention, attention_warnings = bench.attention() if bench.attention else (None, [])
    return {
        "measured": LayerTimes(variants=found, attention_backend=attention),
        "objective_us": whole_us[fastest],
        "launch_bound": any(times.launch_bound for times in found.values()),
        "traces": traces,
        "relative_error": wrong_errors,
        "warnings": [
            *(f"{name} was not measured: {reason}." for name, reason in refused.items()),
            *wrong.values(),
            *recipes.notes(point.precision),
            *attention_warnings,
        ],
    }


def _enough(point: Resolved) -> Enough | None:
    """Returns the rule that ends the rounds early, if the point has one and `none` is timed."""
    goal = point.workload.noise_goal
    if goal is None:
        return None

    def enough(samples: Mapping[str, Samples]) -> bool:
        reference = samples.get("none")
        others = [one.us["all"] for name, one in samples.items() if name not in workload.NOT_OVERLAPPED]
        return reference is not None and enough_of_rounds(others, reference.us["all"], goal)

    return enough


def draw(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def _tensor_parallel(point: Resolved, ranks: Ranks) -> Bench:
    """Returns the point's variants. Collective."""
    backend, kind = backends.load(point.backend), point.layer.kind
    refused, configs = workload.refused_variants(point), workload.overlap_configs(point)
    names = [name for name in workload.names(point) if name not in refused]
    tp_group, dp_group = parallel_groups(point.tp_size, ranks.world_size)
    say_groups({"tensor-parallel": tp_group, "data-parallel": dp_group})
    seed = stream_seed(point.workload.seed, "parameters", ranks.rank % point.tp_size)
    variants = {}
    # The others are checked against `none`, even if the user did not ask for its time.
    for name in dict.fromkeys(["none", *names]):
        config = configs.get(name, OverlapConfig(switches={}))
        try:
            purpose: Purpose = "none" if name == "none" else "floor" if name == "floor" else "point"
            say(f"builds {kind} {name}: slots {config.slots}, switches {config.switches}")
            layer = backend.build_layer(point, purpose, config, ranks, seed)
        except Refused as reason:
            say(f"{name} is refused: {reason}")
            if name not in configs:
                raise
            refused[name] = str(reason)
            continue
        variants[name] = _variant(point, layer, None if name == "floor" else dp_group, ranks)
    configured = {
        name: Configured(config.slots, config.switches) for name, config in configs.items() if name in variants
    }
    attention = partial(backend.attention, point, ranks) if kind in WITH_ATTENTION else None
    return Bench(variants, configured, refused, "none" in names, attention)


def _variant(point: Resolved, layer: ParallelLayer, replicas: dist.ProcessGroup | None, ranks: Ranks) -> Variant:
    training = point.layer.training
    parameters = dict(layer.module.named_parameters())
    say(
        f"built: input {list(layer.input_shape)}, parameters "
        + ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in parameters.items())
    )
    module = DistributedDataParallel(layer.module, process_group=replicas) if replicas is not None else layer.module
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE) if training else None
    generator = stream(ranks.device, point.workload.seed, "inputs", ranks.rank)
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
