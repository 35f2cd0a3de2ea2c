"""What the backward pass computes again, kept by the forward pass instead."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils import checkpoint as checkpoints

from overlap_sweep.levers.activations import keep, recomputed
from overlap_sweep.levers.process import Later, NotApplicable

OWN = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.passes = nn.Linear(4, 4), nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        dropped: Tensor = self.dropout(self.layer(x).tanh())
        return dropped


class Checkpointed(nn.Module):
    """As transformers calls its blocks."""

    def __init__(self, block: Block, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.call = block, partial(checkpoints.checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = self.call(self.block, x)
        return called


WAYS = {
    "reentrant": partial(Checkpointed, reentrant=True),
    "not reentrant": partial(Checkpointed, reentrant=False),
    "wrapper": checkpoint_wrapper,
    "composable": composable,
}


def steps(way: str, lever: Later | None, number: int = 3) -> tuple[list[int], list[Tensor]]:
    """Returns how often each step calls the block, and the gradients of the last step."""
    torch.manual_seed(0)
    block = Block()
    model = WAYS[way](block) if way else block
    passes = []
    for _ in range(number):
        block.passes = 0
        block.zero_grad()
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        passes.append(block.passes)
        if lever is not None:
            next(lever)
    return passes, [one.grad for one in block.parameters() if one.grad is not None]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set again to what they are, so that they are set back after the test.
    import torch.distributed._composable.checkpoint_activation as module

    for owner in (checkpoints, module):
        monkeypatch.setattr(owner, "_checkpoint_without_reentrant_generator", OWN[0])
    monkeypatch.setattr(checkpoints, "CheckpointFunction", OWN[1])
    monkeypatch.setattr(CheckpointWrapper, "forward", CheckpointWrapper.forward)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("way", WAYS)
def test_from_the_second_step_on_nothing_is_computed_again_and_gradients_are_the_same(way: str) -> None:
    as_it_is, gradients = steps(way, None)
    assert as_it_is == [2, 2, 2]

    passes, kept = steps(way, keep(False))

    assert passes == [2, 1, 1]
    assert all(torch.equal(one, other) for one, other in zip(gradients, kept, strict=True))


def test_what_is_compiled_from_then_on_computes_nothing_again_either() -> None:
    """`host.compile_blocks` compiles a checkpoint_wrapper's own call."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    as_it_is = model(torch.ones(2, 4))
    lever = keep(False)
    next(lever)
    model.compile(backend=backend)
    compiled = model(torch.ones(2, 4))
    assert next(lever)
    assert torch.equal(as_it_is, compiled)
    assert graphs
    assert "tag_activation_checkpoint" not in {str(node.target) for graph in graphs for node in graph.graph.nodes}
    # One that was compiled before is left as it is.
    lever = keep(False)
    next(lever)
    with pytest.raises(NotApplicable):
        next(lever)


def test_whether_something_is_computed_again_is_found_out_without_a_change() -> None:
    assert steps("wrapper", recomputed(False))[0] == [2, 2, 2]
    assert (checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction) == OWN


@pytest.mark.parametrize("lever", [keep, recomputed])
def test_without_checkpoints_it_is_said_and_nothing_is_changed(lever: type) -> None:
    with pytest.raises(NotApplicable, match="a step of this training computes nothing again"):
        steps("", lever(False))
    assert (checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction) == OWN


def test_an_error_of_the_script_stays_its_own() -> None:
    lever = keep(False)
    next(lever)

    def broken(_: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checkpoints.checkpoint(broken, torch.ones(1), use_reentrant=False)
