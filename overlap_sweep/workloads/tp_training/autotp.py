"""DeepSpeed's AutoTP with ZeRO 0 to 2: tensor parallelism cut into a Hugging Face model.

What DeepSpeed (0.19) does not do alone, and is done here:

- Its float32 weights are copies of those in the training dtype. Here they are drawn in float32, as everywhere else.
- Without ZeRO, in float16 and bfloat16, its optimizer takes a step with zero gradients when it is made, does not scale
  the loss in float16, and counts only the first tensor-parallel rank's part of cut parameters in the gradients' norm;
  in float32 the norm cannot be asked for.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap_sweep.errors import Refused
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.workloads.tp_training.hugging_face import (
    build_on_meta,
    decoder_layers,
    restore_buffers,
    share_vocabulary,
    tie_weights,
)
from overlap_sweep.workloads.tp_training.implementation import Facts, Groups
from overlap_sweep.workloads.tp_training.inputs import initial_weights
from overlap_sweep.workloads.tp_training.language_model import Architecture, architecture
from overlap_sweep.workloads.tp_training.vocab_parallel import summed, vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from overlap_sweep.workloads.tp_training.implementation import Implementation

INITIAL_LOSS_SCALE = 2**16
LOSS_SCALE_WINDOW = 2000
_EPSILON = 1e-6
"""What gradients' norms are clipped with, as DeepSpeed and PyTorch do."""
_CUT = "tensor_model_parallel"
"""The attribute by which DeepSpeed knows parameters, and gradients, of which each rank has another part."""


def build(point: Mapping[str, Any], ranks: Ranks, groups: Groups) -> Implementation:
    """The model as DeepSpeed trains it. Refused where DeepSpeed would compute something else than the others."""
    training = point["tp_training"]
    if training["autocast"] and training["dtype"] == "float16" and training["zero_stage"]:
        raise Refused(
            "with ZeRO and autocast DeepSpeed clips float16's gradients with the loss scale in them: use "
            "tp_training.zero_stage=0, or tp_training.dtype=bfloat16"
        )
    deepspeed = _deepspeed(ranks.device)
    _use_groups(groups)
    try:
        return _AutoTp(point, ranks, groups, deepspeed)
    except BaseException:
        _forget_state()
        raise


