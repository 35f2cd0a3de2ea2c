"""One GEMM and one collective: every implementation of a backend side by side, on the same tensors, beside the same in
sequence, the GEMM alone and the communication alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep import backends
from overlap_sweep.errors import Refused, UserError, WrongNumbers
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.kernel_shape import BASELINES, CUSTOM, KERNELS, PRECISION_OF_DTYPE, SEQUENTIAL, KernelShape
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import Workload
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks
    from overlap_sweep.measure.timing import Variant

PRECISIONS = tuple(PRECISION_OF_DTYPE.values())
TOLERANCE = {"fp32": 1e-4}
DEFAULT_TOLERANCE = 2e-2
"""Of results in fp16 and bf16, which round each partial sum, and of FP8, added up fast. A wrong chunk is off by 1."""
WARMUP = {"cuda": 3, "cpu": 1}

_KEPT = ("tp_size", "precision", "profile", "repetition", "runtime")


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the backend, and fill in sizes and implementations: the point without whatever a kernel has no use for."""
    device, workload = point["runtime"]["device"], dict(point["workload"])
    if point["dtype"] and point["precision"]:
        raise UserError(f"dtype={point['dtype']} and precision={point['precision']}: give only one.")
    for name, same in {"m": "tokens", "iters": "repeats", "warmup_iters": "warmup"}.items():
        if point[name] is not None and point[name] != workload[same]:
            raise UserError(f"{name}={point[name]} and workload.{same}={workload[same]}: give only {name}.")
    backend = backends.choose(device) if point["backend"] == "auto" else point["backend"]
    if workload["warmup"] is None:
        workload["warmup"] = WARMUP[device]
    completed = {name: point[name] for name in _KEPT} | {
        "workload": workload,
        "backend": backend,
        "provider": backends.kernels_provider(backend),
        "precision": PRECISION_OF_DTYPE[point["dtype"]] if point["dtype"] else point["precision"],
        "m": workload["tokens"],
        **_shape(point),
    }
    return {**completed, "implementations": _implementations(completed, point["implementations"])}


