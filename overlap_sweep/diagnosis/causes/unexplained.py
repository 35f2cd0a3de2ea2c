"""The device ran nothing, though what ran next had been launched: what it waited for is not in the trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import LATENCY_NS, NEVER, Cause, Loss, as_time, counted

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.host import Stall
    from overlap_sweep.diagnosis.losses import RankView


def stalls_without_cause(view: RankView) -> Iterator[Loss]:
    for i, lost_ns in enumerate(view.exposure.unexplained_ns.tolist()):
        stall = view.facts.stalls[i]
        if lost_ns >= LATENCY_NS:
            where = f"{stall.after} (stream {stall.stream})"
            yield Loss(lost_ns, step=view.step_at(stall.end_ns), stall=i, where=where)


def _stalls(basis: Basis) -> list[Stall]:
    lost = sorted(basis.losses, key=lambda loss: -loss.lost_ns)
    return [basis.own.stalls[loss.stall] for loss in lost if loss.stall is not None]


def evidence(basis: Basis) -> str:
    first, count = _stalls(basis)[0], round(basis.per_step(len(basis.losses)), 1)
    ahead = (
        "whose launch is not recorded"
        if first.launch_ns == NEVER
        else f"launched {as_time((first.end_ns - first.launch_ns) / 1000)} before it started"
    )
    holds_back = f", after a call of {first.holds_back}" if first.holds_back else ""
    return (
        f"Nothing runs on the device {counted(count, 'time')} per step, for up to {as_time(basis.longest_us)}. Then "
        f"{first.after} runs on stream {first.stream}, {ahead}{holds_back}; {first.before} had ended. What the device "
        "waited for is not in the trace."
    )


CAUSE = Cause(
    order=110,
    meaning="nothing runs, though the next kernel had been launched",
    evidence=evidence,
    others=stalls_without_cause,
    conditions={
        "cudaLaunchHostFunc": lambda basis: any(stall.holds_back == "cudaLaunchHostFunc" for stall in _stalls(basis))
    },
    # Many short pauses say nothing.
    least_share=0.02,
)
