"""Transformer Engine's layers, whole and in parts, with the overlaps that the switches name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import Tensor

from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.backends.transformer_engine import userbuffers
from overlap_sweep.backends.transformer_engine.precision import autocast, calibrate, freeze, kept_apart
from overlap_sweep.backends.transformer_engine.silent_group import SilentGroup
from overlap_sweep.backends.transformer_engine.switches import MEGATRON_NAMES
from overlap_sweep.backends.transformer_engine.userbuffers import Userbuffers
from overlap_sweep.measure.ranks import Ranks, parallel_groups
from overlap_sweep.overlap.models import LinearShape, linear_shape
from overlap_sweep.overlap.overlap_cfg import OverlapConfig


def build_layer(
    point: Mapping[str, Any], purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int
) -> ParallelLayer:
    """The layer of `point["layer"]["kind"]` with its userbuffers, precision and group. Collective."""
    tp_size, precision, training = point["tp_size"], point["precision"], point["layer"]["training"]
    prepare = _prepare(point, config)
    # A layer looks for its buffers when it is made.
    prepare()
    group, _ = parallel_groups(tp_size, ranks.world_size)
    if purpose == "floor":
        group = SilentGroup(ranks.rank % tp_size, tp_size)
    torch.manual_seed(seed)
    module, input_shape = _module(point, group, config.switches)
    # Training updates the scales in every step; without it they are frozen once found.
    select_scales = kept_apart() if training else None

    def forward(layer: torch.nn.Module, x: Tensor, first: bool) -> Tensor:
        if select_scales:
            select_scales()
        with autocast(precision, group):
            # FP8 weights are quantised in the first of several calls, which later ones use again.
            output = layer(x, is_first_microbatch=first)
        return output[0] if isinstance(output, tuple) else output

    def calibrate_layer(step: Callable[[], object]) -> None:
        calibrate(precision, step)
        if not training:
            freeze()

    return ParallelLayer(module, forward, input_shape, prepare, calibrate_layer)


def _prepare(point: Mapping[str, Any], config: OverlapConfig) -> Callable[[], None]:
    """Before each of the variant's turns: initialise the userbuffers anew.

    Those that overlap nothing do it too, though they use none of it: the pause lets the GPU cool and its clocks rise,
    and must be the same for all.
    """
    wanted = Userbuffers.of(point, config.slots)

    def prepare() -> None:
        if point["tp_size"] > 1:
            userbuffers.destroy()
            userbuffers.initialize(wanted)

    return prepare


def _module(
    point: Mapping[str, Any], group: dist.ProcessGroup | None, switches: Mapping[str, bool]
) -> tuple[torch.nn.Module, tuple[int, int, int]]:
    """The layer and its input's shape on this rank, [sequence, batch, features].

    `switches` are Megatron-Core's names; none at all builds a layer that does not overlap.
    """
    kind, batch = point["layer"]["kind"], point["layer"]["micro_batch_size"]
    module = _MAKERS[kind](point, _common_arguments(point, group), te_switches(switches))
    if switches.get("tp_comm_overlap_disable_qkv"):
        _disable_qkv(module, switches)
    # Every layer but the bare row-parallel linear begins with a column-parallel operator.
    rows, features = _shape(point, "proj" if kind == "linear" else "qkv").input_shape
    return module, (rows // batch, batch, features)


def te_switches(switches: Mapping[str, bool]) -> dict[str, bool]:
    """Transformer Engine's arguments for Megatron-Core's switches."""
    on = switches.get("tp_comm_overlap", False)
    return {ours: on and switches[theirs] for ours, theirs in MEGATRON_NAMES.items()}


def _common_arguments(point: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    parallel = point["tp_size"] > 1
    return {
        "params_dtype": torch.bfloat16,
        "tp_group": group if parallel else None,
        "tp_size": point["tp_size"],
        "sequence_parallel": parallel,
        "bias": point["model"]["bias"],
        "init_method": _initializer(point["model"]["hidden_size"]),
    }


def _initializer(hidden_size: int) -> Callable[[Tensor], Tensor]:
    """Keeps activations at about 1 whatever the model's width.

    The library's fixed deviation makes the attention of wide models all but one-hot, where the last bit of a sum
    decides, and nothing could be compared.
    """
    return lambda weight: torch.nn.init.normal_(weight, std=hidden_size**-0.5)


def _shape(point: Mapping[str, Any], operator: str) -> LinearShape:
    return linear_shape(point["model"], operator, point["workload"]["tokens"], point["tp_size"])


def _linear(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    """The attention's output projection."""
    shape = _shape(point, "proj")
    own = {name: on[name] for name in ("ub_overlap_ag", "ub_overlap_rs")}
    return te.Linear(shape.in_features, shape.out_features, parallel_mode="row", ub_name="proj", **common, **own)


