"""Megatron-Core's GPTModel as Megatron-LM configures it for a Hugging Face architecture, and the initial weights, drawn
by their Hugging Face names, as one tensor-parallel rank of it holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.workloads.tp_training import overlaps
from overlap_sweep.workloads.tp_training.inputs import initial_weights, padded_vocab_size
from overlap_sweep.workloads.tp_training.language_model import architecture
from overlap_sweep.workloads.tp_training.megatron_on_cpu import RmsNorm

_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def transformer_config(point: Mapping[str, Any]) -> TransformerConfig:
    """Of the layers. Fusions of Megatron-Core's are on where they are kernels, on a GPU."""
    model, training, precision = point["language_model"], point["tp_training"], point["precision"]
    has, on_gpu = architecture(model["model_type"]), point["runtime"]["device"] == "cuda"
    given = point.get("overlap_cfg")
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model["num_hidden_layers"],
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["intermediate_size"],
        num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_key_value_heads"],
        kv_channels=model["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=model["rms_norm_eps"],
        qk_layernorm=bool(has.head_norms),
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=has.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=on_gpu,
        # It returns its gradient in bfloat16, whatever the logits are in.
        cross_entropy_loss_fusion=on_gpu and precision == "bf16",
        params_dtype=_DTYPE[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # The weights are drawn as for all implementations. With perform_initialization=False Megatron-Core would not
        # mark them as cut, either, and leave those of all ranks but the first out of the norm of the gradients.
        init_method=_left_alone,
        output_layer_init_method=_left_alone,
        embedding_init_method=_left_alone,
        tensor_model_parallel_size=point["tp_size"],
        sequence_parallel=training["sequence_parallel"],
        **(recompute if training["activation_checkpointing"] else {}),
        **({"tp_comm_overlap": True, **(given["switches"] if given else {})} if overlaps(point) else {}),
    )


def _left_alone(weight: Tensor) -> Tensor:
    return weight


def build_model(point: Mapping[str, Any], config: TransformerConfig, tp_rank: int) -> GPTModel:
    """This rank's part, its weights not yet drawn. With labels it returns losses [batch, sequence], float32. Its layers
    are Transformer Engine's, on a CPU Megatron-Core's own. Parallel state must be initialised, and userbuffers, where
    layers use them."""
    model, tp_size = point["language_model"], point["tp_size"]
    rows = padded_vocab_size(model["vocab_size"], tp_size)
    layers = _transformer_engine_layers if point["runtime"]["device"] == "cuda" else _local_layers
    built = GPTModel(
        config,
        layers(config),
        vocab_size=rows,
        max_sequence_length=point["tp_training"]["seq_length"],
        share_embeddings_and_output_weights=model["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=model["rope_parameters"]["rope_theta"],
    )
    _leave_padding_out(built.output_layer, rows // tp_size, tp_rank, model["vocab_size"])
    # Megatron-Core's own norms are in float32 otherwise.
    return built.to(config.params_dtype)


def _transformer_engine_layers(config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)


def _local_layers(config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return TransformerBlockSubmodules([layer] * config.num_layers, RmsNorm)


def _leave_padding_out(output_layer: nn.Module, rows: int, tp_rank: int, vocab_size: int) -> None:
    """To Megatron-Core's cross-entropy the padding of the vocabulary is tokens like all others."""
    real = max(vocab_size - rows * tp_rank, 0)

    def masked(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        return logits.masked_fill(torch.arange(rows, device=logits.device) >= real, -torch.inf), bias

    if real < rows:
        output_layer.register_forward_hook(masked)


_NORMS_ALONE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""What Transformer Engine's layers call the norm before them, which they have in them, and Megatron-Core's own."""


class MegatronWeights:
    """The initial weights, by GPTModel's names."""

    def __init__(self, point: Mapping[str, Any], ranks: Ranks, tp_rank: int) -> None:
        self.draw = initial_weights(point, ranks)
        self.model = point["language_model"]
        self.architecture = architecture(self.model["model_type"])
        self.tp_rank, self.tp_size = tp_rank, point["tp_size"]

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
