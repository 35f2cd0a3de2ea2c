"""Small resolved points, as workloads and backends get them. A dict of changes is merged into the point's own."""

from __future__ import annotations

from typing import Any

from tests.make_point import resolved

SMALL: dict[str, Any] = {
    **{"model": {"name": "m"}, "backend": "torch", "precision": "fp32", "runtime": {"device": "cpu"}, "tp_size": 2},
    **{"method": "bulk", "num_sm": 4, "workload": {"tokens": 128, "repeats": 3}},
}
ON_GPUS: dict[str, Any] = {"backend": "transformer_engine", "precision": "bf16", "runtime": {"device": "cuda"}}


def operator_point(**changes: Any) -> dict[str, Any]:
    """fc1 by bulk on two ranks of plain torch on a CPU."""
    return _changed(resolved("operator", **SMALL), changes)


def gpu_point(**changes: Any) -> dict[str, Any]:
    """fc1 by bulk on two ranks of Transformer Engine, in bf16."""
    return _changed(operator_point(**ON_GPUS), changes)


def layer_point(**changes: Any) -> dict[str, Any]:
    """A whole transformer layer on two GPUs."""
    return _changed(resolved("layer", **{**SMALL, **ON_GPUS}), changes)


def kernel_point(**changes: Any) -> dict[str, Any]:
    """What `complete` gets of an all-gather and a GEMM on two ranks of plain torch on a CPU."""
    asked = {"kernel": "ag_gemm", "n": 48, "k": 32, "dtype": None, "implementations": None}
    asked |= dict.fromkeys(("m", "iters", "warmup_iters"))
    return _changed({**operator_point(workload={"name": "kernel", "tokens": 24}), **asked}, changes)


def _changed(point: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {name: {**point[name], **value} if isinstance(value, dict) else value for name, value in changes.items()}
    return {**point, **merged}
