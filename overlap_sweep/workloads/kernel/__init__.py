"""One GEMM and one collective: every implementation of a backend on the same tensors, compared with GEMM and collective
in sequence, the GEMM alone, and the communication alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from overlap_sweep import backends
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.models import BASELINES, CUSTOM, KERNELS, PRECISION_OF_DTYPE, KernelShape
from overlap_sweep.workloads import Workload, run_of

PRECISIONS = tuple(PRECISION_OF_DTYPE.values())


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point with backend, sizes and implementations, without the options that a kernel does not use."""
    device, workload = point["runtime"]["device"], dict(point["workload"])
    if point["dtype"] and point["precision"]:
        raise UserError(f"dtype={point['dtype']} and precision={point['precision']}: give only one.")
    for name, same in {"m": "tokens", "iters": "repeats", "warmup_iters": "warmup"}.items():
        if point[name] is not None and point[name] != workload[same]:
            raise UserError(f"{name}={point[name]} and workload.{same}={workload[same]}: give only {name}.")
    backend = backends.chosen(point)
    if workload["warmup"] is None:
        workload["warmup"] = 1 if device == "cpu" else 3
    completed = {name: point[name] for name in ("tp_size", "precision", "profile", "repetition", "runtime")} | {
        "workload": workload,
        "backend": backend,
        "provider": backends.kernels_provider(backend),
        "precision": PRECISION_OF_DTYPE[point["dtype"]] if point["dtype"] else point["precision"],
        "m": workload["tokens"],
        **_shape(point),
    }
    return {**completed, "implementations": _implementations(completed, point["implementations"])}


def _shape(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the kernel, n and k from the options, or those of the model's operator."""
    n, k, operator = point["n"], point["k"], point["operator"]
    if (n is None) != (k is None):
        name, missing = ("n", "k") if k is None else ("k", "n")
        raise UserError(f"{name}={point[name]} requires {missing}; give both, or neither to use the model's sizes.")
    kernel = point["kernel"]
    if n is not None:
        if kernel is None:
            raise UserError(f"n and k require kernel=; choose one of {', '.join(KERNELS)}.")
        return {"kernel": kernel, "n": n, "k": k, "model": {"name": CUSTOM}, "operator": None}
    model = models.without_experts(point["model"])
    linear = models.linear_shape(model, operator, 1, point["tp_size"])
    sizes = linear.out_features, linear.in_features
    forward = "ag_gemm" if linear.parallel == "column" else "gemm_rs"
    kernel = kernel or forward
    if (kernel == "ag_gemm") != (forward == "ag_gemm"):
        # dgrad multiplies the output's gradient by the weight as it is.
        sizes = sizes[::-1]
    return {"kernel": kernel, **dict(zip("nk", sizes, strict=True)), "model": model, "operator": operator}


def _implementations(point: Mapping[str, Any], names: list[str] | None) -> dict[str, space.Setting]:
    """Returns the settings of the implementations by name. UserError for one that the backend lacks."""
    module = backends.load_kernels(point["backend"])
    listed: dict[str, space.Setting] = dict(module.implementations(point))
    if taken := sorted(set(BASELINES) & set(listed)):
        raise UserError(f"backend={point['backend']}: {taken[0]} is the name of a baseline; rename the implementation.")
    if names is None:
        return listed
    if not names:
        raise UserError("implementations=[] is empty; leave it out to run all.")
    chosen: dict[str, space.Setting] = {}
    for name in names:
        setting = listed.get(name) or module.named(point, name)
        if setting is None:
            raise UserError(
                f"implementations: backend={point['backend']} has no {name} for {point['kernel']}; "
                f"choose from {', '.join(listed) or 'none'}."
            )
        chosen[name] = setting
    return chosen


def refusal(point: Mapping[str, Any]) -> str | None:
    shape = KernelShape.of(point)
    if shape.tp_size == 1:
        return "tp_size=1 has no communication to overlap"
    if point["precision"] not in PRECISIONS:
        return f"workload=kernel does not support precision={point['precision']}; for FP8 give dtype=float8_e4m3fn"
    if point["precision"] == "fp8" and point["runtime"]["device"] == "cuda" and any(n % 16 for n in shape.gemm_shape):
        sizes = " x ".join(map(str, shape.gemm_shape))
        return f"FP8 GEMMs need dimensions divisible by 16; each rank's GEMM is {sizes}"
    reason: str | None = shape.refusal() or backends.load_kernels(point["backend"]).refusal(point)
    if not reason and not point["implementations"]:
        return f"backend={point['backend']} has no {point['kernel']} in {point['precision']}"
    return reason


def _on_one_node(point: Mapping[str, Any]) -> str | None:
    if getattr(backends.load_kernels(point["backend"]), "SPANS_NODES", False):
        return None
    return f"the kernels of backend={point['backend']} run on one node; use backend=torch, or runtime.nodes=1"


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    by_model = point["n"] is None
    kernel = [str(point["kernel"])] if point["kernel"] or not by_model else []
    tp_size = f"tp{point['tp_size']}"
    begin = [models.short_name(point["model"]), tp_size, point["operator"], *kernel] if by_model else [*kernel, tp_size]
    return [*begin, *(f"{name}{point[name]}" for name in ("m", "n", "k") if point[name] is not None)]


WORKLOAD = Workload(
    name="kernel",
    package=__name__,
    complete=complete,
    refusal=refusal,
    cost=lambda point: tuple(point["implementations"]),
    run=run_of(__name__),
    subject=lambda point: "{kernel} {m}x{n}x{k}".format(**point),
    words=_words,
    named={"tp_size", "kernel", "m", "n", "k", "operator", "phase", "method", "phases", *space.KNOBS},
    backend=backends.load_kernels,
    on_one_node=_on_one_node,
)
