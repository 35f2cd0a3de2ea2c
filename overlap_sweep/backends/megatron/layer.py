"""Builds the layer with the same weights for every variant, and chooses the experts of each token once for every input,
so that all variants send the same tokens to the same ranks, and every rank knows how many it gets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
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
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn
from torch.nn import functional

from overlap_sweep.backends import LayerPoint
from overlap_sweep.backends.communicator import SilentGroup, cached_silent_group, done, own_group
from overlap_sweep.backends.megatron import Arguments, transformer_config
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks, parallel_groups, stream
from overlap_sweep.measure.instruments import say_groups


@dataclass(frozen=True)
class Routing:
    """The experts of one micro batch, on the layer's device."""

    experts: Tensor
    """[tokens, experts_per_token], of this rank's tokens."""
    tokens_per_expert: Tensor
    """[ranks, num_experts]: how many tokens each rank sends to each expert."""


def draw_routing(kind: str, tokens: int, num_experts: int, chosen: int, name: str, seed: int, ranks: Ranks) -> Routing:
    """Returns the routing of the micro batch of this name. `chosen` is the number of experts of a token."""
    by_rank = []
    for rank in range(ranks.world_size):
        generator = stream(torch.device("cpu"), seed, f"routing {name}", rank)
        if kind == "balanced":
            # Dealt in turn, every expert gets as many tokens as any other, and no token an expert twice.
            turn = torch.randperm(num_experts, generator=generator)
            by_rank.append(turn[torch.arange(tokens * chosen).view(tokens, chosen) % num_experts])
        else:
            by_rank.append(torch.rand((tokens, num_experts), generator=generator).topk(chosen).indices)
    counts = torch.stack([torch.bincount(experts.flatten(), minlength=num_experts) for experts in by_rank])
    return Routing(by_rank[ranks.rank].to(ranks.device), counts.to(ranks.device))


class Prescribed:
    """Has a router take prescribed experts instead of those with the highest scores. Stands for Megatron-Core's
    RouterReplay, which keeps every routing that it was ever given."""

    experts: Tensor

    def get_replay_topk(self, scores: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Returns the scores of the prescribed experts, and their numbers."""
        return scores.gather(1, self.experts), self.experts


class SilentExperts(SilentGroup):
    """A silent group that knows how many tokens each rank sends: experts get as many as they would with
    communication."""

    routing: Routing

    def all_gather_single(self, output: Tensor, shard: Tensor, options: object = None) -> dist.Work:
        output.copy_(self.routing.tokens_per_expert.view(output.shape))
        return done()

    _allgather_base = all_gather_single


class Layer:
    """One rank's layer."""

    def __init__(self, point: LayerPoint, given: Arguments, ranks: Ranks, num_sm: int | None, *, silent: bool) -> None:
        """`given`: Megatron-Core's arguments of the variant; `silent`: without communication. Collective."""
        self.on_gpu = ranks.device.type == "cuda"
        groups = _groups(point, given, ranks, num_sm, silent)
        say_groups({"tensor-parallel": groups.tp, "expert-parallel": groups.ep})
        self._silent = groups.ep if silent else None
        self._tp_group = groups.tp
        with self.running():
            try:
                config = _config(point, given, ranks)
                self.module: nn.Module = build_module(
                    _spec(config, self.on_gpu), config=config, layer_number=1, pg_collection=groups
                ).to(ranks.device, config.params_dtype)
            except (AssertionError, ImportError, ValueError) as error:
                # Megatron-Core checks what goes together in these ways.
                raise Refused(f"Megatron-Core: {' '.join(str(error).split())}") from error
        _initialize(self.module, point.workload.seed, ranks)
        self._prescribed = Prescribed()
        self.module.mlp.router.router_replay = self._prescribed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes Megatron-Core's layers run here, in this context."""
        with (
            # The library's global groups are not set up: every layer has its own. Shared experts beside the dispatch
            # are not given theirs.
            patch.object(mappings, "get_tensor_model_parallel_group_if_none", self._given_or_own),
            patch.object(mappings, "get_global_memory_buffer", _memory_buffer),
            patch.object(layers, "get_global_memory_buffer", _memory_buffer),
            nullcontext() if self.on_gpu else cpu_for_cuda(),
        ):
            yield

    def _given_or_own(self, group: dist.ProcessGroup | None, **_: object) -> dist.ProcessGroup:
        return self._tp_group if group is None else group

    def route(self, routing: Routing) -> None:
        """Sets the experts of the next forward."""
        self._prescribed.experts = routing.experts
        if self._silent is not None:
            self._silent.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x, attention_mask=None)[0]
        return output


