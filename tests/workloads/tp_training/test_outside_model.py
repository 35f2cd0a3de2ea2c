"""A model class of another package, which says itself by DTensor's styles how it is cut."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.language_model import ARCHITECTURES, Architecture
from tests.composed import tp_point
from tests.processes import run_ranks
from tests.workloads.tp_training.stacks import Trained, differences, train_points

OWN = "decoder"


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def heads(linear: nn.Module) -> Tensor:
            # Of this rank.
            whole: Tensor = linear(x)
            return whole.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            heads(self.query), heads(self.key), heads(self.value), is_causal=True
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        # With biases, which nothing but their styles knows of.
        self.before, self.after = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        down: Tensor = self.down(functional.gelu(self.up(self.after(x))))
        return x + down


class Decoder(nn.Module):
    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = fields["hidden_size"]
        self.config = SimpleNamespace(hidden_size=hidden, tie_word_embeddings=fields["tie_word_embeddings"])
        self.words = nn.Embedding(fields["vocab_size"], hidden)
        sizes = hidden, fields["intermediate_size"], fields["num_attention_heads"]
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(fields["num_hidden_layers"]))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, fields["vocab_size"], bias=False)
        if self.config.tie_word_embeddings:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.head(self.norm(x)))


def styles(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Cut by sequence as PyTorch's tutorial does; else with whole activations, which `after` hands on as they are."""
    stream = Shard(1) if sequence_parallel else Replicate()
    gathered = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
    as_it_is = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    return {
        **({"before": SequenceParallel(), "after": SequenceParallel()} if sequence_parallel else {"after": as_it_is}),
        **({"attention": gathered} if sequence_parallel else {}),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=stream),
        "up": ColwiseParallel(input_layouts=stream),
        "down": RowwiseParallel(output_layouts=stream),
    }


DECODER = Architecture(
    column_parallel=("attention.query", "attention.key", "attention.value", "up"),
    row_parallel=("attention.out", "down"),
    layer_norms=("before", "after"),
    layers="layers",
    embedding="words",
    final_norm="norm",
    rotary="",
    output="head",
    create_model=lambda fields, attn_impl: Decoder(fields),
    get_tp_mapping=styles,
)


def _train(ranks: Ranks, points: dict[str, Resolved]) -> dict[str, Trained]:
    ARCHITECTURES[OWN] = DECODER
    return train_points(ranks, points)


def test_it_learns_what_the_whole_model_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, OWN, DECODER)
    asked = {
        "whole sequence": (),
        "by sequence": ("tp_training.sequence_parallel=true",),
        "tied": ("model.tie_word_embeddings=true", "tp_training.activation_checkpointing=true"),
    }
    steps = ("tp_training.num_training_steps=3", f"model.architecture={OWN}", "model.num_kv_heads=4")
    points = {name: tp_point(*steps, *given) for name, given in asked.items()}
    torch.set_num_threads(1)
    found = run_ranks(2, _train, points, keep=OWN)
    for name, point in points.items():
        of_losses, of_norms = differences([of_rank[name] for of_rank in found], point)
        assert of_losses < 1e-5, name
        assert of_norms < 1e-4, name
