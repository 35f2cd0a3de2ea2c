"""Builds the layer, its weights the same for every variant."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn
from torch.nn import functional

from overlap_sweep.backends.megatron import on_cpu
from overlap_sweep.backends.megatron.routing import Prescribed, Routing
from overlap_sweep.backends.torch.communicator import SilentGroup, done, own_group
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks, stream
from overlap_sweep.overlap.expert_parallel import Arguments

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class SilentExperts(SilentGroup):
    """A silent group that knows how many tokens each rank sends: experts get as many as they would with
    communication."""

    routing: Routing

    def all_gather_single(self, output: Tensor, shard: Tensor, options: Any = None) -> dist.Work:
        output.copy_(self.routing.tokens_per_expert.view(output.shape))
        return done()

    _allgather_base = all_gather_single


class Layer:
    """One rank's layer."""

    def __init__(
        self, point: Mapping[str, Any], given: Arguments, ranks: Ranks, num_sm: int | None, *, silent: bool
    ) -> None:
        """`given`: Megatron-Core's arguments of the variant; `silent`: without communication. Collective."""
        self.on_gpu = ranks.device.type == "cuda"
        groups = _groups(given, ranks, num_sm, silent)
        self._silent = groups.ep if silent else None
        with self.running():
            try:
                config = _config(point, given, ranks)
                self.module: nn.Module = build_module(
                    _spec(point, config, self.on_gpu), config=config, layer_number=1, pg_collection=groups
                ).to(ranks.device, config.params_dtype)
            except (AssertionError, ImportError, ValueError) as error:
                # Megatron-Core checks what goes together in these ways.
                raise Refused(f"Megatron-Core: {' '.join(str(error).split())}") from error
        _initialize(self.module, point["workload"]["seed"], ranks)
        self._prescribed = Prescribed()
        self.module.mlp.router.router_replay = self._prescribed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes Megatron-Core's layers run here, in this context."""
        with (
            patch.multiple(
                mappings,
                get_tensor_model_parallel_group_if_none=_given_or_alone,
                get_global_memory_buffer=_memory_buffer,
            ),
            nullcontext() if self.on_gpu else on_cpu.cpu_for_cuda(),
        ):
            yield

    def route(self, routing: Routing) -> None:
        """Sets the experts of the next forward."""
        self._prescribed.experts = routing.experts
        if self._silent is not None:
            self._silent.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x, attention_mask=None)[0]
        return output


@cache
def _alone() -> SilentGroup:
    return SilentGroup(0, 1)


def _given_or_alone(group: dist.ProcessGroup | None, **_: Any) -> dist.ProcessGroup:
    """Returns the group, or for shared experts beside the dispatch, which are not given theirs, that of one rank. The
    library's global groups are not set up: every layer has its own."""
    return _alone() if group is None else group


@cache
def _memory_buffer() -> GlobalMemoryBuffer:
    return GlobalMemoryBuffer()


def _groups(given: Arguments, ranks: Ranks, num_sm: int | None, silent: bool) -> ProcessGroupCollection:
    """Returns the groups of a layer whose experts are spread over all ranks and whose other parts are cut over none."""
    tokens: Any
    if silent:
        tokens = counts = SilentExperts(ranks.rank, ranks.world_size)
    else:
        tokens = dist.group.WORLD if num_sm is None else own_group(ranks, num_sm)
        # The ranks first tell each other how many tokens they send, maybe while those of another micro batch move: on
        # one group the ranks could disagree about the order. The other dispatchers move tokens over this group.
        counts = own_group(ranks) if given["moe_token_dispatcher_type"] == "alltoall" else tokens
    singles = ("tp", "pp", "cp", "dp", "dp_cp", "tp_cp", "expt_tp", "expt_dp")
    return ProcessGroupCollection(**dict.fromkeys(singles, _alone()), ep=tokens, tp_ep=counts, tp_dp_cp=counts)


def _config(point: Mapping[str, Any], given: Arguments, ranks: Ranks) -> TransformerConfig:
    model, options, precision = point["model"], point["layer"]["moe"], point["precision"]
    gated, on_gpu = bool(model["gated_experts"]), ranks.device.type == "cuda"
    with warnings.catch_warnings():
        # It recommends a router in float32 for many experts: here nobody loses accuracy.
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=1,
            hidden_size=model["hidden_size"],
            ffn_hidden_size=model["expert_ffn_hidden_size"],
            num_attention_heads=model["num_attention_heads"],
            num_query_groups=model["num_kv_heads"],
            kv_channels=model["head_dim"],
            normalization=model["normalization"],
            activation_func=functional.silu if gated else functional.gelu,
            gated_linear_unit=gated,
            bias_activation_fusion=gated and on_gpu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=DTYPES[precision],
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            perform_initialization=False,
            num_moe_experts=model["num_experts"],
            moe_ffn_hidden_size=model["expert_ffn_hidden_size"],
            moe_router_topk=model["experts_per_token"],
            # The softmax of a single score is 1, whatever the router computes.
            moe_router_pre_softmax=model["experts_per_token"] == 1,
            moe_shared_expert_intermediate_size=model["shared_expert_ffn_hidden_size"],
            moe_router_load_balancing_type="none",
            # DeepEP takes probabilities in float32.
            moe_router_dtype="fp32",
            moe_grouped_gemm=options["grouped_gemm"],
            moe_permute_fusion=on_gpu,
            expert_model_parallel_size=options["ep_size"],
            expert_tensor_parallel_size=1,
            **given,
        )


def _spec(point: Mapping[str, Any], config: TransformerConfig, on_gpu: bool) -> ModuleSpec:
    if on_gpu:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = WrappedTorchNorm
    spec.submodules.self_attention.submodules.core_attention = on_cpu.Attention
    return spec


@torch.no_grad()
def _initialize(module: nn.Module, seed: int, ranks: Ranks) -> None:
    """Draws the weights, which keep activations at about 1 for any width: of experts by rank, of the rest on all ranks
    the same."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        rank = ranks.rank if "mlp.experts." in name else None
        draw = partial(torch.randn, generator=stream(ranks.device, seed, f"weight {name}", rank), device=ranks.device)
        parameter.copy_(draw(parameter.shape) * parameter.shape[-1] ** -0.5)
