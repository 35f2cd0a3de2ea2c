"""Runs one operator on the workers. Weights, inputs and the variants that no setting changes are kept from point to
point."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from overlap_sweep import backends
from overlap_sweep.backends import ParallelLinear, Purpose
from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.measure import DTYPES, Ranks, stream
from overlap_sweep.measure.instruments import named_range, say
from overlap_sweep.measure.profile import capture_each
from overlap_sweep.measure.timing import (
    L2_BYTES,
    MOST_INPUTS,
    Enough,
    Samples,
    Variant,
    relative_error,
    summarise,
    time_variants,
)
from overlap_sweep.overlap import models, recipes, space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import now
from overlap_sweep.results.verdict import enough_of_pass
from overlap_sweep.workloads.operator.config import Resolved, ResolvedOptions
from overlap_sweep.workloads.operator.result import DefaultTiming, OperatorTimes, PassTimes

TP1_REPEATS = 7
"""Most timed passes of the unsharded operator."""

Inputs = dict[tuple[tuple[int, int], tuple[int, int]], tuple[list[Tensor], list[Tensor]]]
"""Inputs and output gradients by input and output shape."""


def run(point: Resolved, directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns the measured fields of `Result`: checks, times and profiles the point."""
    _check_sm_count(point, ranks)
    workload, backend = point.workload, backends.load(point.backend)
    bench = bench_for(point, ranks)
    default = _default_overlap(point, bench)
    with named_range("prepare point"):
        backend.prepare(point, "point")
    variants = {"point": bench.variant(point, "point"), "none": bench.none, "floor": bench.floor}
    error = relative_error(variants["point"], variants["none"], ranks)
    allowed = space.tolerance(point)
    if max(error.values()) > allowed:
        shown = ", ".join(f"{name} {value:.2g}" for name, value in error.items() if value > allowed)
        raise WrongNumbers(f"wrong numbers: relative error {shown} against no overlap, tolerance {allowed:g}", error)
    samples = time_variants(
        variants, ranks, workload.warmup, workload.repeats, enough=_enough(point, bench), seldom=["floor"]
    )
    times = {}
    for name in (*space.PASSES, "all"):
        timed = {variant: summarise(taken.us[name]) for variant, taken in samples.items()}
        times[name] = PassTimes(**timed, tp1=bench.tp1[name], default=default.times.get(name))
    relative = {name: times[name].point.median_us / times[name].none.median_us for name in space.PASSES}
    bench.none_us = bench.none_us or {name: times[name].none.median_us for name in space.PASSES}
    among_best = bench.is_among_best(point, relative, margin=0.01)
    traces = []
    if point.profile == "all" or (point.profile == "best" and among_best):
        # The trace of none is for comparison; one is enough, it hardly changes from point to point.
        profiled = {"": variants["point"], **({} if bench.none_profiled else {"none": variants["none"]})}
        traces = capture_each(profiled, ranks, workload.profiled, directory)
        bench.none_profiled = True
    return {
        "measured": OperatorTimes(times=times),
        "objective_us": bench.objective_us(point, relative),
        "relative_error": error,
        "launch_bound": any(taken.launch_bound for taken in samples.values()),
        "traces": traces,
        "warnings": [*default.warnings, *recipes.notes(point.precision)],
    }


def _enough(point: Resolved, bench: Bench) -> Enough | None:
    """Returns the rule that ends the point's repeats early, if it has one."""
    goal = point.workload.noise_goal
    if goal is None:
        return None

    def enough(samples: Mapping[str, Samples]) -> bool:
        point_us, none_us = samples["point"].us, samples["none"].us
        names = space.passes(point)
        return all(enough_of_pass(point_us[name], none_us[name], goal, bench.best.get(name, 1.0)) for name in names)

    return enough


def enough_of_default(point: Resolved) -> Enough | None:
    """Returns the rule that ends the repeats of the library's default early, if the point has one. However slow, its
    time is an answer."""
    goal = point.workload.noise_goal
    if goal is None:
        return None

    def enough(samples: Mapping[str, Samples]) -> bool:
        default_us, none_us = samples["default"].us, samples["none"].us
        return all(enough_of_pass(default_us[name], none_us[name], goal, best=math.inf) for name in space.PASSES)

    return enough


def _check_sm_count(point: Resolved, ranks: Ranks) -> None:
    most = max(map(space.num_sm_of, space.settings(point).values()), default=0)
    if ranks.device.type == "cuda":
        count = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        if most > count:
            raise Refused(f"num_sm={most} is more than the {count} SMs of the GPU")


