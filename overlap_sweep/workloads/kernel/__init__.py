"""One GEMM and one collective: every implementation of a backend on the same tensors, compared with GEMM and collective
in sequence, the GEMM alone, and the communication alone. Or a collective beside a GEMM that is independent of it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlap_sweep import backends
from overlap_sweep.config import ResolvedModel
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.models import BASELINES, COLLECTIVES, CUSTOM, KERNELS, PRECISION_OF_DTYPE, KernelShape
from overlap_sweep.workloads import Workers, Workload, run_of, usual_workers
from overlap_sweep.workloads.kernel.config import Config, Resolved, ResolvedOptions

PRECISIONS = tuple(PRECISION_OF_DTYPE.values())
USUAL_MB = {"cuda": 64.0, "cpu": 1.0}
MOST_BLOCKS = 64
"""More channels NCCL has none."""


def complete(config: Config) -> dict[str, object]:
    """Returns the point with backend, sizes and implementations, without the options that a kernel does not use."""
    workload, dtype, precision = config.workload, config.dtype, config.precision
    if dtype and precision:
        raise UserError(f"dtype={dtype} and precision={precision}: give only one.")
    for name, same in {"m": "tokens", "iters": "repeats", "warmup_iters": "warmup"}.items():
        value, usual = getattr(config, name), getattr(workload, same)
        if value is not None and value != usual:
            raise UserError(f"{name}={value} and workload.{same}={usual}: give only {name}.")
    alone = config.kernel in COLLECTIVES
    for name in ("size_mb", "num_sm"):
        if getattr(config, name) is not None and not alone:
            raise UserError(f"{name} is of collectives alone: kernel={', '.join(COLLECTIVES)}; leave it out.")
    if config.num_sm and config.implementations:
        raise UserError("num_sm and implementations both name thread blocks; give only one.")
    backend = "torch" if alone and config.backend == "auto" else backends.chosen(config)
    warmup = (1 if config.runtime.device == "cpu" else 3) if workload.warmup is None else workload.warmup
    precision = PRECISION_OF_DTYPE[dtype] if dtype else precision
    assert precision
    options = ResolvedOptions(**{**asdict(workload), "warmup": warmup})
    point = Resolved(
        **{name: getattr(config, name) for name in ("tp_size", "profile", "repetition", "runtime")},
        workload=options,
        backend=backend,
        provider=backends.kernels_provider(backend),
        precision=precision,
        m=options.tokens,
        implementations={},
        size_mb=(config.size_mb or USUAL_MB[config.runtime.device]) if alone else None,
        num_sm=config.num_sm,
        **_shape(config),
    )
    # As plain items, which are checked when they are decoded: other packages may make settings.
    return {**point, "implementations": _implementations(point, config.implementations)}


def _shape(config: Config) -> dict[str, Any]:
    """Returns the kernel, n and k from the options, or those of the model's operator."""
    n, k, operator, kernel = config.n, config.k, config.operator, config.kernel
    if (n is None) != (k is None):
        name, value, missing = ("n", n, "k") if k is None else ("k", k, "n")
        raise UserError(f"{name}={value} requires {missing}; give both, or neither to use the model's sizes.")
    if kernel in COLLECTIVES and n is None:
        n = k = config.m or config.workload.tokens
    if n is not None:
        if kernel is None:
            raise UserError(f"n and k require kernel=; choose one of {', '.join([*KERNELS, *COLLECTIVES])}.")
        return {"kernel": kernel, "n": n, "k": k, "model": ResolvedModel(name=CUSTOM), "operator": None}
    assert config.tp_size
    assert isinstance(config.model, ResolvedModel)
    model = models.without_experts(config.model)
    linear = models.linear_shape(model, operator, 1, config.tp_size)
    sizes = linear.out_features, linear.in_features
    forward = "ag_gemm" if linear.parallel == "column" else "gemm_rs"
    kernel = kernel or forward
    if (kernel == "ag_gemm") != (forward == "ag_gemm"):
        # dgrad multiplies the output's gradient by the weight as it is.
        sizes = sizes[::-1]
    return {"kernel": kernel, **dict(zip("nk", sizes, strict=True)), "model": model, "operator": operator}


