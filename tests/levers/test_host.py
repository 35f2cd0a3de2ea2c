"""What levers of the host do, without a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule

from overlap_sweep.levers import host
from overlap_sweep.levers.fsdp import backward_prefetch_of_fsdp1
from overlap_sweep.levers.process import NotApplicable


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of the copies that are made; tensors of two numbers are pinned."""
    seen: list[dict[str, Any]] = []

    def to(tensor: Tensor, *_: object, **options: Any) -> Tensor:
        seen.append(options)
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() == 2)
    monkeypatch.setattr(torch.Tensor, "cuda", to)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return seen


def test_pinned_tensors_are_copied_without_waiting(copies: list[dict[str, Any]]) -> None:
    applying = host.non_blocking(True)
    assert next(applying) is False
    torch.ones(2).to("cuda")
    torch.ones(2).cuda()
    torch.ones(3).to("cuda")
    torch.ones(2).to("cuda", non_blocking=False)
    torch.ones(2).to("cuda", torch.float32, False)

    assert next(applying) is True
    assert copies == [{"non_blocking": True}, {"non_blocking": True}, {}, {"non_blocking": False}, {}]


@pytest.mark.parametrize(
    ("numbers", "reason"), [([3], "give job.levers.loader.pin_memory=true, too"), ([], "nothing, or says how itself")]
)
def test_copies_that_are_not_pinned_stay_as_they_are(
    numbers: list[int], reason: str, copies: list[dict[str, Any]]
) -> None:
    own, applying = torch.Tensor.to, host.non_blocking(True)
    next(applying)
    for number in numbers:
        torch.ones(number).to("cuda")

    with pytest.raises(NotApplicable, match=reason):
        next(applying)
    assert torch.Tensor.to is own
    assert copies == [{} for _ in numbers]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])


@pytest.mark.parametrize(
    "layers",
    [
        nn.ModuleList([Layer(), Layer()]),
        nn.Sequential(Layer(), Layer()),
        nn.ModuleDict({"0": Layer(), "1": Layer()}),
    ],
)
def test_blocks_are_those_of_the_outermost_container(layers: nn.Module) -> None:
    frozen = nn.ModuleList([Layer(), Layer()]).requires_grad_(False)
    modules = [*layers.modules(), *frozen.modules(), *nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).modules()]

    assert host.repeated_blocks(modules) == [*layers.children()]


def test_blocks_of_which_some_are_wrapped_or_sharded_are_blocks_of_one_class() -> None:
    blocks = [Layer(), checkpoint_wrapper(Layer()), Layer()]
    # As fully_shard does.
    blocks[0].__class__ = type("FSDPLayer", (FSDPModule, Layer), {})
    layers = nn.ModuleList(blocks)

    assert host.repeated_blocks([*layers.modules()]) == blocks
    assert host.repeated_blocks([*nn.ModuleList([*blocks, checkpoint_wrapper(nn.Linear(1, 1))]).modules()]) != blocks


class Named(nn.Sequential):
    """Has no forward of its own."""


@pytest.mark.parametrize("kind", [nn.Sequential, Named])
def test_blocks_whose_forward_is_torchs_own_are_left_since_compile_does_nothing_with_them(
    kind: type[nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[kind(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
    monkeypatch.setattr(host, "live", lambda kind: [*model.modules()] if kind is nn.Module else [])

    with pytest.raises(NotApplicable, match=f"are {kind.__name__}, whose forward is torch's own"):
        host.compile_blocks(True)

    assert all(block._compiled_call_impl is None for block in model)


def test_fsdp1_prefetches_by_name() -> None:
    values = [backward_prefetch_of_fsdp1(value, {}) for value in ("BACKWARD_PRE", "BACKWARD_POST", "none")]
    assert values == [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]
