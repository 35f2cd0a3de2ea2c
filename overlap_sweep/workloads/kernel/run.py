"""Runs a kernel on the workers: draws tensors, checks implementations against float32, times them, profiles."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep import backends
from overlap_sweep.backends import Operand, Outputs, Problem
from overlap_sweep.backends.torch import kernels as plain
from overlap_sweep.backends.torch.overlap import multiply_by
from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.measure import Ranks, stream
from overlap_sweep.measure.profile import capture_each
from overlap_sweep.measure.timing import L2_BYTES, MOST_INPUTS, Variant, meet, summarise, time_variants
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import BASELINES, COLLECTIVES, SEQUENTIAL, KernelShape
from overlap_sweep.overlap.space import Setting
from overlap_sweep.workloads import MeasuredFields
from overlap_sweep.workloads.kernel import beside
from overlap_sweep.workloads.kernel.config import Resolved
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""Data types of the drawn tensors and of the output, by precision."""
MOST_BYTES = 8 * 2**30
"""Memory limit for all inputs and the intermediate tensors of each."""

Call = Callable[[int], Outputs]


class Check(NamedTuple):
    error: float
    """Largest difference from float32 over its largest magnitude, over all ranks and two inputs; inf for NaN."""
    independent: bool


def run(point: Resolved, directory: Path, ranks: Ranks) -> MeasuredFields:
    """Returns the measured fields of the point's `Result`. Collective."""
    if point.kernel in COLLECTIVES:
        return beside.measure(point, directory, ranks)
    module = backends.load_kernels(point.backend)
    try:
        measured = _measure(point, directory, ranks)
    except (Refused, WrongNumbers):
        module.close()
        raise
    # No close after other errors: it is collective, and the other ranks may still be waiting in the failed call.
    module.close()
    return measured


def _measure(point: Resolved, directory: Path, ranks: Ranks) -> MeasuredFields:
    problem = draw_problem(point, ranks)
    baselines = plain.baselines_of(problem, ranks)
    calls, left_out = build_all(point, problem, ranks)
    checks = {name: check(call, problem, ranks) for name, call in {SEQUENTIAL: baselines[SEQUENTIAL], **calls}.items()}
    allowed = space.allowed_error(point)
    wrong = {name: found.error for name, found in checks.items() if found.error > allowed}
    left_out |= {
        name: f"wrong numbers: relative error {error:.2g} against float32 exceeds the tolerance {allowed:g}"
        for name, error in wrong.items()
    }
    if SEQUENTIAL in wrong or not set(calls) - set(wrong):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise WrongNumbers(reasons, wrong) if wrong else Refused(reasons)
    variants = {name: variant(call, problem) for name, call in {**baselines, **calls}.items() if name not in wrong}
    workload = point.workload
    found = {
        name: ImplementationTimes(
            time=summarise(taken.us["all"]),
            setting=point.implementations.get(name, {}),
            relative_error=checks[name].error if name in checks else None,
            independent=name in checks and checks[name].independent,
            launch_bound=taken.launch_bound,
        )
        for name, taken in time_variants(variants, ranks, workload.warmup, workload.repeats).items()
    }
    # Independent implementations, which don't compute the kernel, count only if there are no others.
    own = [name for name in found if name not in BASELINES]
    fastest = min(own, key=lambda name: (found[name].independent, found[name].time.median_us))
    profiled = {"all": [*variants], "best": [SEQUENTIAL, fastest], "none": []}[point.profile]
    return {
        "measured": KernelTimes(implementations=found, left_out=left_out),
        "objective_us": found[fastest].time.median_us,
        "relative_error": {**wrong},
        "launch_bound": any(one.launch_bound for one in found.values()),
        "traces": capture_each({name: variants[name] for name in profiled}, ranks, workload.profiled, directory),
    }


