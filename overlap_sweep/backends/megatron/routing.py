"""Chooses the experts of each token, once for every input, so that all variants send the same tokens to the same ranks,
and every rank knows how many it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_sweep.measure import Ranks, stream


@dataclass(frozen=True)
class Routing:
    """The experts of one micro batch, on the layer's device."""

    experts: Tensor
    """[tokens, experts_per_token], of this rank's tokens."""
    tokens_per_expert: Tensor
    """[ranks, num_experts]: how many tokens each rank sends to each expert."""


def draw(kind: str, tokens: int, num_experts: int, chosen: int, name: str, seed: int, ranks: Ranks) -> Routing:
    """Returns the routing of the micro batch of this name. `chosen` is the number of experts of a token."""
    by_rank = []
    for rank in range(ranks.world_size):
        generator = stream(torch.device("cpu"), seed, f"routing {name}", rank)
        if kind == "balanced":
            # Dealt in turn, every expert gets as many tokens as any other, and no token an expert twice.
            turn = torch.randperm(num_experts, generator=generator)
            by_rank.append(turn[torch.arange(tokens * chosen).view(tokens, chosen) % num_experts])
        else:
            by_rank.append(torch.rand((tokens, num_experts), generator=generator).topk(chosen).indices)
    counts = torch.stack([torch.bincount(experts.flatten(), minlength=num_experts) for experts in by_rank])
    return Routing(by_rank[ranks.rank].to(ranks.device), counts.to(ranks.device))


class Prescribed:
    """Has a router take prescribed experts instead of those with the highest scores. Stands for Megatron-Core's
    RouterReplay, which keeps every routing that it was ever given."""

    experts: Tensor

    def get_replay_topk(self, scores: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the scores of the prescribed experts, and their numbers."""
        return scores.gather(1, self.experts), self.experts
