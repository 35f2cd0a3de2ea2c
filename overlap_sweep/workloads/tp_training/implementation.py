"""What a tensor-parallel stack is to the benchmark, and what is equal for all of them: groups of ranks, initial
weights, each drawn whole by its Hugging Face name, and batches of tokens, drawn before the first step.

A stack is a class of this package. It is called with point, ranks and groups on every rank, and is an Implementation
with the weights of `initial_weights`. Refused from it skips the point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap_sweep.measure import Ranks, stream
from overlap_sweep.workloads.tp_training.language_model import architecture


@dataclass(frozen=True)
class Groups:
    """Of this rank. The tensor-parallel ranks, neighbours, compute the same tokens, the data-parallel ones have the
    same weights."""

    mesh: DeviceMesh
    """[dp, tp]."""
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup
    tp_size: int
    tp_rank: int
    dp_size: int
    dp_rank: int


@cache
def groups_of(ranks: Ranks, tp_size: int, dp_size: int) -> Groups:
    """Returns the groups, made once for all points of a process. Collective."""
    assert tp_size * dp_size == ranks.world_size
    mesh = init_device_mesh(ranks.device.type, (dp_size, tp_size), mesh_dim_names=("dp", "tp"))
    tp_rank, dp_rank = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    return Groups(mesh, mesh.get_group("tp"), mesh.get_group("dp"), tp_size, tp_rank, dp_size, dp_rank)


@dataclass(frozen=True)
class Facts:
    """What only the implementation knows of how it trains."""

    details: dict[str, Any] = field(default_factory=dict)
    """Of result.json, such as who computes attention. JSON."""
    warnings: list[str] = field(default_factory=list)
    """What a reader must know before believing the numbers, one sentence each."""


class Implementation(Protocol):
    """A model in training on this rank. Nothing here waits for the device unless the stack itself does."""

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        """Returns the loss of one micro batch, mean over this data-parallel rank's tokens, float32, the same on all its
        tensor-parallel ranks. tokens, labels: [batch, sequence], int64; labels are those of the next token already.
        `last`: of the step's micro batches."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Takes the loss that `forward` returned. Gradients are averaged over micro batches and data-parallel ranks;
        they are reduced with the last one, unless the stack reduces each."""
        ...

    def update(self) -> Tensor:
        """Clip, take the optimizer's step, clear the gradients. Returns the norm of the gradients before, over all
        parameters and ranks: a scalar on any device; not finite where the step was left out (float16)."""
        ...

    def facts(self) -> Facts:
        """Asked once, after the last step."""
        ...

    def close(self) -> None:
        """Free what outlives the object: process groups of its own, buffers, state of the library's. Collective."""
        ...


def load(impl: str) -> Callable[[Mapping[str, Any], Ranks, Groups], Implementation]:
    """Returns the stack's class."""
    module, name = _CLASSES[impl]
    stack: type[Implementation] = getattr(import_module(f"{__package__}.{module}"), name)
    return stack


_CLASSES = {
    "autotp": ("autotp", "AutoTp"),
    "fsdp_dtensor": ("fsdp_dtensor", "FsdpDtensor"),
    "async_tp": ("fsdp_dtensor", "AsyncTp"),
    "megatron": ("megatron", "Megatron"),
}


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Returns so many that every tensor-parallel rank has equally many rows, and as many as a GEMM's kernels like."""
    multiple = 8 * tp_size
    return -(-vocab_size // multiple) * multiple


def initial_weights(point: Mapping[str, Any], ranks: Ranks) -> Callable[[str, Sequence[int]], Tensor]:
    """Returns what draws a parameter by its Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`, and
    whole shape, of the embedding and output projection with the vocabulary's padding: float32, on the device, the same
    on all ranks and for whoever asks. Norms are one, biases zero, padding zero, all else normal.

    One parameter is whole at a time: whoever asks cuts out its part and lets go of the rest.
    """
    seed, model = point["tp_training"]["seed"], point["language_model"]
    of = architecture(model["model_type"])
    std, vocabulary = model.get("initializer_range", 0.02), model["vocab_size"]

    def draw(name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(*shape, device=ranks.device)
        if len(shape) == 1:
            return torch.ones(*shape, device=ranks.device)
        weight = torch.zeros(*shape, device=ranks.device)
        # The padding is no part of the draw, which would else depend on the number of ranks.
        rows = vocabulary if name in (f"{of.embedding}.weight", f"{of.output}.weight") else shape[0]
        weight[:rows].normal_(std=std, generator=stream(ranks.device, seed, name))
        return weight

    return draw


MOST_BATCHES = 128
"""Micro batches that are different; longer runs begin again. A model that saw few of them many times would know them by
heart, and near a loss of zero rounding decides what it is."""
SKEW = 4
"""Of the draw: low tokens are frequent, as in language, so that there is something to learn, and a loss that moves says
whether the gradients are right."""


def token_batches(point: Mapping[str, Any], ranks: Ranks, dp_rank: int) -> list[tuple[Tensor, Tensor]]:
    """Returns tokens and the next token of each, [batch, sequence], int64, on the device, by micro batch: the same for
    all implementations, and on the tensor-parallel ranks of a data-parallel one."""
    training, profiled = point["tp_training"], point["workload"]["profiled"]
    # One profiled step is thrown away.
    steps = training["num_training_steps"] + profiled + 1
    count = min(MOST_BATCHES, steps * training["gradient_accumulation_steps"])
    return [_draw(point, ranks, dp_rank, index) for index in range(count)]


def _draw(point: Mapping[str, Any], ranks: Ranks, dp_rank: int, index: int) -> tuple[Tensor, Tensor]:
    training, vocabulary = point["tp_training"], point["language_model"]["vocab_size"]
    generator = stream(torch.device("cpu"), training["seed"], f"micro batch {index}", dp_rank)
    shape = training["batch_size"], training["seq_length"] + 1
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) ** SKEW
    tokens = (drawn * vocabulary).long().to(ranks.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
