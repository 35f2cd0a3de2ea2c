"""backend=symm_mem on real GPUs: PyTorch's operators themselves, alone and through launch.py."""

import gzip
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_sweep.backends.symm_mem import ASYNC_TP, operators
from overlap_sweep.measure import Ranks
from overlap_sweep.results.run_directory import Result
from tests.processes import run_ranks
from tests.sweeps import Launch

ROWS, IN_FEATURES, OUT_FEATURES = 512, 1024, 768
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Relative, of sums of 1024 products; torch may multiply float32 as TF32."""
SMALL_MODEL = ("model=llama3_8b", "backend=symm_mem", "workload.tokens=2048", "workload.repeats=5", "tp_size=2")


def errors_of_operators(ranks: Ranks, seed: int, rounds: int) -> dict[str, float]:
    """By operator and type the largest relative error of any round, against NCCL's collectives and a GEMM."""
    world, rank, memory = ranks.world_size, ranks.rank, operators.SymmetricMemory(operators.group_name())
    random = torch.Generator(ranks.device).manual_seed(seed)
    found: dict[str, float] = {}

    def note(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        error = ((got.float() - expected).abs().max() / expected.abs().max()).item()
        found[f"{name} {got.dtype}"] = max(error, found.get(f"{name} {got.dtype}", 0.0))

    for dtype in TOLERANCE:
        for size in [1, 2] * rounds:
            # Every rank draws what all of them have; sizes change, so that the shared buffer grows.
            draw: dict[str, Any] = {"generator": random, "device": ranks.device, "dtype": dtype}
            of_rank = [torch.randn(size * ROWS * world, IN_FEATURES, **draw) for _ in range(world)]
            matrices = [torch.randn(OUT_FEATURES, IN_FEATURES, **draw) / IN_FEATURES**0.5 for _ in range(world)]
            shards = [rows[: size * ROWS] for rows in of_rank]
            whole = torch.cat(shards)
            products = [rows.float() @ matrix.float().t() for rows, matrix in zip(of_rank, matrices, strict=True)]

            gathered, product = memory.gather_multiply(shards[rank], matrices[rank].t())
            note("gathered", gathered, whole.float())
            note("all_gather_matmul", product, whole.float() @ matrices[rank].float().t())
            scattered = memory.multiply_scatter(of_rank[rank], matrices[rank].t())
            note("matmul_reduce_scatter", scattered, sum(products).chunk(world)[rank])  # type: ignore[attr-defined]
            moving = memory.all_gather(shards[rank])
            beside = of_rank[rank] @ matrices[rank].t()
            note("all_gather", moving.wait(), whole.float())
            note("beside", beside, products[rank])
            moving = memory.reduce_scatter(of_rank[rank])
            beside = of_rank[rank] @ matrices[rank].t()
            note("reduce_scatter", moving.wait(), sum(r.float() for r in of_rank).chunk(world)[rank])  # type: ignore[attr-defined]
            note("beside", beside, products[rank])
    operators.close()
    # It can be used again after it was closed.
    gathered, _ = memory.gather_multiply(shards[rank], matrices[rank].t())
    note("gathered", gathered, whole.float())
    operators.close()
    return found


@pytest.mark.gpu(count=2)
def test_every_operator_computes_what_collectives_and_a_gemm_do() -> None:
    for found in run_ranks(2, errors_of_operators, secrets.randbits(60), 5, device="cuda"):
        assert len(found) == 6 * len(TOLERANCE)
        for dtype, tolerance in TOLERANCE.items():
            assert {n: e for n, e in found.items() if n.endswith(str(dtype)) and e > tolerance} == {}


def sweep(directory: Path, *arguments: str) -> dict[str, Result]:
    launch = Launch(directory)
    done = launch.run("-m", *SMALL_MODEL, *arguments)
    results = launch.results()
    assert results, done.stderr
    return results


@pytest.mark.gpu(count=2)
def test_every_overlap_computes_what_no_overlap_does_beside_async_tp(tmp_path: Path) -> None:
    given = ("operator=qkv,proj,fc1,fc2", "method=bulk,ring_exchange", "num_sm=1,16", "precision=bf16,fp16,fp32")
    results = sweep(tmp_path, "profile=none", *given)
    # bulk does not fit proj and fc2; both num_sm are one point.
    assert len(results) == 4 * 2 * 3
    for result in results.values():
        fits = result.recorded["method"] == "ring_exchange" or result.recorded["operator"] in ("qkv", "fc1")
        assert result.status == ("ok" if fits else "skipped"), result.error
        if fits:
            assert max(result.relative_error.values()) < 2e-2
            assert result.measured.times["all"].default is not None
            assert not any("wrong numbers" in warning for warning in result.warnings)


@pytest.mark.gpu(count=2)
def test_traces_show_the_fused_operators_and_no_multicast(tmp_path: Path) -> None:
    (result,) = sweep(tmp_path, "profile=all", "operator=fc1", "method=ring_exchange").values()
    assert result.status == "ok", result.error
    assert result.settings == {slot: ASYNC_TP[slot] for slot in ("fc1_fprop", "fc1_dgrad")}
    trace = gzip.decompress((tmp_path / result.name / "trace_rank0.json.gz").read_bytes())
    assert b"fused_all_gather_matmul" in trace
    assert b"fused_matmul_reduce_scatter" in trace
    assert b"multimem" not in trace


@pytest.mark.gpu(count=2)
def test_a_layer_runs_under_async_tp_unasked_and_its_methods_agree(tmp_path: Path) -> None:
    (result,) = sweep(tmp_path, "workload=layer", "profile=none").values()
    assert result.status == "ok", result.error
    assert list(result.measured.variants) == ["none", "default", "rs_dgrad", "ring_exchange", "bulk", "floor"]
    assert max(result.measured.variants["default"].relative_error.values()) < 5e-2
    assert not result.warnings


@pytest.mark.gpu(count=4)
def test_each_of_two_replicas_overlaps_in_its_own_group(tmp_path: Path) -> None:
    (result,) = sweep(tmp_path, "workload=layer", "layer.num_replicas=2", "profile=none").values()
    assert result.status == "ok", result.error
    assert "default" in result.measured.variants
