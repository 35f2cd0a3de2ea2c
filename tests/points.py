"""Resolved points, as workloads and backends get them."""

from __future__ import annotations

from typing import Any

from overlap_sweep import space

MODEL: dict[str, Any] = {
    "name": "m",
    "source": "sizes",
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "gated_mlp": True,
    "normalization": "RMSNorm",
    "bias": False,
}
WORKLOAD = {"tokens": 128, "warmup": 0, "repeats": 3, "profiled": 1, "seed": 0, "tolerance": None}
RUNTIME = {
    "device": "cpu",
    "isolate": False,
    "timeout_s": 300.0,
    "timeout_factor": 10.0,
    "retries": 1,
    "start_timeout_s": 180.0,
    "threads_per_rank": 1,
    "multicast": False,
    "bootstrap_backend": "gloo",
}
LAYER: dict[str, Any] = {
    "kind": "transformer_layer",
    "variants": None,
    "comm_overlap": True,
    "tp_comm_overlap_cfg": None,
    "ub_overlap_rs_dgrad": False,
    "num_replicas": 1,
    "micro_batch_size": 1,
    "training": False,
}


def operator_point(**changes: Any) -> dict[str, Any]:
    """fc1 by bulk on two ranks of plain torch on a CPU. A dict of changes is merged into the point's own."""
    base = {
        "model": MODEL,
        "tp_size": 2,
        "operator": "fc1",
        "phase": "all",
        "method": "bulk",
        **dict.fromkeys(space.KNOBS),
        "num_sm": 4,
        "phases": None,
        "backend": "torch",
        "precision": "fp32",
        "profile": "none",
        "workload": {"name": "operator", **WORKLOAD},
        "runtime": RUNTIME,
    }
    return _changed(base, changes)


def gpu_point(**changes: Any) -> dict[str, Any]:
    """fc1 by bulk on two ranks of Transformer Engine, in bf16."""
    base = operator_point(backend="transformer_engine", precision="bf16", runtime={"device": "cuda"})
    return _changed(base, changes)


def layer_point(**changes: Any) -> dict[str, Any]:
    """A whole transformer layer on two GPUs."""
    base = {**gpu_point(), "workload": {"name": "layer", **WORKLOAD}, "layer": LAYER}
    return _changed(base, changes)


def _changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {name: {**base[name], **value} if isinstance(value, dict) else value for name, value in changes.items()}
    return {**base, **merged}


def kernel_point(**changes: Any) -> dict[str, Any]:
    """What `complete` gets of an all-gather and a GEMM on two ranks of plain torch on a CPU."""
    asked = {"kernel": "ag_gemm", "n": 48, "k": 32, "dtype": None, "implementations": None, "repetition": 0}
    asked |= dict.fromkeys(("m", "iters", "warmup_iters"))
    base = {**operator_point(), **asked, "workload": {"name": "kernel", **WORKLOAD, "tokens": 24}}
    return _changed(base, changes)