def draw_problem(point: Resolved, ranks: Ranks) -> Problem:
    """Returns fresh random tensors for the point. Collective."""
    shape, precision = KernelShape.of(point), point.precision
    seed, what = point.workload.seed, f"{shape} {precision} {point.repetition}"
    generator = stream(ranks.device, seed, what, ranks.rank)

    def draw(size: tuple[int, int], scale: float = 1.0) -> Operand:
        values = torch.randn(size, generator=generator, device=ranks.device, dtype=DTYPES[precision]) * scale
        return _to_fp8(values, ranks) if precision == "fp8" else Operand(values)

    weight = draw(shape.linear.weight_shape, shape.k**-0.5)
    inputs_of_l2 = 1 + -(-L2_BYTES // (math.prod(shape.linear.input_shape) * weight.data.element_size()))
    affordable = max(2, MOST_BYTES // (shape.m * max(shape.n, shape.k) * 4))
    count = min(MOST_INPUTS, inputs_of_l2, affordable) if ranks.device.type == "cuda" else 2
    inputs = [draw(shape.linear.input_shape) for _ in range(count)]
    whole = [_whole(x, weight, shape, precision, ranks) for x in inputs]
    return Problem(shape, precision, inputs, whole, weight)


def _to_fp8(values: Tensor, ranks: Ranks) -> Operand:
    """Returns the values in FP8, with one scale for all ranks, since the gathered tensor has only one."""
    largest = values.abs().max().float()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    scale = largest / torch.finfo(torch.float8_e4m3fn).max
    return Operand((values.float() / scale).to(torch.float8_e4m3fn), scale)


def _whole(x: Operand, weight: Operand, shape: KernelShape, precision: str, ranks: Ranks) -> Operand:
    if shape.gathers:
        return Operand(plain.gather(x.data, ranks), x.scale)
    product = torch.empty(shape.m, shape.n, device=ranks.device, dtype=DTYPES[precision])
    multiply_by(weight, x.scale)(x.data, product)
    return Operand(product)


def build_all(point: Resolved, problem: Problem, ranks: Ranks) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns the implementations by name, and why others are unavailable, the same on all ranks. Collective."""
    module, on_gpu = backends.load_kernels(point.backend), ranks.device.type == "cuda"
    most_sms = torch.cuda.get_device_properties(ranks.device).multi_processor_count if on_gpu else math.inf
    built: dict[str, Call] = {}
    left_out: dict[str, str] = {}
    for name, setting in point.implementations.items():
        num_sm = setting.get("num_sm")
        if isinstance(num_sm, int) and num_sm > most_sms:
            left_out[name] = f"num_sm={num_sm} exceeds the GPU's {most_sms} SMs"
            continue
        try:
            # Other packages' backends may have knobs of other types.
            built[name] = module.build(point, cast(Setting, setting), problem, ranks)
        except Refused as reason:
            left_out[name] = str(reason)
        (refused,) = ranks.slowest([float(name in left_out)])
        if refused and name in built:
            del built[name]
            left_out[name] = "refused on another rank"
    return built, left_out


def variant(call: Call, problem: Problem) -> Variant:
    return Variant(lambda repeat: call(repeat % len(problem.inputs)))


def check(call: Call, problem: Problem, ranks: Ranks) -> Check:
    """Returns the error against float32 on two consecutive inputs: this detects a call that does not wait for its
    communication and reads the previous call's buffer. Collective."""
    errors, independent = [], False
    for index in range(2):
        at = index % len(problem.inputs)
        if ranks.device.type == "cuda":
            # As before each timed call. A layer's other collectives keep its ranks together; here a rank that is ahead
            # may overwrite what another still reads (userbuffers' bulk all-gather, 2 of 60 times).
            meet(ranks)
        outputs = call(at)
        product, expected = _expected(problem, at, ranks)
        pairs = [(outputs.output, expected)]
        if outputs.moved is not None:
            pairs.append((_values(Operand(outputs.moved, problem.inputs[at].scale)), _values(problem.whole[at])))
        if outputs.product is not None:
            pairs.append((outputs.product, product))
        errors += [_error(ours, theirs) for ours, theirs in pairs]
        independent |= len(pairs) > 1
    return Check(max(ranks.slowest(torch.stack(errors).tolist())), independent)


def _expected(problem: Problem, at: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Returns, in float32, this rank's product and its output."""
    shape, weight = problem.shape, _values(problem.weight)
    rows = problem.whole[at] if shape.gathers else problem.inputs[at]
    product = _values(rows) @ weight.t()
    if shape.gathers:
        return product, product
    summed = product.clone()
    dist.all_reduce(summed)
    return product, summed.chunk(ranks.world_size)[ranks.rank] if shape.kernel == "gemm_rs" else summed


def _values(operand: Operand) -> Tensor:
    values = operand.data.float()
    return values if operand.scale is None else values * operand.scale


def _error(ours: Tensor, expected: Tensor) -> Tensor:
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    error = (ours.float() - expected).abs().max() / expected.abs().max()
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)
