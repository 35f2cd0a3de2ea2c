"""Run directories of kernels with numbers that one can compute with by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.kernel_shape import COMM_ONLY, GEMM_ONLY, SEQUENTIAL
from overlap_sweep.run_directory import ImplementationTimes, Result, Status, write_result
from tests.analysis.run_directories import ENVIRONMENT, timing
from tests.points import RUNTIME

RING: dict[str, Any] = {"method": "ring_exchange", "aggregate": False, "num_sm": 1}
PIPELINE: dict[str, Any] = {"method": "pipeline", "num_splits": 4, "num_sm": 16}


def kernel_config(m: int = 1024, backend: str = "torch", **changes: Any) -> dict[str, Any]:
    """An all-gather before fc1 of llama3_70b on four GPUs in bf16, as it is resolved."""
    operator = changes.pop("operator", "fc1")
    return {
        "model": {"name": "llama3_70b" if operator else "custom"},
        "operator": operator,
        "workload": {"name": "kernel", "tokens": m, "tolerance": None, "warmup": 3, "repeats": 5, "seed": 0},
        "runtime": {**RUNTIME, "device": "cuda"},
        "backend": backend,
        "kernel": "ag_gemm",
        "m": m,
        "n": 57344,
        "k": 8192,
        "tp_size": 4,
        "precision": "bf16",
        "profile": "none",
        "repetition": 0,
        "implementations": {"ring_exchange": RING},
        **changes,
    }


def implementation(
    time_us: float, spread_us: float = 0.0, setting: Mapping[str, Any] | None = None, **changed: Any
) -> ImplementationTimes:
    """Five samples whose interquartile range is twice the spread."""
    error = changed.pop("relative_error", 1e-3)
    return ImplementationTimes(
        time=timing(time_us, spread_us), setting=dict(setting or {}), relative_error=error, **changed
    )


def baselines(
    sequential_us: float = 200.0, gemm_us: float = 100.0, comm_us: float = 80.0, spread_us: float = 0.0, **changed: Any
) -> dict[str, ImplementationTimes]:
    return {
        SEQUENTIAL: implementation(sequential_us, spread_us, **changed),
        GEMM_ONLY: implementation(gemm_us, spread_us, relative_error=None),
        COMM_ONLY: implementation(comm_us, spread_us, relative_error=None),
    }


def write_kernel(
    directory: Path,
    implementations: Mapping[str, ImplementationTimes],
    point: Mapping[str, Any] | None = None,
    name: str | None = None,
    status: Status = "ok",
    **result: Any,
) -> Path:
    """Write result.json of a kernel point into a new folder of `directory`; baselines that are missing are usual."""
    point = dict(point or kernel_config())
    name = name or "{kernel}_m{m}_{backend}".format(**point) + f"_{len(list(directory.glob('*')))}"
    measured = {**baselines(), **implementations} if status == "ok" else {}
    (directory / name).mkdir(parents=True)
    written = {"environment": ENVIRONMENT, "started": "2026-11-20T21:14:03+00:00", **result}
    write_result(directory / name, Result(name=name, point=point, status=status, implementations=measured, **written))
    return directory / name
