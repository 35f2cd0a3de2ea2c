"""One parallel linear operator: overlapped as the point says, beside the same without overlap and its floor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep import backends, models, space
from overlap_sweep.errors import Refused
from overlap_sweep.run_directory import PassTimes, trace_file

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure.timing import Samples, Variant
    from overlap_sweep.models import LinearShape
    from overlap_sweep.ranks import Ranks

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 2e-2}
L2_BYTES = 128 * 2**20
"""More than any GPU's L2 cache: inputs rotate through at least this much memory."""
MOST_INPUTS = 8


def refusal(point: Mapping[str, Any]) -> str | None:
    tokens = point["workload"]["tokens"]
    return (
        space.refusal(point)
        or models.refusal(point["model"], point["operator"], tokens, point["tp_size"])
        or backends.load(point["backend"]).refusal(point)
    )


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Check, time and profile the point; the fields of `Result` that were measured."""
    from overlap_sweep.measure.profile import capture
    from overlap_sweep.measure.timing import summarise, time_variants

    workload = point["workload"]
    _check_sm_count(point, ranks)
    settings = space.settings(point)
    shape = models.linear_shape(point["model"], point["operator"], workload["tokens"], point["tp_size"])
    variants = _variants(point, shape, settings, ranks)
    error = _relative_error(variants["point"], variants["none"], ranks)
    tolerance = TOLERANCE[point["precision"]] if workload["tolerance"] is None else workload["tolerance"]
    if max(error.values()) > tolerance:
        raise ArithmeticError(f"wrong numbers: relative error {error} against no overlap, tolerance {tolerance}")
    samples = time_variants(variants, ranks, workload["warmup"], workload["repeats"])
    samples["tp1"] = _tp1(point, shape.unsharded(), ranks)
    times = {
        name: PassTimes(**{variant: summarise(taken.us[name]) for variant, taken in samples.items()})
        for name in (*space.PASSES, "all")
    }
    traces = []
    if workload["profiled"]:
        capture(variants["point"], ranks, workload["profiled"], directory)
        traces = [trace_file(rank) for rank in range(ranks.world_size)]
    return {
        "times": times,
        "objective_us": sum(times[name].point.median_us for name in space.passes(point)),
        "relative_error": error,
        "launch_bound": any(taken.launch_bound for taken in samples.values()),
        "traces": traces,
    }


def _check_sm_count(point: Mapping[str, Any], ranks: Ranks) -> None:
    import torch

    if ranks.device.type == "cuda" and point["method"] != "none":
        count = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        if point["num_sm"] > count:
            raise Refused(f"num_sm={point['num_sm']} is more than the GPU's {count}")


def _variants(
    point: Mapping[str, Any], shape: LinearShape, settings: dict[str, space.Setting], ranks: Ranks
) -> dict[str, Variant]:
    """The operator as the point says, without overlap, and as GEMMs alone: same weights, same kind of inputs."""
    import torch

    build = backends.load(point["backend"]).build
    operator, dtype, seed = point["operator"], _dtype(point["precision"]), point["workload"]["seed"]
    generator = torch.Generator(ranks.device).manual_seed(seed + 1 + ranks.rank)
    weight, bias = _parameters(shape, dtype, generator)
    if shape.parallel == "row":
        # A row-parallel bias is added once, after the reduction: it is the same on every rank.
        bias = _parameters(shape, dtype, torch.Generator(ranks.device).manual_seed(seed))[1]
    variants = {}
    for name, its_shape, its_settings in (
        ("point", shape, settings),
        ("none", shape, {}),
        ("floor", shape.local(), {}),
    ):
        # Every variant draws the same inputs where its shape is the same.
        inputs = torch.Generator(ranks.device).manual_seed(seed + 1 + ranks.rank)
        linear = build(operator, its_shape, its_settings, ranks)
        variants[name] = _variant(linear, its_shape, weight, bias, inputs)
    return variants


def _parameters(shape: LinearShape, dtype: Any, generator: Any) -> tuple[Tensor, Tensor]:
    import torch

    draw = {"generator": generator, "device": generator.device, "dtype": dtype}
    weight = torch.randn(shape.weight_shape, **draw) / shape.in_features**0.5
    bias = torch.randn(shape.weight_shape[0], **draw)
    return weight.requires_grad_(), bias.requires_grad_()


def _variant(linear: Any, shape: LinearShape, weight: Tensor, bias: Tensor, generator: Any) -> Variant:
    """Rotate through enough inputs that none of them waits in the L2 cache for its next turn."""
    import torch

    from overlap_sweep.measure.timing import Variant

    draw = {"generator": generator, "device": generator.device, "dtype": weight.dtype}
    input_bytes = shape.input_shape[0] * shape.input_shape[1] * weight.element_size()
    count = min(MOST_INPUTS, 1 + -(-L2_BYTES // input_bytes)) if weight.is_cuda else 2
    inputs = [torch.randn(shape.input_shape, **draw).requires_grad_() for _ in range(count)]
    gradients = [torch.randn(shape.output_shape, **draw) for _ in range(count)]

    def forward(repeat: int) -> Tensor:
        return linear(inputs[repeat % count], weight, bias)

    def backward(repeat: int, output: Tensor) -> tuple[Tensor, ...]:
        at = repeat % count
        return torch.autograd.grad(output, (inputs[at], weight, bias), gradients[at])

    return Variant(forward, backward)


def _relative_error(candidate: Variant, reference: Variant, ranks: Ranks) -> dict[str, float]:
    """Largest difference of each tensor over the reference's largest magnitude, over all ranks; inf for NaN."""
    import torch

    found = []
    for variant in (candidate, reference):
        output = variant.forward(0)
        found.append((output.detach(), *variant.backward(0, output)))
    errors = []
    for ours, theirs in zip(*found, strict=True):
        error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        errors.append(torch.nan_to_num(error, nan=torch.inf).item())
    return dict(zip(("output", "input_grad", "weight_grad", "bias_grad"), ranks.slowest(errors), strict=True))


_tp1_samples: dict[tuple[LinearShape, str], Samples] = {}


def _tp1(point: Mapping[str, Any], shape: LinearShape, ranks: Ranks) -> Samples:
    """The whole operator on rank 0 while the others wait, measured once per worker group: it depends on no knob."""
    import torch

    from overlap_sweep.measure.timing import Samples, time_variants
    from overlap_sweep.ranks import Ranks

    workload, precision = point["workload"], point["precision"]
    key = shape, precision
    if key not in _tp1_samples:
        count = workload["repeats"]
        us = {name: [0.0] * count for name in (*space.PASSES, "all")}
        if ranks.rank == 0:
            generator = torch.Generator(ranks.device).manual_seed(workload["seed"])
            alone = Ranks(0, 1, ranks.device)
            linear = backends.load(point["backend"]).build(point["operator"], shape, {}, alone)
            variant = _variant(linear, shape, *_parameters(shape, _dtype(precision), generator), generator)
            us = time_variants({"tp1": variant}, alone, workload["warmup"], count)["tp1"].us
        _tp1_samples[key] = Samples({name: ranks.slowest(taken) for name, taken in us.items()}, False)
    return _tp1_samples[key]


def _dtype(precision: str) -> Any:
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