def _implementations(point: Resolved, names: list[str] | None) -> dict[str, space.Setting]:
    """Returns the settings of the implementations by name. UserError for one that the backend lacks."""
    if point.kernel in COLLECTIVES and point.backend != "torch":
        return {}
    module = backends.load_kernels(point.backend)
    listed: dict[str, space.Setting] = dict(module.implementations(point))
    if taken := sorted(set(BASELINES) & set(listed)):
        raise UserError(f"backend={point.backend}: {taken[0]} is the name of a baseline; rename the implementation.")
    if names is None:
        return listed
    if not names:
        raise UserError("implementations=[] is empty; leave it out to run all.")
    chosen: dict[str, space.Setting] = {}
    for name in names:
        setting = listed.get(name) or module.named(point, name)
        if setting is None:
            raise UserError(
                f"implementations: backend={point.backend} has no {name} for {point.kernel}; "
                f"choose from {', '.join(listed) or 'none'}."
            )
        chosen[name] = setting
    return chosen


def refusal(point: Resolved) -> str | None:
    shape = KernelShape.of(point)
    if shape.tp_size == 1:
        return "tp_size=1 has no communication to overlap"
    if point.precision not in PRECISIONS:
        return f"workload=kernel does not support precision={point.precision}; for FP8 give dtype=float8_e4m3fn"
    if point.kernel in COLLECTIVES:
        return _refused_alone(point)
    if point.precision == "fp8" and point.runtime.device == "cuda" and any(n % 16 for n in shape.gemm_shape):
        sizes = " x ".join(map(str, shape.gemm_shape))
        return f"FP8 GEMMs need dimensions divisible by 16; each rank's GEMM is {sizes}"
    reason = shape.refusal() or backends.load_kernels(point.backend).refusal(point)
    if not reason and not point.implementations:
        return f"backend={point.backend} has no {point.kernel} in {point.precision}"
    return reason


def _refused_alone(point: Resolved) -> str | None:
    """Returns why a collective alone cannot be measured, or None."""
    if point.backend != "torch":
        return f"backend={point.backend} has no kernel={point.kernel}; use backend=torch"
    if point.precision == "fp8":
        return f"kernel={point.kernel} cannot sum FP8; give another dtype"
    most = max(int(str(setting["num_sm"])) for setting in point.implementations.values())
    return f"num_sm={most}: NCCL has at most {MOST_BLOCKS} channels" if most > MOST_BLOCKS else None


def _workers(point: Resolved, directory: Path) -> Workers:
    # Streams that share a hardware queue would wait for each other; there are two of each communicator.
    return Workers(max_connections=32) if point.kernel in COLLECTIVES else usual_workers(point, directory)


def _on_one_node(point: Resolved) -> str | None:
    if getattr(backends.load_kernels(point.backend), "SPANS_NODES", False):
        return None
    return f"the kernels of backend={point.backend} run on one node; use backend=torch, or runtime.nodes=1"


def _subject(point: Resolved) -> str:
    size = f"{point.size_mb:g} MiB" if point.size_mb else f"{point.m}x{point.n}x{point.k}"
    return f"{point.kernel} {size}"


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    by_model, tp_size = config.n is None and config.kernel not in COLLECTIVES, f"tp{config.tp_size}"
    kernel = [str(config.kernel)] if config.kernel or not by_model else []
    begin = [models.short_name(config.model), tp_size, config.operator, *kernel] if by_model else [*kernel, tp_size]
    sizes = {"m": config.m, "n": config.n, "k": config.k, "mb": config.size_mb, "sm": config.num_sm}
    return [*begin, *(f"{name}{size:g}" for name, size in sizes.items() if size is not None)]


WORKLOAD = Workload(
    name="kernel",
    package=__name__,
    complete=complete,
    refusal=refusal,
    cost=lambda point: (point.size_mb, *point.implementations),
    run=run_of(__name__),
    subject=_subject,
    words=_words,
    named={"tp_size", "kernel", "m", "n", "k", "size_mb", "operator", "phase", "method", "phases", *space.KNOBS},
    workers=_workers,
    backend=backends.load_kernels,
    on_one_node=_on_one_node,
)
