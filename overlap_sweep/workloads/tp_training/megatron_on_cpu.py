"""What Megatron-Core needs to be told where there is no GPU. Nothing of it is used on one.

Megatron-Core names the device `cuda` by itself: tensors for a norm or a loss scale, the types that it knows parameters
of, the states of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import megatron.core.optimizer as optimizers
import torch
from megatron.core import utils
from megatron.core.fusions import fused_softmax
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_STANDS_FOR: list[tuple[Any, str, Any]] = [
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (random, "_get_cuda_rng_state", lambda *_, **__: None),
    (random, "_set_cuda_rng_state", lambda *_, **__: None),
    # Made in a backward, too, where layers are checkpointed; modes are off in there.
    (fused_softmax, "get_default_causal_mask", lambda length: torch.ones(length, length, dtype=torch.bool).triu(1)),
    # Those of Transformer Engine, where it is installed, are kernels.
    (optimizers, "USING_PYTORCH_OPTIMIZER", True),
    (optimizer, "multi_tensor_applier", utils.local_multi_tensor_applier),
    (optimizer, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
    (clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier),
    (clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale),
    (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
]


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Around everything that Megatron-Core does."""
    with ExitStack() as stack:
        for place, name, stand_in in _STANDS_FOR:
            stack.enter_context(patch.object(place, name, stand_in))
        stack.enter_context(_CpuForCuda())
        yield


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on `cuda` are made on the CPU, and one there says that it is a `torch.cuda.FloatTensor`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        result = func(*args, **given)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class RmsNorm(nn.RMSNorm):
    """In the place of Megatron-Core's own, which knows no sequence parallelism: its gradient, of a part of the sequence
    on each rank, is marked to be summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
