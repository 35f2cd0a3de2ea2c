"""Equal initial weights for every implementation: each parameter is drawn whole, by its Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap_sweep.measure.ranks import Ranks, stream
from overlap_sweep.workloads.tp_training.architectures import architecture

INIT_STD = 0.02


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """So that every tensor-parallel rank has equally many rows, and as many as a GEMM's kernels like."""
    multiple = 8 * tp_size
    return -(-vocab_size // multiple) * multiple


def initial_weights(point: Mapping[str, Any], ranks: Ranks) -> Callable[[str, Sequence[int]], Tensor]:
    """A function of a parameter's Hugging Face name and whole shape (`model.layers.0.self_attn.q_proj.weight`; of the
    embedding and output projection with the vocabulary's padding) that draws it: float32, on the device, the same on
    all ranks and for whoever asks. Norms are one, biases zero, padding zero, all else normal.

    One parameter is whole at a time: whoever asks cuts out its part and lets go of the rest.
    """
    seed, model = point["tp_training"]["seed"], point["language_model"]
    of = architecture(model["model_type"])
    cut_by_tokens = (f"{of.embedding}.weight", f"{of.output}.weight")
    std, vocabulary = model.get("initializer_range", INIT_STD), model["vocab_size"]

    def draw(name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(*shape, device=ranks.device)
        if len(shape) == 1:
            return torch.ones(*shape, device=ranks.device)
        weight = torch.empty(*shape, device=ranks.device)
        of_vocabulary = name in cut_by_tokens
        real = weight[:vocabulary] if of_vocabulary else weight
        # The padding is no part of the draw, which would else depend on the number of ranks.
        real.normal_(std=std, generator=stream(ranks.device, seed, name))
        if of_vocabulary:
            weight[vocabulary:].zero_()
        return weight

    return draw
