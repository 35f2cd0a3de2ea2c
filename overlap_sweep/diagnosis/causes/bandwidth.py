"""Communication that takes longer than the computation which could hide it: of activations, that which ran next to a
good part of the call; of parameters and gradients, that of their pass."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import Cause, Loss, Rule, as_rate, as_time

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime

PARTLY_HIDDEN = 0.2
"""Least part of a collective of activations that computation hides for the rest to be too long rather than needed."""


def too_long(time: ExposedTime) -> Iterator[Loss]:
    if time.blocks_backward:
        return
    if time.hiding:
        comm_ns, compute_ns = time.hiding.comm_ns, time.hiding.compute_ns
        yield Loss(comm_ns - compute_ns, numbers={"comm_ns": comm_ns, "compute_ns": compute_ns})
        return
    hidden_ns = time.moving_ns - time.rest_ns
    if time.call.group and hidden_ns >= PARTLY_HIDDEN * time.moving_ns:
        yield Loss(time.rest_ns, numbers={"comm_ns": time.moving_ns, "compute_ns": hidden_ns})


def evidence(basis: Basis) -> str:
    if basis.roles <= {"activation"}:
        moving, hidden = median(basis.numbers_us("comm_ns")), median(basis.numbers_us("compute_ns"))
        return (
            f"{basis.calls_in_words} take {as_time(moving)} each, and computation runs next to them for "
            f"{as_time(hidden)}: {as_time(moving - hidden)} of each have nothing that hides them."
        )
    comm, compute = max(basis.numbers_us("comm_ns")), max(basis.numbers_us("compute_ns"))
    alike = [basis.view.alike[loss.call] for loss in basis.losses if loss.call is not None]
    rates = [one.rate_gbs for one in alike if one.rate_gbs is not None]
    rate = f" (these calls at {as_rate(median(rates))} GB/s)" if rates else ""
    return (
        f"The {basis.pass_in_words} has {as_time(comm)} of communication{rate} and {as_time(compute)} of computation: "
        f"{as_time(comm - compute)} cannot be hidden."
    )


CAUSE = Cause(
    order=40,
    meaning="it takes longer than all computation that it could hide behind",
    evidence=evidence,
    exposed=Rule(70, too_long),
    is_exposed=True,
)
