"""Kernels on real GPUs: every implementation of every backend computes what float32 does."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep import backends
from overlap_sweep.backends import transformer_engine
from overlap_sweep.ranks import Ranks
from overlap_sweep.workloads import kernel, kernel_bench
from tests.points import kernel_point
from tests.processes import run_ranks

SIZES: dict[str, Any] = {"n": 2048, "k": 1024, "workload": {"tokens": 512}, "runtime": {"device": "cuda"}}
UNSURE = {"ring_ce0"}
"""Transformer Engine's ring exchange by SMs computes wrong numbers on some machines."""


def _errors(ranks: Ranks, backend: str, name: str, precision: str) -> dict[str, float]:
    given = {"dtype": "float8_e4m3fn", "precision": None} if precision == "fp8" else {"precision": precision}
    point = kernel.complete(kernel_point(**SIZES, backend=backend, kernel=name, tp_size=ranks.world_size, **given))
    if kernel.refusal(point):
        return {}
    problem = kernel_bench.draw_problem(point, ranks)
    calls, left_out = kernel_bench.build_all(point, problem, ranks)
    assert not left_out
    errors = {name: kernel_bench.check(call, problem, ranks).error for name, call in calls.items()}
    backends.load_kernels(backend).close()
    return errors


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize("backend", ["torch", "symm_mem", "transformer_engine"])
def test_every_implementation_computes_what_float32_does(backend: str, precision: str) -> None:
    if backend == "transformer_engine" and transformer_engine.missing():
        pytest.skip("Transformer Engine is not installed")
    checked = 0
    for name in ("ag_gemm", "gemm_rs", "gemm_ar"):
        found = run_ranks(2, _errors, backend, name, precision, device="cuda")
        assert found[0] == found[1]
        for implementation, error in found[0].items():
            assert error < kernel.DEFAULT_TOLERANCE or implementation in UNSURE, (name, implementation, error)
            checked += implementation not in UNSURE
    assert checked >= 3
