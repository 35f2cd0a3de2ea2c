"""`TELayerNormColumnParallelLinear` and `TERowParallelLinear`, configured as Megatron-LM configures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from overlap_sweep.backends.transformer_engine.silent_group import SilentGroup
from overlap_sweep.backends.transformer_engine.switches import MEGATRON_NAMES, Switches
from overlap_sweep.overlap.models import LinearShape


def megatron_module(
    point: Mapping[str, Any], shape: LinearShape, group: dist.ProcessGroup | None, switches: Switches
) -> tuple[torch.nn.Module, Callable[..., Tensor]]:
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
    return SilentGroup(0, 1)
