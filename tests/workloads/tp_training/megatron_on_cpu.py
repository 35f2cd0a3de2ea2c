"""Megatron-Core on a CPU, which it trains on GPUs alone: its own layers instead of Transformer Engine's."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import megatron.core.optimizer as optimizers
import torch
from megatron.core import utils
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overlap_sweep.backends import installed
from overlap_sweep.workloads.tp_training import megatron


class RmsNorm(nn.RMSNorm):
    """In the place of Megatron-Core's own, which knows no sequence parallelism: its gradient, of a part of the sequence
    on each rank, is marked to be summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _without_fusions(**options: Any) -> TransformerConfig:
    """Those are kernels."""
    fusions = ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion")
    return TransformerConfig(**{**options, **dict.fromkeys(fusions, False)})


def _with_own_layers(config: TransformerConfig, _layers: Any, **options: Any) -> nn.Module:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return GPTModel(config, TransformerBlockSubmodules([layer] * config.num_layers, RmsNorm), **options)


def _parts_of_own_layers(*given: Any) -> Iterator[tuple[str, Tensor]]:
    """Transformer Engine has the norms before linears in these."""
    names = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
    for name, part in _initial_parts(*given):
        for linear, norm in names.items():
            name = name.replace(f"{linear}.layer_norm_weight", f"{norm}.weight")
        yield name, part


_initial_parts = megatron.initial_parts
_STANDS_FOR: list[tuple[Any, str, Any]] = [
    (megatron, "TransformerConfig", _without_fusions),
    (megatron, "GPTModel", _with_own_layers),
    (megatron, "get_gpt_layer_with_transformer_engine_spec", lambda **_: None),
    (megatron, "initial_parts", _parts_of_own_layers),
    (installed, "attention_backend", lambda: "Megatron-Core's own"),
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "current_stream", torch.cpu.current_stream),
    # Without CUDA there are no states of its random numbers to keep apart, and nothing here is random.
    (
        random,
        "model_parallel_cuda_manual_seed",
        partial(random.model_parallel_cuda_manual_seed, inference_rng_tracker=True),
    ),
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


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on `cuda` are made on the CPU, and one there says that it is a `torch.cuda.FloatTensor`:
    Megatron-Core names the device by itself for tensors of a norm or a loss scale, and knows parameters by that."""

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


@cache
def stand_in() -> _CpuForCuda:
    """Have Megatron-Core use this process's CPU, once and from now on."""
    for place, name, instead in _STANDS_FOR:
        setattr(place, name, instead)
    mode = _CpuForCuda()
    mode.__enter__()
    return mode
