"""Every method of the backends that compute on a CPU against the unsharded layer in float64, on fresh random inputs.

symm_mem's operators are PyTorch's own fallbacks, on gloo; on GPUs they are tested in test_symm_mem_on_gpus.py.
"""

import secrets
from functools import cache
from typing import NamedTuple

import pytest
import torch

from overlap_sweep import backends
from overlap_sweep.backends import Purpose, symm_mem
from overlap_sweep.backends.symm_mem.operators import SymmetricMemory, group_name
from overlap_sweep.backends.torch.modules import parallel_linear
from overlap_sweep.backends.torch.overlap import by_collectives
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.workloads.operator.run import draw_parameters
from tests.backends import symm_mem_on_cpu
from tests.make_point import operator_point
from tests.processes import run_ranks

ROWS_PER_RANK, IN_FEATURES, OUT_FEATURES = 5, 24, 40
TENSORS = ("output", "input_grad", "weight_grad", "bias_grad")
RING, BULK = {"method": "ring_exchange"}, {"method": "bulk"}
FUSED_GATHER, FUSED_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
GATHER, SCATTER = "_low_contention_all_gather", "_low_contention_reduce_scatter"


class Case(NamedTuple):
    backend: str
    operator: str
    settings: dict[str, space.Setting]
    called: tuple[str, ...] = ()
    """PyTorch's operators of symmetric memory that a forward and backward call."""


CASES = {
    "torch, column none": Case("torch", "fc1", {}),
    "torch, bulk dgrad": Case("torch", "fc1", {"fc1_dgrad": {**BULK, "num_sm": 2}}),
    "torch, bulk wgrad": Case("torch", "fc1", {"fc1_wgrad": {**BULK, "num_sm": 3}}),
    "torch, bulk both": Case("torch", "fc1", {"fc1_dgrad": {**BULK, "num_sm": 1}, "fc1_wgrad": {**BULK, "num_sm": 7}}),
    "torch, column ring fprop": Case("torch", "fc1", {"fc1_fprop": {**RING, "num_sm": 2}}),
    "torch, column ring fprop by pairs": Case("torch", "fc1", {"fc1_fprop": {**RING, "num_sm": 2, "aggregate": True}}),
    "torch, column ring dgrad": Case("torch", "fc1", {"fc1_dgrad": {**RING, "num_sm": 2}}),
    "torch, pipeline dgrad": Case("torch", "fc1", {"fc1_dgrad": {"method": "pipeline", "num_sm": 1, "num_splits": 3}}),
    "torch, column ring everywhere": Case("torch", "fc1", {"fc1_fprop": RING, "fc1_dgrad": RING}),
    "torch, row none": Case("torch", "fc2", {}),
    "torch, row ring fprop": Case("torch", "fc2", {"fc2_fprop": {**RING, "num_sm": 2}}),
    "torch, pipeline fprop": Case("torch", "fc2", {"fc2_fprop": {"method": "pipeline", "num_sm": 2, "num_splits": 2}}),
    "torch, more splits than rows": Case("torch", "fc2", {"fc2_fprop": {"method": "pipeline", "num_splits": 64}}),
    "torch, row ring dgrad": Case("torch", "fc2", {"fc2_dgrad": {**RING, "num_sm": 3}}),
    "torch, row ring dgrad by pairs": Case("torch", "fc2", {"fc2_dgrad": {**RING, "aggregate": True}}),
    "symm_mem, column none": Case("symm_mem", "fc1", {}),
    "symm_mem, column ring fprop": Case("symm_mem", "fc1", {"fc1_fprop": RING}, (FUSED_GATHER,)),
    "symm_mem, column ring dgrad": Case("symm_mem", "fc1", {"fc1_dgrad": RING}, (FUSED_SCATTER,)),
    "symm_mem, bulk dgrad": Case("symm_mem", "fc1", {"fc1_dgrad": BULK}, (GATHER,)),
    "symm_mem, bulk wgrad": Case("symm_mem", "fc1", {"fc1_wgrad": BULK}, (SCATTER,)),
    "symm_mem, bulk both": Case("symm_mem", "fc1", {"fc1_dgrad": BULK, "fc1_wgrad": BULK}, (GATHER, SCATTER)),
    "symm_mem, column async TP": Case("symm_mem", "fc1", symm_mem.ASYNC_TP, (FUSED_GATHER, FUSED_SCATTER)),
    "symm_mem, row none": Case("symm_mem", "fc2", {}),
    "symm_mem, row ring fprop": Case("symm_mem", "fc2", {"fc2_fprop": RING}, (FUSED_SCATTER,)),
    "symm_mem, row ring dgrad": Case("symm_mem", "fc2", {"fc2_dgrad": RING}, (FUSED_GATHER,)),
    "symm_mem, row async TP": Case("symm_mem", "fc2", symm_mem.ASYNC_TP, (FUSED_SCATTER, FUSED_GATHER)),
}


class Found(NamedTuple):
    errors: dict[str, float]
    """The largest absolute one of each tensor, of one rank."""
    called: tuple[str, ...]


