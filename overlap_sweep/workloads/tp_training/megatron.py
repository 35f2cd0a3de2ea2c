"""Megatron-Core as its users train with it: GPTModel, its DistributedDataParallel and its optimizer, distributed where
there are data-parallel ranks. On a GPU the layers are Transformer Engine's, which overlap tensor-parallel communication
by userbuffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.workloads.tp_training import overlaps
from overlap_sweep.workloads.tp_training.implementation import Facts, Groups
from overlap_sweep.workloads.tp_training.megatron_model import (
    build_model,
    cpu_for_cuda,
    initial_parts,
    transformer_config,
)

_kept_groups: dict[str, dist.ProcessGroup] = {}


class Megatron:
    """An Implementation. Refused where userbuffers don't take the overlap configuration. Collective."""

    def __init__(self, point: Mapping[str, Any], ranks: Ranks, groups: Groups) -> None:
        self._point = point
        self._micro_batches = point["tp_training"]["gradient_accumulation_steps"]
        on_gpu = ranks.device.type == "cuda"
        self._device: Callable[[], AbstractContextManager[None]] = nullcontext if on_gpu else cpu_for_cuda
        with ExitStack() as stack, self._device():
            with _groups_kept():
                parallel_state.initialize_model_parallel(point["tp_size"], create_gloo_process_groups=False)
            stack.callback(parallel_state.destroy_model_parallel)
            for theirs, ours in (
                (parallel_state.get_tensor_model_parallel_group(), groups.tp),
                (parallel_state.get_data_parallel_group(), groups.dp),
            ):
                assert dist.get_process_group_ranks(theirs) == dist.get_process_group_ranks(ours)
            # Without CUDA there are no states of its random numbers to keep apart, and nothing here is random.
            seed = point["tp_training"]["seed"]
            model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not on_gpu, force_reset_rng=True)
            if overlaps(point):
                stack.callback(_initialize_userbuffers(point))
            self._config = transformer_config(point)
            model = build_model(point, self._config, groups.tp_rank)
            wrapped = model if point["precision"] == "fp32" else Float16Module(self._config, model)
            several = groups.dp_size > 1
            # Gradients are accumulated and reduced in the type of the parameters.
            data_parallel = DistributedDataParallelConfig(
                grad_reduce_in_fp32=False,
                use_distributed_optimizer=several,
                overlap_grad_reduce=several,
                overlap_param_gather=several,
            )
            self._model = DistributedDataParallel(self._config, data_parallel, wrapped)
            self._optimizer: MegatronOptimizer = get_megatron_optimizer(
                _optimizer_config(point, self._config, data_parallel),
                [self._model],
                # None would leave norms and biases without weight decay.
                config_overrides={},
                use_gloo_process_groups=False,
            )
            _load(initial_parts(point, ranks, groups.tp_rank, fused_norms=on_gpu), model, self._optimizer)
            self._closing = stack.pop_all()

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        with self._device():
            losses: Tensor = self._model(input_ids=tokens, position_ids=None, attention_mask=None, labels=labels)
            return losses.mean()

    def backward(self, loss: Tensor, last: bool) -> None:
        with self._device():
            with nullcontext() if last else self._model.no_sync():
                self._optimizer.scale_loss(loss / self._micro_batches).backward()
            if last:
                finalize_model_grads([self._model])

    def update(self) -> Tensor:
        with self._device():
            taken, norm, _ = self._optimizer.step()
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
        return torch.tensor(norm if taken else torch.inf)

    def facts(self) -> Facts:
        data_parallel, overlap = self._model.ddp_config, "off"
        if self._config.tp_comm_overlap:
            overlap = self._point["tp_training"]["tp_comm_overlap_cfg"] or "Transformer Engine's defaults"
        details = {
            "sequence_parallel": self._config.sequence_parallel,
            "tp_comm_overlap": overlap,
            "optimizer": "distributed" if data_parallel.use_distributed_optimizer else "not distributed",
            "overlap_grad_reduce": data_parallel.overlap_grad_reduce,
            "overlap_param_gather": data_parallel.overlap_param_gather,
            "gradients_in": self._point["tp_training"]["dtype"],
            "cross_entropy_loss_fusion": self._config.cross_entropy_loss_fusion,
        }
        if self._point["runtime"]["device"] == "cpu":
            return Facts({"layers": "Megatron-Core", "attention_backend": "Megatron-Core's own", **details})
        from overlap_sweep.backends.transformer_engine import attention_backend, attention_warnings

        backend = attention_backend()
        layers = {"layers": "Transformer Engine", "attention_backend": backend}
        return Facts({**layers, **details}, attention_warnings(backend))

    def close(self) -> None:
        self._closing.close()


@contextmanager
def _groups_kept() -> Iterator[None]:
    """Have Megatron-Core use one process group wherever the ranks are the same, and for every point: it makes some
    twenty each time and never destroys them, and with NCCL each takes memory of the GPU."""
    make = dist.new_group

    def kept(**asked: Any) -> dist.ProcessGroup:
        key = str({**asked, "group_desc": None})
        if key not in _kept_groups:
            _kept_groups[key] = make(**asked)
        return _kept_groups[key]

    with patch.object(dist, "new_group", kept):
        yield


def _initialize_userbuffers(point: Mapping[str, Any]) -> Callable[[], None]:
    """Returns what destroys them."""
    from overlap_sweep.backends.transformer_engine import userbuffers

    training, given = point["tp_training"], point.get("overlap_cfg")
    userbuffers.initialize(
        userbuffers.Userbuffers(
            tokens=training["seq_length"] * training["batch_size"],
            hidden_size=point["language_model"]["hidden_size"],
            tp_size=point["tp_size"],
            fp8=False,
            bootstrap_backend=point["runtime"]["bootstrap_backend"],
            ub_cfgs=given["slots"] if given else {},
        )
    )
    return userbuffers.destroy


def _optimizer_config(
    point: Mapping[str, Any], config: TransformerConfig, data_parallel: DistributedDataParallelConfig
) -> OptimizerConfig:
    training = point["tp_training"]
    return OptimizerConfig(
        optimizer="adam",
        lr=training["learning_rate"],
        weight_decay=training["weight_decay"],
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        clip_grad=training["max_grad_norm"],
        params_dtype=config.params_dtype,
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=2.0**16,
        loss_scale_window=2000,
        hysteresis=1,
        use_distributed_optimizer=data_parallel.use_distributed_optimizer,
        overlap_param_gather=data_parallel.overlap_param_gather,
    )


@torch.no_grad()
def _load(parts: Iterable[tuple[str, Tensor]], model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Copies the weights into the parameters, and in float32 into the optimizer's copies of them."""
    parameters = dict(model.named_parameters())
    for name, part in parts:
        parameter = parameters.pop(name)
        parameter.copy_(part)
        master = getattr(parameter, "main_param", None)
        if master is None:
            continue
        if getattr(parameter, "main_param_sharded", False):
            (distributed,) = optimizer.chained_optimizers
            owned = distributed._get_model_param_range_map(parameter)["param"]
            part = part.flatten()[owned.start : owned.end]
        master.copy_(part)
    assert not parameters, f"no weights for {sorted(parameters)}"