def _default_overlap(point: Resolved, bench: Bench) -> DefaultOverlap:
    """Returns the library's default, measured again if its last measurement is too old."""
    if backends.load(point.backend).has_default(point):
        # All ranks must agree, and their clocks differ.
        (age_s,) = bench.ranks.slowest([time.monotonic() - bench.default.measured_s])
        if age_s >= point.workload.default_every_s:
            bench.default = _measure_default(point, bench)
    return bench.default


def _measure_default(point: Resolved, bench: Bench) -> DefaultOverlap:
    backend, ranks, workload, measured = backends.load(point.backend), bench.ranks, point.workload, now()
    try:
        with named_range("prepare default"):
            backend.prepare(point, "default")
    except Refused as reason:
        return DefaultOverlap(warnings=[f"The library's default overlap was not measured: {reason}."])
    variants = {"default": bench.variant(point, "default"), "none": bench.none}
    error = relative_error(variants["default"], variants["none"], ranks, "default")
    if max(error.values()) > space.DEFAULT_TOLERANCE:
        warning = f"The library's default overlap computes wrong numbers and was not measured: relative error {error}."
        return DefaultOverlap(warnings=[warning])
    samples = time_variants(variants, ranks, workload.warmup, workload.repeats, enough=enough_of_default(point))
    times = {}
    for name in (*space.PASSES, "all"):
        default, none = (summarise(samples[variant].us[name]) for variant in ("default", "none"))
        times[name] = DefaultTiming(default, none, measured)
    late = any(taken.launch_bound for taken in samples.values())
    said = "The library's default overlap was launch-bound: its time says nothing about the GPU."
    return DefaultOverlap(times, [said] if late else [])


@dataclass
class DefaultOverlap:
    """The last measurement of the library's own default overlap."""

    times: Mapping[str, DefaultTiming] = field(default_factory=dict)
    """Times by pass; empty if it could not be measured."""
    warnings: list[str] = field(default_factory=list)
    measured_s: float = field(default_factory=time.monotonic)


@dataclass
class Bench:
    """One operator on this rank. Variants of equal shapes share weights and inputs."""

    plain: Resolved
    """A point of the operator without overlap."""
    ranks: Ranks
    parameters: Mapping[str, Tensor]
    none: Variant
    floor: Variant
    inputs: Inputs = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """Smallest time so far over the none time of the same point, by pass."""
    default: DefaultOverlap = field(default_factory=lambda: DefaultOverlap(measured_s=-math.inf))
    none_us: dict[str, float] = field(default_factory=dict)
    """The none time of the first point, by pass, to which all points' objectives are scaled."""
    none_profiled: bool = False

    def variant(self, point: Resolved, purpose: Purpose) -> Variant:
        say(f"builds {purpose} of {point.operator}: {space.settings(point) if purpose == 'point' else ''}")
        linear = backends.load(point.backend).build(point, purpose, self.ranks, self.parameters)
        return _variant(linear, _input_stream(point, self.ranks), self.inputs)

    @cached_property
    def tp1(self) -> dict[str, Timing]:
        """Returns the times of the unsharded operator by pass, measured on rank 0 while the others wait, once, since no
        setting changes them. Collective."""
        point, repeats = self.plain, min(TP1_REPEATS, self.plain.workload.repeats)
        us = {name: [0.0] * repeats for name in (*space.PASSES, "all")}
        if self.ranks.rank == 0:
            backend, alone = backends.load(point.backend), Ranks(0, 1, self.ranks.device)
            shape = models.operator_shape(point, point.operator).unsharded()
            shapes = backend.parameter_shapes(point, shape)
            parameters = draw_parameters(shapes, shape, point.precision, alone, point.workload.seed)
            variant = _variant(backend.build(point, "tp1", alone, parameters), _input_stream(point, alone), {})
            us = time_variants({"tp1": variant}, alone, point.workload.warmup, repeats)["tp1"].us
        return {name: summarise(self.ranks.slowest(taken)) for name, taken in us.items()}

    def objective_us(self, point: Resolved, relative_times: Mapping[str, float]) -> float:
        """Returns the forward plus backward time of the operator, comparable between points and methods: passes under
        test relative to their own none time, so that drift cancels, and the others as `none`."""
        touched = space.passes(point)
        return sum(us * (relative_times[name] if name in touched else 1.0) for name, us in self.none_us.items())

    def is_among_best(self, point: Resolved, relative_times: Mapping[str, float], margin: float) -> bool:
        """Returns whether a pass under test is the fastest so far or within `margin` of it. Updates `best`."""
        among = False
        for name in space.passes(point):
            best = self.best.get(name, 1.0)
            among |= relative_times[name] <= best * (1 + margin)
            self.best[name] = min(best, relative_times[name])
        return among


