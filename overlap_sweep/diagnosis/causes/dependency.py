"""The next kernels need the result, and no computation was left that could have hidden it; or the program itself makes
the backward pass wait for a reduction, which is `issued_late`, too."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import NEVER, Cause, Loss, Rule, as_time

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime

AT_ONCE_NS = 1_000_000
"""Longest time after a call until a kernel that waited for it; what starts later waited for something else, too."""


def rest(time: ExposedTime) -> Iterator[Loss]:
    yield Loss(time.rest_ns, numbers={"blocked_ns": time.rest_ns} if time.blocks_backward else {})


def evidence(basis: Basis) -> str:
    head = f"{basis.calls_in_words}, {as_time(median(loss.lost_ns for loss in basis.losses) / 1000)} each"
    if not basis.own.on_device:
        return f"{head}: the next operator started when the call ended, and nothing else ran meanwhile."
    if basis.blocks_backward:
        return f"{head}: the backward pass waited, though it does not need the result."
    if basis.roles <= {"activation"}:
        return f"{head}.{_next_kernel(basis)} No other computation was there to run."
    return f"{head}.{_next_kernel(basis)} No computation of the {basis.pass_in_words} was left to hide it."


def _next_kernel(basis: Basis) -> str:
    """Returns a sentence about the kernels that waited for the calls; empty if their launches are unknown."""
    own, exposed = basis.own, basis.view.exposure.exposed
    after = [
        (int(own.work.start_ns[loss.work] - own.calls[loss.call].end_ns), loss.work)
        for loss in basis.losses
        if loss.work is not None and loss.call is not None and exposed[loss.call].ended_by == loss.call
    ]
    waited = [(gap, work) for gap, work in after if 0 <= gap <= AT_ONCE_NS and own.work.launch_ns[work] != NEVER]
    if not waited:
        return ""
    ahead = median(int(own.work.start_ns[work] - own.work.launch_ns[work]) for _, work in waited) / 1000
    gap = median(gap for gap, _ in waited) / 1000
    # A host that is ahead by more than a step has launched it in an earlier one.
    steps = ahead / basis.step_us if basis.step_us else 0.0
    before = as_time(ahead) if steps <= 1 else f"{steps:.1f} steps"
    launched, started = f"launched {before} before", f"started {as_time(gap)} after the call ended"
    return f" The next kernel waited for it: {launched}, it {started}."


CAUSE = Cause(
    order=10,
    meaning="the next kernel needs it, it was launched at once, and there was nothing else to run",
    evidence=evidence,
    exposed=Rule(80, rest),
    is_exposed=True,
)