def _shape(point: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel, n and k as they were given, or of the model's operator."""
    n, k, operator = point["n"], point["k"], point["operator"]
    if (n is None) != (k is None):
        given, missing = ("n", "k") if k is None else ("k", "n")
        raise UserError(
            f"{given}={point[given]} is given without {missing}; give both, or neither for the model's sizes."
        )
    kernel = point["kernel"]
    if n is not None:
        if kernel is None:
            raise UserError(f"n and k are given without a kernel; give kernel={' or '.join(KERNELS)}.")
        return {"kernel": kernel, "n": n, "k": k, "model": {"name": CUSTOM}, "operator": None}
    linear = models.linear_shape(point["model"], operator, 1, point["tp_size"])
    sizes = linear.out_features, linear.in_features
    forward = "ag_gemm" if linear.parallel == "column" else "gemm_rs"
    kernel = kernel or forward
    if (kernel == "ag_gemm") != (forward == "ag_gemm"):
        # dgrad multiplies the output's gradient by the weight as it is.
        sizes = sizes[::-1]
    return {"kernel": kernel, **dict(zip("nk", sizes, strict=True)), "model": point["model"], "operator": operator}


def _implementations(point: Mapping[str, Any], names: list[str] | None) -> dict[str, space.Setting]:
    """By name. UserError for one that the backend does not know."""
    module = backends.load_kernels(point["backend"])
    listed: dict[str, space.Setting] = dict(module.implementations(point))
    if taken := sorted(set(BASELINES) & set(listed)):
        raise UserError(f"backend={point['backend']} calls an implementation {taken[0]}, like a baseline; rename it.")
    if names is None:
        return listed
    if not names:
        raise UserError("implementations=[] names none; leave it out for all.")
    chosen: dict[str, space.Setting] = {}
    for name in names:
        setting = listed.get(name) or module.named(point, name)
        if setting is None:
            raise UserError(
                f"implementations: backend={point['backend']} has no {name} of {point['kernel']}; "
                f"it has {', '.join(listed) or 'none'}."
            )
        # Two names of the same are measured once.
        if setting not in chosen.values():
            chosen[name] = setting
    return chosen


def refusal(point: Mapping[str, Any]) -> str | None:
    shape = KernelShape.of(point)
    if shape.tp_size == 1:
        return "tp_size=1 communicates nothing that a GEMM could overlap"
    if point["precision"] not in PRECISIONS:
        return f"a kernel knows no recipe such as precision={point['precision']}; for FP8 give dtype=float8_e4m3fn"
    if point["precision"] == "fp8" and point["runtime"]["device"] == "cuda" and any(n % 16 for n in shape.gemm_shape):
        sizes = " x ".join(map(str, shape.gemm_shape))
        return f"FP8 GEMMs need dimensions that divide by 16, and a rank's are {sizes}"
    module = backends.load_kernels(point["backend"])
    reason: str | None = shape.refusal() or module.refusal(point)
    if not reason and not point["implementations"]:
        return f"backend={point['backend']} has no {point['kernel']} in {point['precision']}"
    return reason


def overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """None: no library reads a kernel's settings from a file."""
    return {}


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Check, time and profile every implementation; the fields of `Result` that were measured."""
    module = backends.load_kernels(point["backend"])
    try:
        measured = _measure(point, directory, ranks)
    except (Refused, WrongNumbers):
        module.close()
        raise
    # Whatever else one rank raises, the others may still wait for it, and it must not wait for them in a close.
    module.close()
    return measured


def _measure(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    from overlap_sweep.backends.torch.kernels import baselines_of
    from overlap_sweep.measure.timing import summarise, time_variants
    from overlap_sweep.workloads.kernel import bench as kernel_bench

    problem = kernel_bench.draw_problem(point, ranks)
    baselines = baselines_of(problem, ranks)
    calls, left_out = kernel_bench.build_all(point, problem, ranks)
    checks = {
        name: kernel_bench.check(call, problem, ranks)
        for name, call in {SEQUENTIAL: baselines[SEQUENTIAL], **calls}.items()
    }
    wrong = {name: found.error for name, found in checks.items() if found.error > tolerance(point)}
    left_out |= {
        name: f"wrong numbers: relative error {error:.2g} against float32, tolerance {tolerance(point):g}"
        for name, error in wrong.items()
    }
    if SEQUENTIAL in wrong or not set(calls) - set(wrong):
        said = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise WrongNumbers(said, wrong) if wrong else Refused(said)
    right = baselines | {name: call for name, call in calls.items() if name not in wrong}
    variants = {name: kernel_bench.variant(call, problem) for name, call in right.items()}
    samples = time_variants(variants, ranks, point["workload"]["warmup"], point["workload"]["repeats"])
    found = {}
    for name, taken in samples.items():
        found[name] = ImplementationTimes(
            time=summarise(taken.us["all"]),
            setting=point["implementations"].get(name, {}),
            relative_error=checks[name].error if name in checks else None,
            independent=name in checks and checks[name].independent,
            launch_bound=taken.launch_bound,
        )
    traces = _profile(point, found, variants, directory, ranks)
    return {
        "measured": KernelTimes(implementations=found, left_out=left_out),
        "objective_us": found[_fastest(found)].time.median_us,
        "relative_error": wrong,
        "launch_bound": any(one.launch_bound for one in found.values()),
        "traces": traces,
    }


def _fastest(found: Mapping[str, ImplementationTimes]) -> str:
    """Of the backend's implementations; one that is no way to compute the kernel only where there is no other."""
    own = {name: one for name, one in found.items() if name not in BASELINES}
    return min(own, key=lambda name: (own[name].independent, own[name].time.median_us))


def _profile(
    point: Mapping[str, Any],
    found: Mapping[str, ImplementationTimes],
    variants: Mapping[str, Variant],
    directory: Path,
    ranks: Ranks,
) -> list[str]:
    """Capture what `profile` asks for; the names of the traces. `best` is the fastest, and the same in sequence."""
    from overlap_sweep.measure.profile import capture_each

    wanted = {"all": [*variants], "best": [SEQUENTIAL, _fastest(found)], "none": []}[point["profile"]]
    return capture_each({name: variants[name] for name in wanted}, ranks, point["workload"]["profiled"], directory)


def tolerance(point: Mapping[str, Any]) -> float:
    """The largest relative error at which an implementation still counts as right."""
    given: float | None = point["workload"]["tolerance"]
    return TOLERANCE.get(point["precision"], DEFAULT_TOLERANCE) if given is None else given


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    of_model = point["n"] is None
    kernel = [str(point["kernel"])] if point["kernel"] or not of_model else []
    tp_size = f"tp{point['tp_size']}"
    begin = [models.short_name(point["model"]), tp_size, point["operator"], *kernel] if of_model else [*kernel, tp_size]
    return [*begin, *(f"{name}{point[name]}" for name in ("m", "n", "k") if point[name] is not None)]


WORKLOAD = Workload(
    name="kernel",
    package=__name__,
    complete=complete,
    refusal=refusal,
    overlap_configs=overlap_configs,
    run=run,
    subject=lambda point: "{kernel} {m}x{n}x{k}".format(**point),
    words=_words,
    named={"tp_size", "kernel", "m", "n", "k", "operator", "phase", "method", "phases", *space.KNOBS},
    cost=lambda point: tuple(point["implementations"]),
    backend=backends.load_kernels,
)
