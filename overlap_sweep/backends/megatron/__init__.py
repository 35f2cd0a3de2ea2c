"""Megatron-Core's transformer layer with a mixture of experts, spread over expert-parallel ranks: with Transformer
Engine's modules on GPUs, with its own on a CPU."""

from overlap_sweep.backends import lacks_precision, transformer_engine
from overlap_sweep.config import TensorParallelPoint

PRECISIONS = ("fp32", "fp16", "bf16")
Arguments = dict[str, bool | int | str]
"""Arguments of Megatron-Core's `TransformerConfig`."""


def refusal(point: TensorParallelPoint) -> str | None:
    """Returns why no layer of the point can be built here, or None."""
    on_gpu = point.runtime.device == "cuda"
    lacking = (transformer_engine.unusable() if on_gpu else None) or transformer_engine.unusable("megatron.core")
    return lacking or lacks_precision(point, PRECISIONS)
