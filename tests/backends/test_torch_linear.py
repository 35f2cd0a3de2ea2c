"""Every method of the torch backend against the unsharded layer in float64, on fresh random inputs."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch

from overlap_sweep.backends.torch.linear import parallel_linear
from overlap_sweep.backends.torch.slot_overlap import by_collectives
from overlap_sweep.models import LinearShape
from overlap_sweep.ranks import Ranks
from tests.processes import run_ranks

ROWS_PER_RANK, IN_FEATURES, OUT_FEATURES = 5, 24, 40

COLUMN = {
    "none": {},
    "bulk_dgrad": {"fc1_dgrad": {"method": "bulk", "num_sm": 2}},
    "bulk_wgrad": {"fc1_wgrad": {"method": "bulk", "num_sm": 3}},
    "bulk_both": {"fc1_dgrad": {"method": "bulk", "num_sm": 1}, "fc1_wgrad": {"method": "bulk", "num_sm": 7}},
    "ring_fprop": {"fc1_fprop": {"method": "ring_exchange", "num_sm": 2}},
    "ring_fprop_aggregate": {"fc1_fprop": {"method": "ring_exchange", "num_sm": 2, "aggregate": True}},
    "ring_dgrad": {"fc1_dgrad": {"method": "ring_exchange", "num_sm": 2}},
    "pipeline_dgrad": {"fc1_dgrad": {"method": "pipeline", "num_sm": 1, "num_splits": 3}},
    "ring_everywhere": {"fc1_fprop": {"method": "ring_exchange"}, "fc1_dgrad": {"method": "ring_exchange"}},
}
ROW = {
    "none": {},
    "ring_fprop": {"fc2_fprop": {"method": "ring_exchange", "num_sm": 2}},
    "pipeline_fprop": {"fc2_fprop": {"method": "pipeline", "num_sm": 2, "num_splits": 2}},
    "pipeline_more_splits_than_rows": {"fc2_fprop": {"method": "pipeline", "num_splits": 64}},
    "ring_dgrad": {"fc2_dgrad": {"method": "ring_exchange", "num_sm": 3}},
    "ring_dgrad_aggregate": {"fc2_dgrad": {"method": "ring_exchange", "aggregate": True}},
}
CASES = [("fc1", name) for name in COLUMN] + [("fc2", name) for name in ROW]
TENSORS = ("output", "input_grad", "weight_grad", "bias_grad")


def sharded_against_unsharded(ranks: Ranks, seed: int, dtype: torch.dtype) -> dict[tuple[str, str], list[float]]:
    """Per case the largest absolute error of this rank's output, input, weight and bias gradients."""
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

    errors = {}
    for operator, settings_by_name in (("fc1", COLUMN), ("fc2", ROW)):
        if operator == "fc1":
            shape = LinearShape("column", tokens, IN_FEATURES, OUT_FEATURES, world)
            ours = (x.chunk(world)[rank], weight.chunk(world)[rank], bias.chunk(world)[rank])
            our_grad = grad.chunk(world, 1)[rank]
            expected = (output.chunk(world, 1)[rank], *(t.chunk(world)[rank] for t in (dx, dw, db)))
        else:
            shape = LinearShape("row", tokens, IN_FEATURES, OUT_FEATURES, world)
            ours = (x.chunk(world, 1)[rank], weight.chunk(world, 1)[rank], bias)
            our_grad = grad.chunk(world)[rank]
            expected = (output.chunk(world)[rank], dx.chunk(world, 1)[rank], dw.chunk(world, 1)[rank], db)
        for name, settings in settings_by_name.items():
            if world == 1 and name != "none":
                continue
            linear = parallel_linear(operator, shape, settings, by_collectives(ranks))
            inputs = [t.to(dtype).contiguous().requires_grad_() for t in ours]
            result = linear(*inputs)
            got = (result, *torch.autograd.grad(result, inputs, our_grad.to(dtype)))
            pairs = zip(got, expected, strict=True)
            errors[operator, name] = [(g.double() - e).abs().max().item() for g, e in pairs]
    return errors


@pytest.fixture(scope="module", params=[2, 4], ids=lambda world: f"tp{world}")
def errors(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(request.param, sharded_against_unsharded, secrets.randbits(60), torch.float64)


@pytest.mark.parametrize(("operator", "name"), CASES, ids=[f"{o}-{n}" for o, n in CASES])
def test_equals_the_unsharded_layer(errors: list[Any], operator: str, name: str) -> None:
    for rank, of_rank in enumerate(errors):
        for tensor, error in zip(TENSORS, of_rank[operator, name], strict=True):
            assert error < 1e-12, f"rank {rank}: {tensor} is off by {error}"


def test_one_rank_is_the_layer_itself() -> None:
    (errors,) = run_ranks(1, sharded_against_unsharded, secrets.randbits(60), torch.float64)
    assert set(errors) == {("fc1", "none"), ("fc2", "none")}
    assert max(max(e) for e in errors.values()) < 1e-12


def test_float32_is_as_exact_as_float32_allows() -> None:
    for errors in run_ranks(2, sharded_against_unsharded, secrets.randbits(60), torch.float32):
        assert max(max(e) for e in errors.values()) < 1e-4


@pytest.mark.gpu(count=2)
def test_equals_the_unsharded_layer_on_nccl() -> None:
    for errors in run_ranks(2, sharded_against_unsharded, secrets.randbits(60), torch.float64, device="cuda"):
        assert max(max(e) for e in errors.values()) < 1e-12
