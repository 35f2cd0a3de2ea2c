"""The parallel linear operator with sequence parallelism, forward and backward, overlapped as its slots say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap_sweep.backends.torch.communicator import Communicator, MakeCommunicator, communicator
from overlap_sweep.backends.torch.overlap import Multiply, gather_multiply, multiply_scatter
from overlap_sweep.models import LinearShape
from overlap_sweep.ranks import Ranks
from overlap_sweep.space import PHASES, Setting, slot

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class _Plan:
    """Per phase its setting ({} does not overlap) and the communicator that it may use."""

    ranks: Ranks
    settings: dict[str, Setting]
    comms: dict[str, Communicator]
    plain: Communicator
    """For what a slot's setting leaves alone."""


def parallel_linear(
    operator: str,
    shape: LinearShape,
    settings: Mapping[str, Setting],
    ranks: Ranks,
    make_communicator: MakeCommunicator | None = None,
) -> Linear:
    """`y = x W^T + b` of this rank, differentiable in x, W and b (see `models.LinearShape` for the shapes). b may be
    None. `ranks` are the operator's, and communicate through what `make_communicator` makes: by default, all ranks of
    the worker group."""
    if shape.tp_size == 1:
        return _Local.apply
    make = make_communicator or partial(communicator, ranks)
    of_phase = {phase: settings.get(slot(operator, phase), {}) for phase in PHASES}
    comms = {p: make(s.get("num_sm"), s.get("cga_size")) for p, s in of_phase.items()}
    plan = _Plan(ranks, of_phase, comms, make(None, None))
    function = _Column if shape.parallel == "column" else _Row
    return lambda x, weight, bias: function.apply(x, weight, bias, plan)


def _by(matrix: Tensor) -> Multiply:
    """Multiplication by `matrix` [k, n] from the right."""

    def multiply(rows: Tensor, product: Tensor) -> None:
        if rows.dim() == 2:
            torch.mm(rows, matrix, out=product)
        else:
            torch.bmm(rows, matrix.expand(rows.shape[0], -1, -1), out=product)

    return multiply


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

        def multiply(rows: Tensor, product: Tensor) -> None:
            if bias is None:
                torch.mm(rows, weight.t(), out=product)
            else:
                torch.addmm(bias, rows, weight.t(), out=product)

        y = x.new_empty(plan.ranks.world_size * x.shape[0], weight.shape[0])
        gather_multiply(x, y, multiply, plan.comms["fprop"], plan.ranks, plan.settings["fprop"])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_shard, weight = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dgrad, wgrad = plan.settings["dgrad"].get("method"), plan.settings["wgrad"].get("method")
        dy = dy.contiguous()
        gathering = (plan.comms["dgrad"] if dgrad == "bulk" else plan.plain).all_gather(x_shard)
        if dgrad in ("ring_exchange", "pipeline"):
            x = gathering.wait()
            setting = plan.settings["dgrad"]
            dx = multiply_scatter(dy, weight.shape[1], _by(weight), plan.comms["dgrad"], plan.ranks, setting)
            return dx, dy.t() @ x, _bias_grad(ctx, dy), None
        # Waiting at once is what makes a collective not overlap.
        if dgrad != "bulk":
            gathering.wait()
        dx_full = dy @ weight
        x = gathering.wait()
        scattering = plan.comms["wgrad"].reduce_scatter(dx_full)
        if wgrad != "bulk":
            scattering.wait()
        dw = dy.t() @ x
        return scattering.wait(), dw, _bias_grad(ctx, dy), None


class _Row(torch.autograd.Function):
    """The GEMM's partial sums are reduced and scattered; their gradient is gathered before dgrad's and wgrad's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        setting = plan.settings["fprop"]
        y = multiply_scatter(x, weight.shape[0], _by(weight.t()), plan.comms["fprop"], plan.ranks, setting)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy_shard: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dx, setting = torch.empty_like(x), plan.settings["dgrad"]
        dy = gather_multiply(dy_shard.contiguous(), dx, _by(weight), plan.comms["dgrad"], plan.ranks, setting)
        return dx, dy.t() @ x, _bias_grad(ctx, dy), None
