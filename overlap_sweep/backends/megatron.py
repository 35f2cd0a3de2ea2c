"""Megatron-Core's parallel linear layers with `tp_comm_overlap`: the modules that Megatron-LM trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import ParallelLinear, Purpose
from overlap_sweep.backends.transformer_engine import (
    MEGATRON_NAMES,
    Switches,
    close,
    default_knobs,
    has_default,
    knobs,
    missing,
    parameter_shapes,
    prepare,
    userbuffers_refusal,
)
from overlap_sweep.overlap.models import LinearShape

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from overlap_sweep.measure.ranks import Ranks

__all__ = ["build", "close", "default_knobs", "has_default", "knobs", "parameter_shapes", "prepare", "refusal"]


def refusal(point: Mapping[str, Any]) -> str | None:
    return missing() or missing("megatron.core") or userbuffers_refusal(point)


def build(point: Mapping[str, Any], purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]) -> ParallelLinear:
    from overlap_sweep.backends.transformer_engine import modules

    return modules.build(point, purpose, ranks, parameters, megatron_module)


def megatron_module(
    point: Mapping[str, Any], shape: LinearShape, group: dist.ProcessGroup | None, switches: Switches
) -> tuple[torch.nn.Module, Callable[..., Tensor]]:
    """`TELayerNormColumnParallelLinear` or `TERowParallelLinear`, configured as Megatron-LM configures them."""
    import torch
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = point["model"]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["ffn_hidden_size"],
        num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_kv_heads"],
        kv_channels=model["head_dim"],
        normalization=model["normalization"],
        add_bias_linear=model["bias"],
        params_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=shape.tp_size,
        sequence_parallel=shape.tp_size > 1,
        tp_comm_overlap=any(switches.values()),
        **{MEGATRON_NAMES[name]: on for name, on in switches.items()},
    )
    arguments: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.zeros_,
        "bias": model["bias"],
        "skip_bias_add": False,
        "is_expert": False,
        "tp_comm_buffer_name": point["operator"],
        "tp_group": group or _alone(),
    }
    if shape.parallel == "column":
        make, arguments["gather_output"] = TELayerNormColumnParallelLinear, False
    else:
        make, arguments["input_is_parallel"] = TERowParallelLinear, True
    module = make(shape.in_features, shape.out_features, **arguments)

    def forward(x: Tensor, first: bool) -> Tensor:
        module.is_first_microbatch = first
        output, _bias = module(x)
        return output

    return module, forward


@cache
def _alone() -> dist.ProcessGroup:
    """A group of this rank only: Megatron-Core asks for one at TP=1 too."""
    from overlap_sweep.backends.torch.communicator import SilentGroup

    return SilentGroup(0, 1)