_memory_buffer = cache(GlobalMemoryBuffer)


def _groups(
    point: LayerPoint, given: Arguments, ranks: Ranks, num_sm: int | None, silent: bool
) -> ProcessGroupCollection:
    """Returns the groups of a layer whose experts are spread over all ranks, each on one, and whose other parts are cut
    over neighbouring ranks."""
    tp_size = point.tp_size
    alone = cached_silent_group(0, 1)
    cut: dist.ProcessGroup | None = alone
    tokens: dist.ProcessGroup | None = dist.group.WORLD
    counts: dist.ProcessGroup | None
    if silent:
        tokens = counts = SilentExperts(ranks.rank, ranks.world_size)
        cut = SilentGroup(ranks.rank % tp_size, tp_size)
    else:
        if tp_size > 1:
            cut = parallel_groups(tp_size, ranks.world_size)[0]
        # Ranks could disagree about the order of what different parts of a layer, or different micro batches, send over
        # one group. The dispatchers without all-to-alls move tokens over that of the counts.
        if num_sm is not None or tp_size > 1:
            tokens = own_group(ranks, "tokens", num_sm)
        counts = own_group(ranks, "counts") if given["moe_token_dispatcher_type"] == "alltoall" else tokens
    singles = ("pp", "cp", "dp", "dp_cp", "expt_tp", "expt_dp")
    return ProcessGroupCollection(
        **dict.fromkeys(singles, alone), tp=cut, tp_cp=cut, ep=tokens, tp_ep=counts, tp_dp_cp=counts
    )


def _config(point: LayerPoint, given: Arguments, ranks: Ranks) -> TransformerConfig:
    model, options = point.model, point.layer.moe
    gated, on_gpu = bool(model.gated_experts), ranks.device.type == "cuda"
    with warnings.catch_warnings():
        # It recommends a router in float32 for many experts: here nobody loses accuracy.
        warnings.simplefilter("ignore")
        return transformer_config(
            model,
            point.precision,
            point.tp_size,
            ffn_hidden_size=model.expert_ffn_hidden_size,
            activation_func=functional.silu if gated else functional.gelu,
            gated_linear_unit=gated,
            bias_activation_fusion=gated and on_gpu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            perform_initialization=False,
            num_moe_experts=model.num_experts,
            moe_ffn_hidden_size=model.expert_ffn_hidden_size,
            moe_router_topk=model.experts_per_token,
            # The softmax of a single score is 1, whatever the router computes.
            moe_router_pre_softmax=model.experts_per_token == 1,
            moe_shared_expert_intermediate_size=model.shared_expert_ffn_hidden_size,
            moe_router_load_balancing_type="none",
            # DeepEP takes probabilities in float32.
            moe_router_dtype="fp32",
            moe_grouped_gemm=options.grouped_gemm,
            moe_permute_fusion=on_gpu,
            expert_model_parallel_size=options.ep_size,
            expert_tensor_parallel_size=1,
            **given,
        )


def _spec(config: TransformerConfig, on_gpu: bool) -> ModuleSpec:
    if on_gpu:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
    spec.submodules.self_attention.submodules.core_attention = _Attention
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


class _Event:
    """Stands for an event and for a stream."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record_event(self) -> _Event:
        return self

    def record(self, *_: object) -> None:
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
    (
        token_dispatcher,
        {
            "maybe_move_tensor_to_cpu": lambda found, as_numpy=False, **_: (
                found.numpy() if as_numpy and isinstance(found, Tensor) else found
            )
        },
    ),
]


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Lets Megatron-Core's layers ask for CUDA's device, streams and events on a CPU. That does everything at once, so
    events have always happened. What is on the stream of communication runs in a thread instead (`schedule.py`)."""
    with ExitStack() as stack:
        for place, instead in _PLACES:
            stack.enter_context(patch.multiple(place, **instead, create=True))
        yield


class _Norm:
    """Makes torch's norm, which Megatron-Core does not take with sequence parallelism: on GPUs the norms' gradients are
    then summed over the ranks at the end of a step."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> nn.Module:  # type: ignore[misc]
        return (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps)


class _Attention(MegatronModule):
    """torch's causal attention in the place of Megatron-Core's, which stores all scores."""

    def __init__(self, config: TransformerConfig, **_: object) -> None:
        super().__init__(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)
