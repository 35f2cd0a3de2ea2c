"""backend=symm_mem: every method against the unsharded layer, what it refuses, and what async TP is here.

The operators are PyTorch's own fallbacks, on gloo; on GPUs they are tested in test_symm_mem_on_gpus.py.
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch

from overlap_sweep import backends, space, workloads
from overlap_sweep.backends import symm_mem
from overlap_sweep.backends.symm_mem.operators import group_name
from overlap_sweep.backends.symm_mem.slot_overlap import SymmetricMemory
from overlap_sweep.backends.torch.linear import parallel_linear
from overlap_sweep.backends.torch.slot_overlap import by_collectives
from overlap_sweep.models import LinearShape
from overlap_sweep.ranks import Ranks
from tests.backends import symm_mem_on_cpu
from tests.points import gpu_point
from tests.processes import run_ranks

ROWS_PER_RANK, IN_FEATURES, OUT_FEATURES = 5, 24, 40
RING, BULK = {"method": "ring_exchange"}, {"method": "bulk"}
FUSED_GATHER, FUSED_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
GATHER, SCATTER = "_low_contention_all_gather", "_low_contention_reduce_scatter"

CASES: dict[str, tuple[str, dict[str, space.Setting], list[str]]] = {
    "column none": ("fc1", {}, []),
    "column ring fprop": ("fc1", {"fc1_fprop": RING}, [FUSED_GATHER]),
    "column ring dgrad": ("fc1", {"fc1_dgrad": RING}, [FUSED_SCATTER]),
    "column bulk dgrad": ("fc1", {"fc1_dgrad": BULK}, [GATHER]),
    "column bulk wgrad": ("fc1", {"fc1_wgrad": BULK}, [SCATTER]),
    "column bulk both": ("fc1", {"fc1_dgrad": BULK, "fc1_wgrad": BULK}, [GATHER, SCATTER]),
    "column async TP": ("fc1", symm_mem.ASYNC_TP, [FUSED_GATHER, FUSED_SCATTER]),
    "row none": ("fc2", {}, []),
    "row ring fprop": ("fc2", {"fc2_fprop": RING}, [FUSED_SCATTER]),
    "row ring dgrad": ("fc2", {"fc2_dgrad": RING}, [FUSED_GATHER]),
    "row async TP": ("fc2", symm_mem.ASYNC_TP, [FUSED_SCATTER, FUSED_GATHER]),
}
"""By name the operator, its settings, and which of PyTorch's operators a forward and backward call."""


def sharded_against_unsharded(ranks: Ranks, seed: int) -> dict[str, tuple[list[float], list[str]]]:
    """Per case the largest absolute error of this rank's output, input, weight and bias gradients, and what was
    called."""
    symm_mem_on_cpu.stand_in()
    world, rank = ranks.world_size, ranks.rank
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    tokens = ROWS_PER_RANK * world
    x, weight, bias = draw(tokens, IN_FEATURES), draw(OUT_FEATURES, IN_FEATURES), draw(OUT_FEATURES)
    grad = draw(tokens, OUT_FEATURES)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    output = torch.nn.functional.linear(*leaves)
    dx, dw, db = torch.autograd.grad(output, leaves, grad)
    column = (x.chunk(world)[rank], weight.chunk(world)[rank], bias.chunk(world)[rank]), grad.chunk(world, 1)[rank]
    row = (x.chunk(world, 1)[rank], weight.chunk(world, 1)[rank], bias), grad.chunk(world)[rank]
    of_column = output.chunk(world, 1)[rank], *(t.chunk(world)[rank] for t in (dx, dw, db))
    of_row = output.chunk(world)[rank], dx.chunk(world, 1)[rank], dw.chunk(world, 1)[rank], db

    overlap, found = SymmetricMemory(group_name()), {}
    for name, (operator, settings, _) in CASES.items():
        kind = space.OPERATORS[operator]
        (ours, our_grad), expected = (column, of_column) if kind == "column" else (row, of_row)
        shape = LinearShape(kind, tokens, IN_FEATURES, OUT_FEATURES, world)
        linear = parallel_linear(operator, shape, settings, by_collectives(ranks), lambda _: overlap)
        symm_mem_on_cpu.called.clear()
        inputs = [t.contiguous().requires_grad_() for t in ours]
        result = linear(*inputs)
        got = (result, *torch.autograd.grad(result, inputs, our_grad))
        errors = [(g - e).abs().max().item() for g, e in zip(got, expected, strict=True)]
        found[name] = errors, list(symm_mem_on_cpu.called)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=lambda world: f"tp{world}")
