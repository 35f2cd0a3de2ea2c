"""A parallel linear operator with sequence parallelism, overlapped by the settings of its slots, and the layers made of
it.

Between the modules of a layer are rows of features: [tokens / tp, hidden] where sequence parallel, [tokens, features /
tp] between a column-parallel and a row-parallel operator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from overlap_sweep.backends import LayerPoint, ParallelLayer, ParallelLinear, Purpose
from overlap_sweep.backends.torch.overlap import MakeOverlap, Overlap, by_collectives
from overlap_sweep.errors import Refused
from overlap_sweep.measure import DTYPES, Ranks
from overlap_sweep.overlap.models import LinearShape, operator_shape
from overlap_sweep.overlap.space import PHASES, OperatorPoint, Setting, method_of, num_sm_of, slot

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

EPSILON = 1e-5
"""Epsilon of norms, as in Transformer Engine's layers."""

_KERNELS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "unfused",
}


class _Context(Protocol):
    """What torch's autograd keeps of a forward for its backward, and the plan that ours adds."""

    saved_tensors: Sequence[Tensor]
    needs_input_grad: Sequence[bool]
    plan: _SlotPlan

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@dataclass(frozen=True)
class _SlotPlan:
    """Method per phase, and how each phase communicates and multiplies."""

    methods: dict[str, str]
    overlaps: dict[str, Overlap]
    plain: Overlap
    """Overlap of slots that have no setting."""


def build_operator(
    point: OperatorPoint,
    purpose: Purpose,
    settings: Mapping[str, Setting],
    parameters: Mapping[str, Tensor],
    plain: MakeOverlap,
    overlapped: MakeOverlap | None = None,
) -> ParallelLinear:
    """Returns the point's operator on this rank, its slots overlapped by `settings`. Collective."""
    shape = operator_shape(point, point.operator)
    shape = {"floor": shape.local(), "tp1": shape.unsharded()}.get(purpose, shape)
    linear = parallel_linear(point.operator, shape, settings, plain, overlapped)
    return ParallelLinear(
        forward=lambda x: linear(x, parameters["weight"], parameters.get("bias")),
        parameters=parameters,
        input_shape=shape.input_shape,
        output_shape=shape.output_shape,
    )


def parallel_linear(
    operator: str,
    shape: LinearShape,
    settings: Mapping[str, Setting],
    plain: MakeOverlap,
    overlapped: MakeOverlap | None = None,
) -> Linear:
    """Returns `y = x W^T + b` of this rank, differentiable in x, W and b (see `models.LinearShape` for the shapes).

    b may be None. Slots without a setting communicate by `plain`, those that have one by `overlapped`, by default
    `plain` too.
    """
    if shape.tp_size == 1:
        return _Local.apply
    setting_by_phase = {phase: settings.get(slot(operator, phase), {}) for phase in PHASES}
    methods = {phase: method_of(setting) for phase, setting in setting_by_phase.items()}
    overlaps = {phase: (overlapped or plain if s else plain)(s) for phase, s in setting_by_phase.items()}
    plan = _SlotPlan(methods, overlaps, plain({}))
    function = _Column if shape.parallel == "column" else _Row
    return lambda x, weight, bias: function.apply(x, weight, bias, plan)


def _bias_grad(ctx: _Context, dy: Tensor) -> Tensor | None:
    """Returns the gradient of the bias, the third argument of each function here, which may be None."""
    return dy.sum(0) if ctx.needs_input_grad[2] else None


class _Local(torch.autograd.Function):
    """The GEMMs only, in the same form as the parallel ones: for the floor and TP=1."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x, _bias_grad(ctx, dy)


class _Column(torch.autograd.Function):
    """Gathers x before the GEMM; reduces and scatters its gradient after dgrad's GEMM."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _SlotPlan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        _, y = plan.overlaps["fprop"].gather_multiply(x, weight.t(), bias)
        return y

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_shard, weight = ctx.saved_tensors
        plan = ctx.plan
        dgrad, wgrad = plan.overlaps["dgrad"], plan.overlaps["wgrad"]
        beside_dgrad, beside_wgrad = (plan.methods[phase] == "bulk" for phase in ("dgrad", "wgrad"))
        dy = dy.contiguous()
        gathering = (dgrad if beside_dgrad else plan.plain).all_gather(x_shard)
        if plan.methods["dgrad"] in ("ring_exchange", "pipeline"):
            x = gathering.wait()
            return dgrad.multiply_scatter(dy, weight), dy.t() @ x, _bias_grad(ctx, dy), None
        # Waiting immediately prevents overlap.
        if not beside_dgrad:
            gathering.wait()
        dx_full = dy @ weight
        x = gathering.wait()
        scattering = wgrad.reduce_scatter(dx_full)
        if not beside_wgrad:
            scattering.wait()
        dw = dy.t() @ x
        return scattering.wait(), dw, _bias_grad(ctx, dy), None