class _AutoTp:
    def __init__(self, point: Mapping[str, Any], ranks: Ranks, groups: Groups, deepspeed: Any) -> None:
        self._groups, self._training = groups, point["tp_training"]
        self._vocab_size = point["language_model"]["vocab_size"]
        parts = architecture(point["language_model"]["model_type"])
        model = _build_model(point, parts, ranks, groups)
        deepspeed.tp_model_init(model, tp_size=groups.tp_size, dtype=_parameter_dtype(self._training))
        from deepspeed.utils import groups as mpu

        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=lambda parameters: _adamw(parameters, self._training, ranks.device),
            config=_config(self._training, parts, groups),
            mpu=mpu,
        )
        self._engine = engine
        # It sends the first batch to the other ranks as objects, to compare it with theirs.
        if hasattr(engine, "first_dataloader_check"):
            engine.first_dataloader_check.remove()
        self._cut = _mark_cut_parameters(model, parts, self._training["vocab_parallel"])
        _draw_weights(point, ranks, groups, engine, self._cut)
        if groups.tp_size > 1:
            # Each rank has them whole but uses them for its own heads, and AutoTP leaves each its own gradient.
            for _, layer in _layers(model, parts):
                for name in parts.head_norms:
                    layer.get_parameter(f"{name}.weight").register_hook(partial(summed, group=groups.tp))
        if self._training["activation_checkpointing"]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self._training["compile"]:
            # What other points of the process have compiled would decide whether these are.
            torch._dynamo.reset()
            for layer in decoder_layers(model, parts):
                layer.compile()

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        logits = self._engine(input_ids=tokens, use_cache=False).logits
        group = self._groups.tp if self._training["vocab_parallel"] else None
        return vocab_parallel_cross_entropy(logits, labels, self._vocab_size, group)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.backward(loss * self._unapplied_loss_scale())
        if not last:
            # Counts micro batches.
            self._engine.step()

    def update(self) -> Tensor:
        norm = self._update()
        # DeepSpeed says -1 for a norm that is not finite.
        return torch.where(norm < 0, torch.inf, norm)

    def _update(self) -> Tensor:
        if self._engine.zero_optimization():
            self._engine.step()
            return self._as_scalar(self._engine.get_global_grad_norm())
        parameters = self._parameters()
        if self._holds_masters():
            scale = self._engine.optimizer.loss_scale_config.cur_scale
            for name, parameter in parameters.items():
                if name in self._cut:
                    setattr(parameter.grad, _CUT, True)
            self._engine.step()
            return self._as_scalar(self._engine.optimizer._global_grad_norm) / scale
        norm = self._clip(parameters)
        self._engine.step()
        return norm

    def _clip(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """By the norm over all ranks, each parameter counted once. Returns it."""
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        counted = [gradient for name, gradient in gradients.items() if name in self._cut or self._groups.tp_rank == 0]
        square = torch.nn.utils.get_total_norm(counted).float().square()
        dist.all_reduce(square, group=self._groups.tp)
        scaled_norm = square.sqrt()
        scaler = self._engine.torch_autocast_z0_gradscaler
        scale = torch.ones_like(scaled_norm) if scaler is None else scaler.scale(torch.ones_like(scaled_norm))
        norm = scaled_norm / scale
        limit = self._training["max_grad_norm"]
        coefficient = (limit / (norm + _EPSILON)).clamp(max=1.0) if limit else torch.ones_like(norm)
        if scaler is not None:
            # A rank's scaler sees this rank's gradients only, but all ranks must leave out the same steps.
            coefficient = torch.where(norm.isfinite(), coefficient, torch.nan)
        if limit or scaler is not None:
            torch._foreach_mul_(list(gradients.values()), coefficient)
        return norm

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._engine.module.named_parameters())

    def _as_scalar(self, norm: Any) -> Tensor:
        return torch.as_tensor(norm, dtype=torch.float32, device=self._engine.device).reshape(())

    def _holds_masters(self) -> bool:
        """DeepSpeed's optimizer without ZeRO in half precision."""
        return hasattr(self._engine.optimizer, "loss_scale_config")

    def _unapplied_loss_scale(self) -> float:
        """The engine scales the loss of all other optimizers."""
        return float(self._engine.optimizer.loss_scale_config.cur_scale) if self._holds_masters() else 1.0

    def facts(self) -> Facts:
        optimizer = type(self._engine.optimizer).__name__
        return Facts({"attention": self._training["attn_impl"], "optimizer": optimizer})

    def close(self) -> None:
        self._engine.destroy()
        del self._engine
        if self._training["compile"]:
            torch._dynamo.reset()
        _forget_state()


def _deepspeed(device: torch.device) -> Any:
    """The module, which decides when it is first imported what it computes on."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        # Collectives through shared memory would be compiled at start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _use_groups(groups: Groups) -> None:
    """Instead of groups that DeepSpeed would make anew for each model, and for the first one's size only."""
    from deepspeed.utils import groups as state

    state._TENSOR_MODEL_PARALLEL_GROUP = groups.tp
    state._MODEL_PARALLEL_GROUP = groups.tp
    state._DATA_PARALLEL_GROUP = groups.dp


def _forget_state() -> None:
    """What DeepSpeed keeps of a model in its modules: the next one may have another size and dtype."""
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups as state

    init_utils._TP_MODEL_INIT_ARGS = None
    set_autotp_mode(training=False)
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
    state._TENSOR_MODEL_PARALLEL_GROUP = None
    state._MODEL_PARALLEL_GROUP = None
    state._DATA_PARALLEL_GROUP = None
    state.mpu = None


def _build_model(point: Mapping[str, Any], parts: Architecture, ranks: Ranks, groups: Groups) -> Any:
    """Whole but for its vocabulary, on the host: memory that is never written to is never taken there, and AutoTP moves
    only its parts to the device. The weights are drawn when it is cut."""
    training = point["tp_training"]
    model = build_on_meta(point)
    if training["vocab_parallel"]:
        share_vocabulary(model, parts, point["language_model"]["vocab_size"], groups.tp)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(_parameter_dtype(training))
    model.to_empty(device="cpu")
    # Each module has been given an empty weight of its own.
    tie_weights(model, parts)
    restore_buffers(model, parts, ranks.device)
    return model


