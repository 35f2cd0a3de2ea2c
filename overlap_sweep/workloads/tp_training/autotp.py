"""DeepSpeed's AutoTP with ZeRO 0 to 2: tensor parallelism cut into a Hugging Face model.

What DeepSpeed (0.19) does not do alone, and is done here:

- Its float32 weights are copies of those in the training dtype. Here they are drawn in float32, as everywhere else.
- Without ZeRO, in bfloat16, its optimizer takes a step with zero gradients when it is made, and counts only the first
  tensor-parallel rank's part of cut parameters in the gradients' norm; in float32 the norm cannot be asked for.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.tp_training import hugging_face
from overlap_sweep.workloads.tp_training.config import OF_DATA_PARALLEL, Resolved, ResolvedTraining, data_parallel
from overlap_sweep.workloads.tp_training.hugging_face import parameter_dtype
from overlap_sweep.workloads.tp_training.language_model import Architecture, architecture
from overlap_sweep.workloads.tp_training.run import Groups, Implementation, initial_weights

_CUT = "tensor_model_parallel"
"""The attribute by which DeepSpeed knows parameters, and gradients, of which each rank has another part."""


class AutoTp(Implementation):
    """See run.Implementation."""

    def __init__(self, point: Resolved, ranks: Ranks, groups: Groups) -> None:
        deepspeed = _deepspeed(ranks)
        # Instead of groups that DeepSpeed would make anew for each model, and for the first one's size only.
        _set_groups(groups.tp, groups.dp)
        try:
            self._build(point, ranks, groups, deepspeed)
        except BaseException:
            _forget_state()
            raise

    def _build(self, point: Resolved, ranks: Ranks, groups: Groups, deepspeed: Any) -> None:
        from deepspeed.utils import groups as mpu

        self._groups, self._training = groups, point.tp_training
        self._vocab_size = point.trained.vocab_size
        of = architecture(point.trained.model_type)
        model = _build_model(point, of, ranks, groups)
        deepspeed.tp_model_init(model, tp_size=groups.tp_size, dtype=parameter_dtype(self._training))
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=lambda parameters: hugging_face.adamw(parameters, asdict(self._training), ranks.device),
            config=_config(self._training, of, groups),
            mpu=mpu,
        )
        self._engine = engine
        # It sends the first batch to the other ranks as objects, to compare it with theirs.
        if hasattr(engine, "first_dataloader_check"):
            engine.first_dataloader_check.remove()
        self._cut = _cut_dimensions(model, of, self._training.vocab_parallel)
        for name, parameter in model.named_parameters():
            if name in self._cut:
                setattr(parameter, _CUT, True)
            if groups.tp_size > 1 and name.removesuffix(".weight").endswith(of.head_norms):
                # Each rank has it whole but uses it for its own heads, and AutoTP leaves each its own gradient.
                parameter.register_hook(partial(hugging_face.summed, group=groups.tp))
        _draw_weights(point, ranks, groups, engine, self._cut)
        if self._training.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self._training.compile:
            for layer in hugging_face.decoder_layers(model, of):
                layer.compile()

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        logits = self._engine(input_ids=tokens, use_cache=False).logits
        group = self._groups.tp if self._training.vocab_parallel else None
        return hugging_face.vocab_parallel_cross_entropy(logits, labels, self._vocab_size, group)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.backward(loss)
        if not last:
            # Counts micro batches.
            self._engine.step()

    def update(self) -> Tensor:
        if self._engine.zero_optimization():
            self._engine.step()
            norm = self._engine.get_global_grad_norm()
        elif hasattr(self._engine.optimizer, "loss_scale_config"):
            # DeepSpeed's own, in bfloat16.
            for name, parameter in self._engine.module.named_parameters():
                if name in self._cut:
                    setattr(parameter.grad, _CUT, True)
            self._engine.step()
            norm = self._engine.optimizer._global_grad_norm
        else:
            norm = self._clip()
            self._engine.step()
        scalar = torch.as_tensor(norm, dtype=torch.float32, device=self._engine.device).reshape(())
        # DeepSpeed says -1 for a norm that is not finite.
        return torch.where(scalar < 0, torch.inf, scalar)

    def _clip(self) -> Tensor:
        """Clips by the norm over all ranks, each parameter counted once, and returns the norm."""
        gradients = {name: p.grad for name, p in self._engine.module.named_parameters() if p.grad is not None}
        cut = [gradient for name, gradient in gradients.items() if name in self._cut]
        whole = [gradient for name, gradient in gradients.items() if name not in self._cut]
        limit, groups = self._training.max_grad_norm, self._groups
        return hugging_face.clip(cut, whole, limit, groups.tp_size, groups.tp)

    def close(self) -> None:
        self._engine.destroy()
        del self._engine
        if self._training.compile:
            torch._dynamo.reset()
        _forget_state()


def _deepspeed(ranks: Ranks) -> Any:
    """Imports and returns the module, which decides on first import what it computes on."""
    if ranks.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if ranks.device.type == "cpu":
        # Collectives through shared memory would be compiled at start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _set_groups(tp: dist.ProcessGroup | None, dp: dist.ProcessGroup | None) -> None:
    from deepspeed.utils import groups as state

    state._TENSOR_MODEL_PARALLEL_GROUP = state._MODEL_PARALLEL_GROUP = tp
    state._DATA_PARALLEL_GROUP = dp


def _forget_state() -> None:
    """Clears what DeepSpeed keeps of a model in its modules: the next one may have another size and dtype."""
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups as state

    init_utils._TP_MODEL_INIT_ARGS = None
    set_autotp_mode(training=False)
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
    _set_groups(None, None)
    state.mpu = None


def _build_model(point: Resolved, of: Architecture, ranks: Ranks, groups: Groups) -> Any:
    """Returns the model, whole but for its vocabulary, on the host: memory never written to is never taken there, and
    AutoTP moves only its parts to the device. The weights are drawn when it is cut."""
    training = point.tp_training
    model = hugging_face.build_on_meta(point)
    if training.vocab_parallel:
        hugging_face.share_vocabulary(model, of, point.trained, groups.tp)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(parameter_dtype(training))
    model.to_empty(device="cpu")
    # Each module has been given an empty weight of its own.
    hugging_face.tie_weights(model, of, point.trained)
    hugging_face.restore_buffers(model, of, ranks.device)
    return model


def _config(training: ResolvedTraining, of: Architecture, groups: Groups) -> dict[str, object]:
    """Returns DeepSpeed's config. What is left out is at its default."""
    dtype = parameter_dtype(training)
    # Without ZeRO we clip float32's gradients.
    own_clipping = training.zero_stage == 0 and dtype == torch.float32
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_clipping": 0.0 if own_clipping else training.max_grad_norm,
        "zero_optimization": {
            "stage": training.zero_stage,
            **{name: getattr(data_parallel(training, "autotp"), name) for name in OF_DATA_PARALLEL["autotp"]},
        },
        "tensor_parallel": {"autotp_size": groups.tp_size, "partition_config": _partition(of)},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {
            "enabled": dtype == torch.float16,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
        },
        "steps_per_print": None,
        # It would wait for the device.
        "timers": {"throughput": {"enabled": False}},
    }
    if training.autocast and training.dtype != "float32":
        config["torch_autocast"] = {"enabled": True, "dtype": training.dtype}
    return config


