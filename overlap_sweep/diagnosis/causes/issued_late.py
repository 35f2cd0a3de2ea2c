"""Parameters or gradients that could have run next to computation of their pass which came before. What the program
makes the backward pass wait for is given to both, this cause and `dependency`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import Cause, Loss, Rule, as_time

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime


def started_late(time: ExposedTime) -> Iterator[Loss]:
    if time.blocks_backward:
        yield Loss(time.rest_ns, numbers={"blocked_ns": time.rest_ns}, takes=False)
    elif time.hiding:
        yield Loss(time.hideable_ns, numbers={"available_ns": time.available_ns})


def stands_before_gather(basis: Basis) -> bool:
    """Returns whether what waited for most of these reductions was an all-gather, which the pass waited for."""
    exposed = basis.view.exposure.exposed
    held = 0.0
    for loss in basis.losses:
        if loss.call is not None and (last := exposed[loss.call].ended_by) is not None:
            held += loss.lost_ns * (last != loss.call and basis.own.calls[last].collective == "all_gather")
    return basis.roles == {"gradient"} and 2 * held > basis.all_lost_ns


def evidence(basis: Basis) -> str:
    calls = basis.calls_in_words
    if basis.blocks_backward:
        each = as_time(median(loss.lost_ns for loss in basis.losses) / 1000)
        return (
            f"The backward pass waited for {calls}, {each} each, whose result it does not need: what computes "
            "after them could have hidden them."
        )
    free = f"up to {as_time(max(basis.numbers_us('available_ns')))} of the {basis.pass_in_words}"
    if stands_before_gather(basis):
        return (
            f"{calls} ran while the pass waited for the all_gather after them; before, {free} had no communication "
            "next to it."
        )
    if basis.roles == {"gradient"}:
        return f"{calls} started when {free} had run with no communication next to it."
    return (
        f"{calls} started only when the next kernels needed them; before, {free} had run with no communication next to "
        "it."
    )


CAUSE = Cause(
    order=20,
    meaning="launched only when it was needed, though its input was ready earlier",
    evidence=evidence,
    exposed=Rule(60, started_late),
    conditions={"before_gather": stands_before_gather},
    is_exposed=True,
)