def _parameter_dtype(training: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = torch.float32 if training["autocast"] else getattr(torch, training["dtype"])
    return dtype


def _config(training: Mapping[str, Any], parts: Architecture, groups: Groups) -> dict[str, Any]:
    """DeepSpeed's. What is left out is its default."""
    dtype = _parameter_dtype(training)
    # Without ZeRO we clip float32's gradients.
    own_clipping = training["zero_stage"] == 0 and dtype == torch.float32
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training["batch_size"],
        "gradient_accumulation_steps": training["gradient_accumulation_steps"],
        "gradient_clipping": 0.0 if own_clipping else training["max_grad_norm"],
        "zero_optimization": {"stage": training["zero_stage"]},
        "tensor_parallel": {"autotp_size": groups.tp_size, "partition_config": _partition(parts)},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {
            "enabled": dtype == torch.float16,
            "initial_scale_power": INITIAL_LOSS_SCALE.bit_length() - 1,
            "loss_scale_window": LOSS_SCALE_WINDOW,
            "hysteresis": 1,
        },
        "steps_per_print": None,
        # It would wait for the device.
        "timers": {"throughput": {"enabled": False}},
    }
    if training["autocast"] and training["dtype"] != "float32":
        config["torch_autocast"] = {"enabled": True, "dtype": training["dtype"]}
    return config


def _partition(parts: Architecture) -> dict[str, Any]:
    """Everything else stays whole: DeepSpeed's own plans would cut the vocabulary, too."""
    kinds = {"column": parts.column_parallel, "row": parts.row_parallel}
    specs = [
        {"patterns": [rf".*\.{re.escape(name)}\.weight$" for name in names], "partition_type": kind}
        for kind, names in kinds.items()
    ]
    return {"use_default_specs": False, "layer_specs": specs}


def _adamw(parameters: Sequence[Tensor], training: Mapping[str, Any], device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=training["learning_rate"],
        weight_decay=training["weight_decay"],
        fused=device.type == "cuda",
    )


def _mark_cut_parameters(model: nn.Module, parts: Architecture, vocab_parallel: bool) -> dict[str, int]:
    """The dimension along which each parameter is cut that is, by its name; DeepSpeed learns of all of them."""
    modules = dict.fromkeys(parts.column_parallel, 0) | dict.fromkeys(parts.row_parallel, 1)
    cut = {
        f"{prefix}.{name}.weight": dimension
        for prefix, _ in _layers(model, parts)
        for name, dimension in modules.items()
    }
    cut |= {f"{prefix}.{name}.bias": 0 for prefix, _ in _layers(model, parts) for name in parts.column_parallel}
    if vocab_parallel:
        cut |= {f"{parts.embedding}.weight": 0, f"{parts.output}.weight": 0}
    there = dict(model.named_parameters())
    for name in cut.keys() & there.keys():
        setattr(there[name], _CUT, True)
    return {name: dimension for name, dimension in cut.items() if name in there}


def _layers(model: nn.Module, parts: Architecture) -> Iterator[tuple[str, nn.Module]]:
    for index, layer in enumerate(decoder_layers(model, parts)):
        yield f"{parts.layers}.{index}", layer


def _draw_weights(point: Mapping[str, Any], ranks: Ranks, groups: Groups, engine: Any, cut: Mapping[str, int]) -> None:
    """Into the model, and in float32 into the weights that DeepSpeed's optimizer steps."""
    from deepspeed.utils import safe_set_full_fp32_param

    draw = initial_weights(point, ranks)
    masters = dict(_own_masters(engine.optimizer))
    for name, parameter in engine.module.named_parameters():
        shape = list(parameter.shape)
        if name in cut:
            shape[cut[name]] *= groups.tp_size
        weight = draw(name, shape)
        if name in cut:
            weight = weight.chunk(groups.tp_size, dim=cut[name])[groups.tp_rank]
        assert weight.shape == parameter.shape
        parameter.data.copy_(weight)
        if parameter in masters:
            masters[parameter].data.copy_(weight)
        safe_set_full_fp32_param(parameter, weight)
    # Of a step that DeepSpeed took to make it.
    engine.basic_optimizer.state.clear()


def _own_masters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameter and float32 weight, of DeepSpeed's optimizer without ZeRO in half precision."""
    if hasattr(optimizer, "loss_scale_config"):
        for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            yield from zip(halves, masters, strict=True)
