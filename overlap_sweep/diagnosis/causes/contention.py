"""Communication that is hidden, but slows the GEMMs next to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import Cause, Loss, as_time, counted, once
from overlap_sweep.diagnosis.causes.repeated_reduction import repeated_reductions

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import RankView


def slower_gemms(view: RankView) -> Iterator[Loss]:
    repeated = once(view, repeated_reductions)
    for i, slowed in view.slowed.items():
        if i not in repeated:
            numbers = {"alone_ns": slowed.alone_ns, "hidden_ns": slowed.hidden_ns}
            yield Loss(slowed.extra_ns, call=i, numbers=numbers)


def evidence(basis: Basis) -> str:
    alone, hidden = basis.sum_us("alone_ns"), basis.sum_us("hidden_ns")
    slower = basis.lost_us / alone if alone else 0.0
    times = f"{as_time(alone + basis.lost_us)} instead of {as_time(alone)} per step"
    net = hidden - basis.lost_us
    verdict = f"still gains {as_time(net)}" if net > 0 else f"costs {as_time(-net)} more than it gains"
    blocks = f" NCCL has {counted(basis.most_blocks, 'thread block')} for it." if basis.most_blocks else ""
    return (
        f"GEMMs next to it take {slower:.0%} longer than alone ({times}). Hiding {as_time(hidden)} of communication "
        f"{verdict}.{blocks}"
    )


CAUSE = Cause(
    order=100,
    meaning="hidden, but GEMMs beside it are slower than the same GEMMs alone",
    evidence=evidence,
    others=slower_gemms,
    # Their times also vary with clocks and power.
    least_total=0.05,
    least_total_on_cpu=0.05,
)