def _partition(of: Architecture) -> dict[str, object]:
    """Returns which linears are cut, and nothing else: DeepSpeed's own plans would cut the vocabulary, too."""
    kinds = {"column": of.column_parallel, "row": of.row_parallel}
    specs = [
        {"patterns": [rf".*\.{re.escape(name)}\.weight$" for name in names], "partition_type": kind}
        for kind, names in kinds.items()
    ]
    return {"use_default_specs": False, "layer_specs": specs}


def _cut_dimensions(model: nn.Module, of: Architecture, vocab_parallel: bool) -> dict[str, int]:
    """Returns by name the dimension along which each cut parameter is cut."""
    cut = {}
    for name, _ in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module.endswith(of.column_parallel) or (vocab_parallel and module in (of.embedding, of.output)):
            cut[name] = 0
        elif module.endswith(of.row_parallel) and kind == "weight":
            cut[name] = 1
    return cut


def _draw_weights(point: Resolved, ranks: Ranks, groups: Groups, engine: Any, cut: Mapping[str, int]) -> None:
    """Draws the initial weights into the model, and in float32 into those that DeepSpeed's optimizer steps."""
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
    """Yields parameter and float32 weight of DeepSpeed's optimizer without ZeRO in bfloat16."""
    if hasattr(optimizer, "loss_scale_config"):
        for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            yield from zip(halves, masters, strict=True)
