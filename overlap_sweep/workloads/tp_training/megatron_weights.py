"""The initial weights, drawn by their Hugging Face names, as one tensor-parallel rank of Megatron-Core's GPTModel holds
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_sweep.workloads.tp_training.architectures.architecture import Architecture
from overlap_sweep.workloads.tp_training.initial_weights import padded_vocab_size

_NORMS_ALONE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""What Transformer Engine's layers call the norm before them, which they have in them, and Megatron-Core's own."""


@dataclass(frozen=True)
class MegatronWeights:
    """`draw` is what `initial_weights` returns; `model` the point's language_model."""

    draw: Callable[[str, Sequence[int]], Tensor]
    architecture: Architecture
    model: Mapping[str, Any]
    tp_rank: int
    tp_size: int

    def parts(self, fused_norms: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every parameter, by its name in GPTModel, float32. `fused_norms`: the layers are
        Transformer Engine's."""
        yield "embedding.word_embeddings.weight", self._of_vocabulary(self.architecture.embedding)
        for index in range(self.model["num_hidden_layers"]):
            for name, part in self._layer(f"{self.architecture.layers}.{index}."):
                alone = name if fused_norms else _NORMS_ALONE.get(name, name)
                yield f"decoder.layers.{index}.{alone}", part
        yield "decoder.final_layernorm.weight", self._norm(self.architecture.final_norm, self.model["hidden_size"])
        if not self.model["tie_word_embeddings"]:
            yield "output_layer.weight", self._of_vocabulary(self.architecture.output)

    def _layer(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        model = self.model
        hidden, ffn, head_dim = model["hidden_size"], model["intermediate_size"], model["head_dim"]
        attention = model["num_attention_heads"] * head_dim
        before_attention, before_mlp = self.architecture.layer_norms
        yield "self_attention.linear_qkv.layer_norm_weight", self._norm(layer + before_attention, hidden)
        yield "self_attention.linear_qkv.weight", self._qkv(layer, "weight", (hidden,))
        if self.architecture.qkv_bias:
            yield "self_attention.linear_qkv.bias", self._qkv(layer, "bias", ())
        for norm, name in zip(self.architecture.head_norms, ("q_layernorm", "k_layernorm"), strict=False):
            yield f"self_attention.{name}.weight", self._norm(layer + norm, head_dim)
        output = self.draw(f"{layer}self_attn.o_proj.weight", (hidden, attention))
        yield "self_attention.linear_proj.weight", self._cut(output, dim=1)
        yield "mlp.linear_fc1.layer_norm_weight", self._norm(layer + before_mlp, hidden)
        # Each rank has its own columns of both, one behind the other.
        gate_up = (self.draw(f"{layer}mlp.{name}.weight", (ffn, hidden)) for name in ("gate_proj", "up_proj"))
        yield "mlp.linear_fc1.weight", torch.cat([self._cut(weight) for weight in gate_up])
        yield "mlp.linear_fc2.weight", self._cut(self.draw(f"{layer}mlp.down_proj.weight", (hidden, ffn)), dim=1)

    def _qkv(self, layer: str, kind: str, columns: tuple[int, ...]) -> Tensor:
        """Of each group of heads with one key: its queries, its key, its value."""
        groups, head_dim = self.model["num_key_value_heads"], self.model["head_dim"]
        heads = {"q_proj": self.model["num_attention_heads"], "k_proj": groups, "v_proj": groups}
        grouped = [
            self.draw(f"{layer}self_attn.{name}.{kind}", (count * head_dim, *columns)).view(groups, -1, *columns)
            for name, count in heads.items()
        ]
        return self._cut(torch.cat(grouped, dim=1)).flatten(0, 1)

    def _of_vocabulary(self, name: str) -> Tensor:
        rows = padded_vocab_size(self.model["vocab_size"], self.tp_size)
        return self._cut(self.draw(f"{name}.weight", (rows, self.model["hidden_size"])))

    def _norm(self, name: str, size: int) -> Tensor:
        return self.draw(f"{name}.weight", (size,))

    def _cut(self, weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(self.tp_size, dim)[self.tp_rank]
