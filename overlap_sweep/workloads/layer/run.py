"""Runs a layer's variants on the workers. Each is checked against `none`, timed in turns with the others, and
profiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.measure import Ranks
from overlap_sweep.measure.profile import capture_each
from overlap_sweep.measure.timing import Enough, Samples, Variant, relative_error, summarise, time_variants
from overlap_sweep.overlap import recipes
from overlap_sweep.results.verdict import enough_of_rounds
from overlap_sweep.workloads import layer as workload
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes

INPUTS = 2
"""Two are enough: a layer's activations evict its input from every cache."""


@dataclass(frozen=True)
class Bench:
    """What a kind of layer has to measure."""

    variants: dict[str, Variant]
    """By name, `none` always among them."""
    configured: Mapping[str, Mapping[str, Any]]
    """The fields of VariantTimes that say how a variant overlaps, for those that must compute what `none` does."""
    refused: Mapping[str, str]
    """Why other variants cannot run."""
    none_is_timed: bool = True
    attention: Callable[[], tuple[str | None, list[str]]] = lambda: (None, [])
    """Returns the implementation of the attention that ran, and warnings about it."""


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns the measured fields of the point's `Result`. Collective."""
    bench: Bench = import_module(f"{__package__}.{workload.bench(point)}").build(point, ranks)
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
    options = point["workload"]
    found = {
        name: VariantTimes(
            times={pass_name: summarise(us) for pass_name, us in taken.us.items()},
            **configured.get(name, {}),
            relative_error=errors.get(name, {}),
            launch_bound=taken.launch_bound,
        )
        for name, taken in time_variants(
            right, ranks, options["warmup"], options["repeats"], enough=_enough(point)
        ).items()
    }
    # The floor does not compute the layer.
    whole_us = {name: one.times["all"].median_us for name, one in found.items() if name != "floor"}
    fastest = min(whole_us, key=whole_us.__getitem__)
    wanted = {"all": set(found), "best": {"none", fastest}, "none": set[str]()}[point["profile"]]
    profiled = {name: variant for name, variant in right.items() if name in wanted}
    traces = capture_each(profiled, ranks, options["profiled"], directory)
    attention, attention_warnings = bench.attention()
    return {
        "measured": LayerTimes(variants=found, attention_backend=attention),
        "objective_us": whole_us[fastest],
        "launch_bound": any(times.launch_bound for times in found.values()),
        "traces": traces,
        "relative_error": wrong_errors,
        "warnings": [
            *(f"{name} was not measured: {reason}." for name, reason in refused.items()),
            *wrong.values(),
            *recipes.notes(point["precision"]),
            *attention_warnings,
        ],
    }


def _enough(point: Mapping[str, Any]) -> Enough | None:
    """Returns the rule that ends the rounds early, if the point has one and `none` is timed."""
    goal = point["workload"].get("noise_goal")
    if goal is None:
        return None

    def enough(samples: Mapping[str, Samples]) -> bool:
        reference = samples.get("none")
        others = [one.us["all"] for name, one in samples.items() if name not in workload.NOT_OVERLAPPED]
        return reference is not None and enough_of_rounds(others, reference.us["all"], goal)

    return enough


def draw(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