def bench_for(point: Resolved, ranks: Ranks) -> Bench:
    """Returns the operator's bench, set up at its first point. Collective."""
    return _bench(_key(point), ranks)


def _key(point: Resolved) -> bytes:
    """Returns a key of the point's operator, without its overlap: a point, encoded."""
    own = point.workload
    workload = ResolvedOptions(tokens=own.tokens, seed=own.seed, warmup=own.warmup, repeats=own.repeats)
    unset: dict[str, Any] = {"phase": "all", "method": "none", "phases": None, **dict.fromkeys(space.KNOBS)}
    return msgspec.json.encode(replace(point, workload=workload, profile="all", repetition=0, **unset))


# Enough for a sweep over four operators and two backends or precisions.
@lru_cache(maxsize=8)
def _bench(key: bytes, ranks: Ranks) -> Bench:
    point = msgspec.json.decode(key, type=Resolved)
    backend, seed = backends.load(point.backend), point.workload.seed
    shape = models.operator_shape(point, point.operator)
    parameters = draw_parameters(backend.parameter_shapes(point, shape), shape, point.precision, ranks, seed)
    inputs: Inputs = {}
    say(f"builds none and floor of {point.operator}: {shape}")
    none, floor = (
        _variant(backend.build(point, purpose, ranks, parameters), _input_stream(point, ranks), inputs)
        for purpose in ("none", "floor")
    )
    return Bench(point, ranks, parameters, none, floor, inputs)


def _input_stream(point: Resolved, ranks: Ranks) -> torch.Generator:
    return stream(ranks.device, point.workload.seed, "inputs", ranks.rank)


def draw_parameters(
    shapes: Mapping[str, tuple[int, ...]], shape: LinearShape, precision: str, ranks: Ranks, seed: int
) -> dict[str, Tensor]:
    """Returns random parameters. Those that are whole on every rank (norms, row-parallel bias) are equal on all."""
    own, common = stream(ranks.device, seed, "parameters", ranks.rank), stream(ranks.device, seed, "parameters")
    dtype = DTYPES.get(precision, torch.bfloat16)
    drawn: dict[str, Tensor] = {}
    for name, size in shapes.items():
        replicated = name.startswith("layer_norm") or (name == "bias" and shape.parallel == "row")
        values = torch.randn(size, generator=common if replicated else own, device=ranks.device, dtype=dtype)
        if name == "weight":
            values /= shape.in_features**0.5
        if name == "layer_norm_weight":
            values = 1 + values / 10
        drawn[name] = torch.nn.Parameter(values)
    return drawn


def _variant(linear: ParallelLinear, generator: torch.Generator, known_inputs: Inputs) -> Variant:
    """Returns a variant that rotates through enough inputs to keep them out of the L2 cache."""
    weight = linear.parameters["weight"]
    shapes = linear.input_shape, linear.output_shape
    if shapes not in known_inputs:
        draw = partial(torch.randn, generator=generator, device=weight.device, dtype=weight.dtype)
        input_bytes = linear.input_shape[0] * linear.input_shape[1] * weight.element_size()
        count = min(MOST_INPUTS, 1 + -(-L2_BYTES // input_bytes)) if weight.is_cuda else 2
        drawn = [draw(linear.input_shape).requires_grad_() for _ in range(count)]
        known_inputs[shapes] = drawn, [draw(linear.output_shape) for _ in range(count)]
    inputs, gradients = known_inputs[shapes]
    names = ("input_grad", *(f"{name}_grad" for name in linear.parameters))

    def forward(repeat: int) -> Tensor:
        return linear.forward(inputs[repeat % len(inputs)])

    def backward(repeat: int, output: Tensor) -> dict[str, Tensor]:
        at = repeat % len(inputs)
        leaves = (inputs[at], *linear.parameters.values())
        return dict(zip(names, torch.autograd.grad(output, leaves, gradients[at]), strict=True))

    return Variant(forward, backward)