def found(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(request.param, sharded_against_unsharded, secrets.randbits(60))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsharded_layer_by_the_operators_that_it_should_call(found: list[Any], name: str) -> None:
    for rank, of_rank in enumerate(found):
        errors, called = of_rank[name]
        for tensor, error in zip(("output", "input_grad", "weight_grad", "bias_grad"), errors, strict=True):
            assert error < 1e-12, f"rank {rank}: {tensor} is off by {error}"
        assert called == CASES[name][2]


def purposes(ranks: Ranks, bias: bool) -> dict[str, list[str]]:
    """By purpose, which operators a forward and backward of the backend's own operators call, fc1's and fc2's."""
    symm_mem_on_cpu.stand_in()
    called: dict[str, list[str]] = {}
    for operator in ("fc1", "fc2"):
        point = operator_point(
            tp_size=ranks.world_size, operator=operator, method="ring_exchange", model={"bias": bias}
        )
        for purpose in ("point", "default", "none", "floor"):
            symm_mem.prepare(point, purpose)
            shape = LinearShape(space.OPERATORS[operator], 128, 256, 512, ranks.world_size)
            shapes = symm_mem.parameter_shapes(point, shape)
            assert ("bias" in shapes) == bias
            sizes = {"fc1": (512, 256), "fc2": (256, 256)}[operator]
            parameters = {"weight": torch.randn(sizes), **({"bias": torch.randn(sizes[0])} if bias else {})}
            linear = symm_mem.build(point, purpose, ranks, parameters)
            symm_mem_on_cpu.called.clear()
            x = torch.randn(linear.input_shape, requires_grad=True)
            output = linear.forward(x)
            assert tuple(output.shape) == linear.output_shape
            output.sum().backward()
            called.setdefault(purpose, []).extend(symm_mem_on_cpu.called)
    symm_mem.close()
    return called


def operator_point(**changes: Any) -> dict[str, Any]:
    return gpu_point(backend="symm_mem", **changes)


@pytest.mark.parametrize("bias", [False, True])
def test_the_default_is_async_tp_and_neither_none_nor_floor_overlaps(bias: bool) -> None:
    fused = [FUSED_GATHER, FUSED_SCATTER, FUSED_SCATTER, FUSED_GATHER]
    for called in run_ranks(2, purposes, bias):
        assert called == {"point": fused, "default": fused, "none": [], "floor": []}


def test_async_tp_is_every_gather_and_scatter_that_a_gemm_can_be_fused_with() -> None:
    assert set(symm_mem.ASYNC_TP) == {
        *("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"),
        *("proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad"),
    }
    assert symm_mem.has_default(operator_point())
    assert not symm_mem.has_default(operator_point(tp_size=1, method="none"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runtime": {"device": "cpu"}}, "backend=symm_mem copies from GPU to GPU, and runtime.device is cpu"),
        ({"precision": "fp8_delayed"}, "backend=symm_mem has no precision=fp8_delayed; it has fp32, fp16, bf16"),
        (
            {"operator": "fc2", "method": "pipeline"},
            "backend=symm_mem has no pipeline, which fc2_fprop is given; it has ring_exchange and bulk",
        ),
        (
            {"method": "ring_exchange", "aggregate": True},
            "backend=symm_mem has no aggregate; its methods have no knobs",
        ),
        (
            {"cga_size": 2, "set_sm_margin": True},
            "backend=symm_mem has no cga_size, set_sm_margin; its methods have no",
        ),
        ({"tp_size": 1}, "tp_size=1 communicates nothing that could overlap; its only method is none"),
        ({"workload": {"tokens": 129}}, "129 tokens do not divide by tp_size=2"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(workloads.load("operator").refusal(operator_point(**changes)))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("method", ["none", "bulk", "ring_exchange"])
def test_what_can_run_is_not_refused(precision: str, method: str) -> None:
    for tp_size in (2, 4, 8):
        point = operator_point(tp_size=tp_size, operator="fc1", method=method, precision=precision, num_sm=4)
        assert workloads.load("operator").refusal(point) is None


def test_auto_does_not_choose_it() -> None:
    assert {backends.choose(device) for device in ("cpu", "cuda")} <= {"torch", "transformer_engine"}