def _layernorm_linear(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    """The projection to queries, keys and values."""
    shape = _shape(point, "qkv")
    own = {name: value for name, value in on.items() if name != "ub_overlap_rs"}
    return te.LayerNormLinear(
        shape.in_features,
        shape.out_features,
        parallel_mode="column",
        normalization=point["model"]["normalization"],
        ub_name="qkv",
        **common,
        **own,
    )


def _layernorm_mlp(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    model = point["model"]
    return te.LayerNormMLP(
        model["hidden_size"],
        model["ffn_hidden_size"],
        activation=_activation(model),
        **_block_arguments(point),
        **common,
        **on,
    )


def _multihead_attention(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    return te.MultiheadAttention(
        point["model"]["hidden_size"],
        point["model"]["num_attention_heads"],
        input_layernorm=True,
        attn_mask_type="causal",
        **_attention_arguments(point),
        **_block_arguments(point),
        **common,
        **on,
    )


def _transformer_layer(point: Mapping[str, Any], common: dict[str, Any], on: dict[str, bool]) -> torch.nn.Module:
    model = point["model"]
    return te.TransformerLayer(
        model["hidden_size"],
        model["ffn_hidden_size"],
        model["num_attention_heads"],
        hidden_dropout=0.0,
        self_attn_mask_type="causal",
        activation=_activation(model),
        ub_tp_comm_overlap=any(on.values()),
        **_attention_arguments(point),
        **_block_arguments(point),
        **common,
        **on,
    )


def _block_arguments(point: Mapping[str, Any]) -> dict[str, Any]:
    """Of layers that hold a column-parallel and a row-parallel linear."""
    batch = point["layer"]["micro_batch_size"]
    return {
        "normalization": point["model"]["normalization"],
        "output_layer_init_method": _initializer(point["model"]["hidden_size"]),
        "set_parallel_mode": True,
        "seq_length": point["workload"]["tokens"] // batch,
        "micro_batch_size": batch,
    }


def _attention_arguments(point: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_gqa_groups": point["model"]["num_kv_heads"],
        "kv_channels": point["model"]["head_dim"],
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
    }


def _activation(model: Mapping[str, Any]) -> str:
    return "swiglu" if model["gated_mlp"] else "gelu"


_MAKERS: dict[str, Callable[[Mapping[str, Any], dict[str, Any], dict[str, bool]], torch.nn.Module]] = {
    "linear": _linear,
    "layernorm_linear": _layernorm_linear,
    "layernorm_mlp": _layernorm_mlp,
    "multihead_attention": _multihead_attention,
    "transformer_layer": _transformer_layer,
}


def _disable_qkv(module: torch.nn.Module, switches: Mapping[str, bool]) -> None:
    """tp_comm_overlap_disable_qkv, which Megatron-Core gives to that one linear and te's layers have no argument for:
    what is pipelined with its own GEMMs is off, the bulk overlaps are as their own switches say."""
    for part in module.modules():
        if isinstance(part, te.LayerNormLinear):
            part.ub_overlap_ag_fprop = False
            part.ub_overlap_rs_dgrad = False
            part.ub_bulk_dgrad = te_switches(switches)["ub_bulk_dgrad"]
            part.ub_bulk_wgrad = te_switches(switches)["ub_bulk_wgrad"]
