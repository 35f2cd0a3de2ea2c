"""Megatron-Core: the config of its layers, and what its transformer layer with a mixture of experts needs, spread over
expert-parallel ranks: with Transformer Engine's modules on GPUs, with its own on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_sweep.backends import lacks_precision
from overlap_sweep.backends.installed import unusable
from overlap_sweep.config import ResolvedModel, TensorParallelPoint

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

PRECISIONS = ("fp32", "fp16", "bf16")
Arguments = dict[str, bool | int | str]
"""Arguments of Megatron-Core's `TransformerConfig`."""


def refusal(point: TensorParallelPoint) -> str | None:
    """Returns why no layer of the point can be built here, or None."""
    on_gpu = point.runtime.device == "cuda"
    lacking = (unusable() if on_gpu else None) or unusable("megatron.core")
    return lacking or lacks_precision(point, PRECISIONS)


def transformer_config(model: ResolvedModel, precision: str, tp_size: int, **given: object) -> TransformerConfig:
    """Returns the config of one layer of the model in one of PRECISIONS. `given`: its other arguments."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from overlap_sweep.measure import DTYPES

    return TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        normalization=model.normalization,
        params_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        tensor_model_parallel_size=tp_size,
        sequence_parallel=tp_size > 1,
        **given,
    )