def sharded_against_unsharded(ranks: Ranks, seed: int, dtype: torch.dtype, names: list[str]) -> dict[str, Found]:
    world, rank = ranks.world_size, ranks.rank
    random = torch.Generator(ranks.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=ranks.device, dtype=torch.float64)

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

    found = {}
    for name in names:
        case = CASES[name]
        kind = space.OPERATORS[case.operator]
        (ours, our_grad), expected = (column, of_column) if kind == "column" else (row, of_row)
        shape = LinearShape(kind, tokens, IN_FEATURES, OUT_FEATURES, world)
        overlapped = []
        if case.backend == "symm_mem":
            symm_mem_on_cpu.stand_in()
            overlapped = [lambda _: SymmetricMemory(group_name())]
        linear = parallel_linear(case.operator, shape, case.settings, by_collectives(ranks), *overlapped)
        symm_mem_on_cpu.called.clear()
        inputs = [t.to(dtype).contiguous().requires_grad_() for t in ours]
        result = linear(*inputs)
        got = (result, *torch.autograd.grad(result, inputs, our_grad.to(dtype)))
        errors = [(g.double() - e).abs().max().item() for g, e in zip(got, expected, strict=True)]
        found[name] = Found(dict(zip(TENSORS, errors, strict=True)), tuple(symm_mem_on_cpu.called))
    return found


@cache
def found_on(world_size: int) -> list[dict[str, Found]]:
    seed = secrets.randbits(60)
    return run_ranks(world_size, sharded_against_unsharded, seed, torch.float64, list(CASES), keep="cpu")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsharded_layer_by_the_operators_that_it_should_call(world_size: int, name: str) -> None:
    for of_rank in found_on(world_size):
        assert max(of_rank[name].errors.values()) < 1e-12, of_rank[name].errors
        assert of_rank[name].called == CASES[name].called


ON_TORCH = [name for name, case in CASES.items() if case.backend == "torch"]


@pytest.mark.parametrize(
    ("world_size", "dtype", "names", "within"),
    [
        (1, torch.float64, ["torch, column none", "torch, row none"], 1e-12),
        (2, torch.float32, ON_TORCH, 1e-4),
    ],
)
def test_one_rank_is_the_layer_itself_and_float32_is_as_exact_as_it_can_be(
    world_size: int, dtype: torch.dtype, names: list[str], within: float
) -> None:
    for of_rank in run_ranks(
        world_size, sharded_against_unsharded, secrets.randbits(60), dtype, names, keep="cpu" if world_size > 1 else ""
    ):
        assert max(max(found.errors.values()) for found in of_rank.values()) < within


@pytest.mark.gpu(count=2)
def test_equals_the_unsharded_layer_on_nccl() -> None:
    seed = secrets.randbits(60)
    for of_rank in run_ranks(2, sharded_against_unsharded, seed, torch.float64, ON_TORCH, device="cuda"):
        assert max(max(found.errors.values()) for found in of_rank.values()) < 1e-12


PURPOSES: dict[str, tuple[Purpose, ...]] = {
    "torch": ("none", "point", "floor"),
    "symm_mem": ("none", "point", "default", "floor"),
}


def built_for(ranks: Ranks, backend: str, bias: bool) -> dict[str, tuple[float, tuple[str, ...]]]:
    """By operator and purpose, how far its output is from that of `none`, and which operators of symmetric memory its
    forward and backward call."""
    symm_mem_on_cpu.stand_in()
    module, found = backends.load(backend), {}
    for operator in ("fc1", "fc2"):
        changes = {"backend": backend, "operator": operator, "method": "ring_exchange", "model": {"bias": bias}}
        point = operator_point(tp_size=ranks.world_size, **changes)
        shape = models.linear_shape(point.model, operator, 128, ranks.world_size)
        shapes = module.parameter_shapes(point, shape)
        assert shapes["weight"] == shape.weight_shape
        parameters = draw_parameters(shapes, shape, "fp32", ranks, 0)
        x, outputs = torch.randn(shape.input_shape, requires_grad=True), {}
        for purpose in PURPOSES[backend]:
            module.prepare(point, purpose)
            linear = module.build(point, purpose, ranks, parameters)
            symm_mem_on_cpu.called.clear()
            outputs[purpose] = linear.forward(x if purpose != "floor" else torch.randn(linear.input_shape))
            assert tuple(outputs[purpose].shape) == linear.output_shape
            outputs[purpose].sum().backward()
            called = tuple(symm_mem_on_cpu.called)
            apart = (outputs[purpose] - outputs["none"]).abs().max().item() if purpose != "floor" else 0.0
            found[f"{operator} {purpose}"] = apart, called
    module.close()
    return found


@pytest.mark.parametrize(("backend", "bias"), [("torch", True), ("symm_mem", True), ("symm_mem", False)])
def test_purposes_compute_the_same_by_their_own_operators(backend: str, bias: bool) -> None:
    gathers, scatters = (FUSED_GATHER, FUSED_SCATTER), (FUSED_SCATTER, FUSED_GATHER)
    fused = {"fc1": gathers, "fc2": scatters} if backend == "symm_mem" else {}
    for of_rank in run_ranks(2, built_for, backend, bias, keep="cpu"):
        for name, (apart, called) in of_rank.items():
            operator, purpose = name.split()
            assert apart < 1e-4, name
            assert called == (fused.get(operator, ()) if purpose in ("point", "default") else ()), name
