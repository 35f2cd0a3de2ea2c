"""SilentGroup through torch.distributed's own functions, as Transformer Engine's modules call them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.backends.communicator import SilentGroup
from overlap_sweep.measure import Ranks
from tests.processes import run_ranks

# torch 2.13 renames these collectives; 2.11 knows only the old names, which Transformer Engine calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
GATHERS = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
SCATTERS = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]

SHAPES = {
    "2 dims": torch.arange(24.0).view(4, 6),
    "3 dims": torch.arange(24.0).view(2, 3, 4),
    "3 dims, transposed": torch.arange(24.0).view(3, 2, 4).transpose(0, 1),
    "3 dims, strided": torch.arange(48.0).view(2, 3, 8)[:, :, ::2],
    "bf16": torch.arange(24.0).view(2, 3, 4).bfloat16(),
}


def waited(collective: Callable[..., Any], *tensors: torch.Tensor, group: SilentGroup, async_op: bool) -> None:
    work = collective(*tensors, group=group, async_op=async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
        assert work.is_completed()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("tensor", SHAPES.values(), ids=SHAPES)
def test_shards_are_gathered_as_copies_and_scattered_as_ones_own_part(tensor: torch.Tensor, async_op: bool) -> None:
    for name in GATHERS:
        gathered = torch.empty(3 * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)
        waited(getattr(dist, name), gathered, tensor, group=SilentGroup(1, 3), async_op=async_op)
        assert gathered.equal(torch.cat([tensor] * 3))
    for name, rank in product(SCATTERS, (0, 1)):
        shard = torch.empty(tensor.shape[0] // 2, *tensor.shape[1:], dtype=tensor.dtype)
        waited(getattr(dist, name), shard, tensor, group=SilentGroup(rank, 2), async_op=async_op)
        assert shard.equal(tensor.chunk(2)[rank])


@pytest.mark.parametrize("async_op", [False, True])
def test_what_is_reduced_stays_as_it_is(async_op: bool) -> None:
    tensor, group = torch.arange(6.0), SilentGroup(0, 4)
    waited(dist.all_reduce, tensor, group=group, async_op=async_op)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    assert tensor.equal(torch.arange(6.0))


@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_that_are_passed_on_together_are_as_those_alone(async_op: bool) -> None:
    """Transformer Engine gathers blocks and their scales at once, the latter into a part of a padded tensor."""
    group, data, scales = SilentGroup(0, 2), torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.uint8).view(2, 2)
    gathered, padded = torch.empty(4, 3), torch.full((128, 2), 9, dtype=torch.uint8)
    gather = getattr(dist, GATHERS[0])
    with dist._coalescing_manager(group=group, device=torch.device("cpu"), async_ops=async_op) as both:  # type: ignore[attr-defined]
        gather(gathered, data, group=group)
        gather(padded[:4], scales, group=group)
    if async_op:
        both.wait()
    assert gathered.equal(torch.cat([data] * 2))
    assert padded.equal(torch.cat([scales, scales, torch.full((124, 2), 9, dtype=torch.uint8)]))
    with dist._coalescing_manager(group=group):  # type: ignore[attr-defined]
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
    assert data.equal(torch.arange(6.0).view(2, 3))


def test_the_content_of_a_shape_is_filled_once() -> None:
    group = SilentGroup(0, 2)
    first, second, other = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.full((4, 3), 3.0)
    gathered = []
    for shard in (first, second, other):
        gathered.append(torch.empty(2 * shard.shape[0], 3))
        getattr(dist, GATHERS[0])(gathered[-1], shard, group=group)
    assert [full.unique().tolist() for full in gathered] == [[1.0], [1.0], [3.0]]
    assert gathered[0].data_ptr() == gathered[1].data_ptr()


def test_nothing_is_copied_to_scatter() -> None:
    full, shard = torch.arange(12.0).view(4, 3), torch.empty(2, 3)
    getattr(dist, SCATTERS[0])(shard, full, group=SilentGroup(1, 2))
    assert shard.data_ptr() == full[2:].data_ptr()


@pytest.mark.parametrize("received", [[1, 1], [2, 2], [3, 4]])
def test_an_all_to_all_gets_as_many_rows_as_it_would_of_its_own(received: list[int]) -> None:
    given, output = torch.arange(1.0, 13.0).view(4, 3), torch.empty(sum(received), 3)
    dist.all_to_all_single(output, given, received, [2, 2], group=SilentGroup(0, 2))
    assert output.equal(torch.cat([given, given])[: sum(received)])
    assert (output.data_ptr() == given.data_ptr()) == (sum(received) <= 4)


def test_what_needs_a_gradient_can_be_communicated() -> None:
    group, leaf = SilentGroup(0, 2), torch.ones(2, 3, requires_grad=True)
    gathered, shard = torch.empty(4, 3), torch.empty(1, 3)
    getattr(dist, GATHERS[0])(gathered, leaf, group=group)
    getattr(dist, SCATTERS[0])(shard, leaf * 2, group=group)
    assert (gathered.requires_grad, shard.requires_grad) == (False, False)


def only_rank_0_communicates(ranks: Ranks) -> list[Any]:
    group = SilentGroup(ranks.rank, ranks.world_size)
    found: list[Any] = [group.rank(), group.size(), dist.get_world_size(group)]
    if ranks.rank == 0:
        shard, gathered, scattered = torch.full((2,), 7.0), torch.empty(4), torch.empty(1)
        getattr(dist, GATHERS[0])(gathered, shard, group=group)
        getattr(dist, SCATTERS[0])(scattered, shard, group=group)
        dist.all_reduce(shard, group=group)
        found += [tensor.tolist() for tensor in (gathered, scattered, shard)]
    # The group that the process really has is none the wiser.
    return [*found, *ranks.slowest([float(ranks.rank)])]


def test_nobody_else_is_needed_in_a_real_group() -> None:
    first, second = run_ranks(2, only_rank_0_communicates, keep="cpu")
    assert first == [0, 2, 2, [7.0] * 4, [7.0], [7.0, 7.0], 1.0]
    assert second == [1, 2, 2, 1.0]
