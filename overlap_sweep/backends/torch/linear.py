"""The parallel linear operator with sequence parallelism, forward and backward, overlapped as its slots say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_sweep.backends import ParallelLinear, Purpose
from overlap_sweep.backends.torch.slot_overlap import MakeOverlap, Overlap
from overlap_sweep.overlap import models
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.space import PHASES, Setting, slot

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class _Plan:
    """Per phase its method (None does not overlap) and how it communicates and multiplies."""

    methods: dict[str, str | None]
    overlaps: dict[str, Overlap]
    plain: Overlap
    """For what a slot's setting leaves alone."""


def build_operator(
    point: Mapping[str, Any],
    purpose: Purpose,
    settings: Mapping[str, Setting],
    parameters: Mapping[str, Tensor],
    plain: MakeOverlap,
    overlapped: MakeOverlap | None = None,
) -> ParallelLinear:
    """The point's operator on this rank, its slots overlapped as `settings` say; see `parallel_linear`. Collective."""
    shape = models.linear_shape(point["model"], point["operator"], point["workload"]["tokens"], point["tp_size"])
    shape = {"floor": shape.local(), "tp1": shape.unsharded()}.get(purpose, shape)
    linear = parallel_linear(point["operator"], shape, settings, plain, overlapped)
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
    """`y = x W^T + b` of this rank, differentiable in x, W and b (see `models.LinearShape` for the shapes). b may be
    None. Slots without a setting communicate by `plain`, those that have one by `overlapped`, which is `plain` too
    where it is not given."""
    if shape.tp_size == 1:
        return _Local.apply
    of_phase = {phase: settings.get(slot(operator, phase), {}) for phase in PHASES}
    methods = {phase: setting.get("method") for phase, setting in of_phase.items()}
    overlaps = {phase: (overlapped or plain if s else plain)(s) for phase, s in of_phase.items()}
    plan = _Plan(methods, overlaps, plain({}))
    function = _Column if shape.parallel == "column" else _Row
    return lambda x, weight, bias: function.apply(x, weight, bias, plan)


def _bias_grad(ctx: Any, dy: Tensor) -> Tensor | None:
    """The bias is the third argument of each function here, and may be None."""
    return dy.sum(0) if ctx.needs_input_grad[2] else None


class _Local(torch.autograd.Function):
    """The GEMMs alone, in the same form as the parallel ones: the floor, and TP=1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x, _bias_grad(ctx, dy)


class _Column(torch.autograd.Function):
    """x is gathered before the GEMM; its gradient is reduced and scattered after dgrad's GEMM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        _, y = plan.overlaps["fprop"].gather_multiply(x, weight.t(), bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_shard, weight = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dgrad, wgrad = plan.overlaps["dgrad"], plan.overlaps["wgrad"]
        beside_dgrad, beside_wgrad = (plan.methods[phase] == "bulk" for phase in ("dgrad", "wgrad"))
        dy = dy.contiguous()
        gathering = (dgrad if beside_dgrad else plan.plain).all_gather(x_shard)
        if plan.methods["dgrad"] in ("ring_exchange", "pipeline"):
            x = gathering.wait()
            return dgrad.multiply_scatter(dy, weight), dy.t() @ x, _bias_grad(ctx, dy), None
        # Waiting at once is what makes a collective not overlap.
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
    """The GEMM's partial sums are reduced and scattered; their gradient is gathered before dgrad's and wgrad's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        y = plan.overlaps["fprop"].multiply_scatter(x, weight.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy_shard: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dy, dx = plan.overlaps["dgrad"].gather_multiply(dy_shard.contiguous(), weight)
        return dx, dy.t() @ x, _bias_grad(ctx, dy), None
