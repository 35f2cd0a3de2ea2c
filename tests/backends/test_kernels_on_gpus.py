"""Kernels on real GPUs: every implementation of every backend computes what float32 does."""

from itertools import product
from typing import Any

import pytest

from overlap_sweep import backends
from overlap_sweep.backends import installed
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import KERNELS
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.workloads import kernel
from overlap_sweep.workloads.kernel import run as kernel_run
from overlap_sweep.workloads.kernel.config import Resolved
from tests.make_point import kernel_point
from tests.processes import run_ranks

SIZES: dict[str, Any] = {"n": 2048, "k": 1024, "workload": {"tokens": 512}, "runtime": {"device": "cuda"}}
DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
UNSURE = ("ring_sm1_ce0",)
"""Transformer Engine's ring exchange by SMs computes wrong numbers on some machines."""


def _errors(ranks: Ranks, backend: str) -> dict[str, float]:
    """By kernel, type and implementation."""
    errors = {}
    for name, dtype in product(KERNELS, DTYPES):
        asked = {"backend": backend, "kernel": name, "dtype": dtype, "precision": None, "tp_size": ranks.world_size}
        point = decoded_point(kernel.complete(kernel_point(**SIZES, **asked)))
        assert isinstance(point, Resolved)
        if kernel.refusal(point):
            continue
        problem = kernel_run.draw_problem(point, ranks)
        calls, left_out = kernel_run.build_all(point, problem, ranks)
        errors |= {f"{name} {dtype} {left}: {reason}": float("inf") for left, reason in left_out.items()}
        for implementation, call in calls.items():
            errors[f"{name} {dtype} {implementation}"] = kernel_run.check(call, problem, ranks).error
        backends.load_kernels(backend).close()
    return errors


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("backend", ["torch", "symm_mem", "transformer_engine"])
def test_every_implementation_computes_what_float32_does(backend: str) -> None:
    if backend == "transformer_engine" and installed.missing():
        pytest.skip("Transformer Engine is not installed")
    found = run_ranks(2, _errors, backend, device="cuda")[0]
    sure = {name: error for name, error in found.items() if not name.endswith(UNSURE)}
    assert len(sure) >= 10
    assert {name: error for name, error in sure.items() if error > space.DEFAULT_TOLERANCE} == {}