class _Row(torch.autograd.Function):
    """Reduces and scatters the GEMM's partial sums; gathers their gradient before dgrad's and wgrad's GEMMs."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _SlotPlan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        y = plan.overlaps["fprop"].multiply_scatter(x, weight.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: _Context, dy_shard: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        plan = ctx.plan
        dy, dx = plan.overlaps["dgrad"].gather_multiply(dy_shard.contiguous(), weight)
        return dx, dy.t() @ x, _bias_grad(ctx, dy), None


def build_layer(
    point: LayerPoint,
    purpose: Purpose,
    settings: Mapping[str, Setting],
    ranks: Ranks,
    seed: int,
    overlapped: MakeOverlap | None = None,
) -> ParallelLayer:
    """Returns the layer of `point.layer.kind`, its slots overlapped by `settings`: with `overlapped`, by
    default collectives, which all other slots use too. Collective.

    The floor is the same layer with collectives that move nothing, so that every tensor has the same shape.
    """
    tp_ranks = Ranks(ranks.rank % point.tp_size, point.tp_size, ranks.device)
    plain = by_collectives(tp_ranks, point.layer.num_replicas, silent=purpose == "floor")

    def make_operator(name: str) -> Operator:
        shape = operator_shape(point, name)
        _check_sm_count({slot: s for slot, s in settings.items() if slot.startswith(f"{name}_")}, ranks)
        linear = parallel_linear(name, shape, settings, plain, overlapped)
        return Operator(point, shape, linear, ranks.device)

    kind = point.layer.kind
    torch.manual_seed(seed)
    module = _layer(kind, point, make_operator, partial(_norm, point, ranks.device))
    # Every layer but the bare row-parallel linear begins with a column-parallel operator.
    input_shape = operator_shape(point, "proj" if kind == "linear" else "qkv").input_shape
    return ParallelLayer(module, lambda layer, x, _first: layer(x), input_shape)


def attention_kernel(point: LayerPoint, ranks: Ranks) -> str:
    """Returns the attention kernel that torch chooses for the layer."""
    batch, heads, head_dim = point.layer.micro_batch_size, *_local_heads(point)
    sequence = point.workload.tokens // batch
    new = partial(torch.empty, device=ranks.device, dtype=DTYPES[point.precision], requires_grad=True)
    q, k, v = (new(batch, count, sequence, head_dim) for count in heads)
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])
    return _KERNELS.get(SDPBackend(chosen), "unknown")


class Operator(torch.nn.Module):
    """One parallel linear operator with its weights."""

    def __init__(self, point: LayerPoint, shape: LinearShape, linear: Linear, device: torch.device) -> None:
        super().__init__()
        self.bias: torch.nn.Parameter | None = None
        dtype = DTYPES[point.precision]
        self._linear = linear
        self.weight = torch.nn.Parameter(torch.empty(shape.weight_shape, device=device, dtype=dtype))
        # Keeps activations at about 1 for any width of the model.
        assert point.model.hidden_size
        torch.nn.init.normal_(self.weight, std=point.model.hidden_size**-0.5)
        if point.model.bias:
            self.bias = torch.nn.Parameter(torch.zeros(shape.weight_shape[0], device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)


class Attention(torch.nn.Module):
    """This rank's heads: [tokens, queries and keys and values] -> [tokens, heads x head_dim], causal.

    Rows are ordered by position in the sequence first, so that each rank's share of them is a part of every sequence.
    """

    def __init__(self, point: LayerPoint) -> None:
        super().__init__()
        self._batch = point.layer.micro_batch_size
        self._heads, self._head_dim = _local_heads(point)

    def forward(self, qkv: Tensor) -> Tensor:
        # [sequence, batch, heads, head_dim] -> [batch, heads, sequence, head_dim]
        by_head = qkv.view(-1, self._batch, sum(self._heads), self._head_dim).permute(1, 2, 0, 3)
        q, k, v = by_head.split(self._heads, dim=1)
        grouped = self._heads[0] != self._heads[1]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return attended.permute(2, 0, 1, 3).reshape(qkv.shape[0], -1)


class SwiGLU(torch.nn.Module):
    """[tokens, gate and value] -> [tokens, ffn / tp]."""

    def forward(self, both: Tensor) -> Tensor:
        gate, value = both.chunk(2, dim=1)
        return functional.silu(gate) * value


class Residual(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def _layer(
    kind: str, point: LayerPoint, operator: Callable[[str], Operator], norm: Callable[[], torch.nn.Module]
) -> torch.nn.Module:
    match kind:
        case "linear":
            return operator("proj")
        case "layernorm_linear":
            return _chain(norm=norm(), qkv=operator("qkv"))
        case "layernorm_mlp":
            activation = SwiGLU() if point.model.gated_mlp else torch.nn.GELU(approximate="tanh")
            return _chain(norm=norm(), fc1=operator("fc1"), activation=activation, fc2=operator("fc2"))
        case "multihead_attention":
            return _chain(norm=norm(), qkv=operator("qkv"), core=Attention(point), proj=operator("proj"))
        case "transformer_layer":
            attention, mlp = (_layer(part, point, operator, norm) for part in ("multihead_attention", "layernorm_mlp"))
            return _chain(attention=Residual(attention), mlp=Residual(mlp))
    raise ValueError(kind)


def _chain(**parts: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(OrderedDict(parts))


def _norm(point: LayerPoint, device: torch.device) -> torch.nn.Module:
    make = torch.nn.RMSNorm if point.model.normalization == "RMSNorm" else torch.nn.LayerNorm
    return make(point.model.hidden_size, eps=EPSILON, device=device, dtype=DTYPES[point.precision])


def _local_heads(point: LayerPoint) -> tuple[tuple[int, int, int], int]:
    model, tp_size = point.model, point.tp_size
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_kv_heads, model.head_dim
    assert heads is not None
    assert kv_heads is not None
    assert head_dim is not None
    return (heads // tp_size, kv_heads // tp_size, kv_heads // tp_size), head_dim


def _check_sm_count(settings: Mapping[str, Setting], ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        count = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        for slot, setting in settings.items():
            if (num_sm := num_sm_of(setting)) > count:
                raise Refused(f"{slot}: num_sm={num_sm} is more than the GPU's {count}")
