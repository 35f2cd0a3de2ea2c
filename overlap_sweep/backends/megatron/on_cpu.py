"""Megatron-Core's layers on a CPU, where they ask for CUDA's device, streams and events.

A CPU does everything at once, so its streams are nothing but names: events have always happened. What is on the stream
of communication runs in a thread instead (`schedule.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class _Event:
    """Stands for an event and for a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self) -> _Event:
        return self

    def record(self, *_: Any) -> None:
        pass

    wait = wait_stream = synchronize = record


_STREAM = _Event()
_PLACES: list[tuple[Any, dict[str, Any]]] = [
    (
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "current_stream": lambda *_: _STREAM,
            "stream": lambda _: nullcontext(),
            "Stream": _Event,
            "Event": _Event,
        },
    ),
    (torch.cuda.nvtx, {"range_push": lambda _: None, "range_pop": lambda: None}),
    (Tensor, {"record_stream": lambda *_: None}),
    # Without Transformer Engine 0.16 does not define it; with it, it is a kernel for GPUs.
    (moe_utils, {"te_general_gemm": None}),
    # Numbers of tokens are on the CPU already, but as a tensor, which torch.distributed does not take.
    (token_dispatcher, {"maybe_move_tensor_to_cpu": lambda found, as_numpy=False, **_: _listed(found, as_numpy)}),
]


def _listed(found: Any, as_numpy: bool) -> Any:
    return found.numpy() if as_numpy and isinstance(found, Tensor) else found


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Makes this process's CPU stand for a GPU."""
    with ExitStack() as stack:
        for place, instead in _PLACES:
            stack.enter_context(patch.multiple(place, **instead, create=True))
        yield


class Norm:
    """Makes torch's norm, which Megatron-Core does not take with sequence parallelism: on GPUs the norms' gradients are
    then summed over the ranks at the end of a step."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        return (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps)


class Attention(MegatronModule):
    """torch's causal attention in the place of Megatron-Core's, which stores all scores."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)
