"""The GPU had nothing to run because the host launched late, without having waited for the device. As far as the host
paused, starting nothing for long, the finding says where it was."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import MENTIONED, MUCH, NEVER, PAUSE_NS, Cause, Loss, Rule, as_time, counted

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import IdleTime

_ALLOCATES = re.compile(r"inside (cuda|hip)(Malloc|Free)\b")

PAUSES = "pauses"
"""What a finding is about if the host started nothing for long."""


def paused(time: IdleTime) -> Iterator[Loss]:
    late, pauses = time.late, time.view.facts.pauses
    if not time.pauses:
        return
    # What a wait at the end of a step costs comes first: starting the next step takes time in any case.
    waits = [time.view.facts.waits[i] for i, _ in time.waited_ns]
    ended = [wait.ends_step and wait.end_ns > late.start_ns for wait in waits]
    waited_ns = sum(left for _, left in time.waited_ns[ended.index(True) :]) if any(ended) else 0.0
    for i in time.pauses:
        start_ns, end_ns = max(pauses[i].start_ns, late.start_ns), min(pauses[i].end_ns, late.end_ns)
        lost_ns = min(time.view.host_late.between(start_ns, end_ns), time.rest_ns - waited_ns)
        loading_ns = lost_ns if pauses[i].loads else 0.0
        if lost_ns > 0:
            time.loading_ns -= loading_ns
            numbers = {"loading_ns": loading_ns}
            yield Loss(lost_ns, pause=i, about=PAUSES, where=pauses[i].place, numbers=numbers, makes_late=True)


def launched_late(time: IdleTime) -> Iterator[Loss]:
    loading_ns = min(time.rest_ns, max(0.0, time.loading_ns))
    is_long = time.late.end_ns - time.late.start_ns > PAUSE_NS
    yield Loss(time.rest_ns, numbers={"loading_ns": loading_ns}, makes_late=is_long)


def _loading_share(basis: Basis) -> float:
    """Returns the share of the time lost in which the host waited for a DataLoader's next batch."""
    return basis.sum_us("loading_ns") / basis.sum_lost_us if basis.losses else 0.0


def _loading(basis: Basis) -> str:
    share, each = _loading_share(basis), as_time(basis.sum_us("loading_ns"))
    if share < MENTIONED:
        return ""
    return f" In {share:.0%} of that time the host waits for a DataLoader's next batch, for {each} per step."


def _paused_ns(basis: Basis) -> Counter[str]:
    found: Counter[str] = Counter()
    for loss in basis.losses:
        if loss.pause is not None:
            found[basis.own.pauses[loss.pause].place] += round(loss.lost_ns)
    return found


def _pauses(basis: Basis) -> str:
    """Returns where the host was while it started nothing, the two places of most time."""
    paused_ns = _paused_ns(basis)
    most = [
        f"{place} for {as_time(basis.per_step(ns) / 1000)} per step"
        for place, ns in paused_ns.most_common(2)
        if ns >= MENTIONED * paused_ns.total()
    ]
    times = counted(round(basis.per_step(len({loss.pause for loss in basis.losses})), 1), "time")
    idle = "the GPU has nothing to run" if basis.own.on_device else "nothing runs"
    where = f"it is {', '.join(most)}." if most else "in many places, each for little of it."
    return (
        f"{times} per step, for up to {as_time(basis.longest_us)}, {idle} because the host starts nothing: {where}"
        f"{_loading(basis)}"
    )


KINDS_OF_PAUSES = ("named", "unnamed", "stalled", "allocates")


def kind_of_pause(place: str) -> str:
    """Returns `unnamed` for a place that is only what ran before and after, `stalled` for one inside of an operator,
    which nothing in the program makes long, or `allocates` if that asks the driver for memory; else `named`."""
    if _ALLOCATES.match(place):
        return "allocates"
    return {"between": "unnamed", "inside": "stalled"}.get(place.split()[0], "named")


def evidence(basis: Basis) -> str:
    if basis.about == PAUSES:
        return _pauses(basis)
    loading, work, steady = _loading(basis), basis.own.work, basis.own.is_steady
    gaps = (
        f"{counted(round(basis.per_step(len(basis.losses))), 'time')} per step, for up to {as_time(basis.longest_us)}"
    )
    took_us = median((work.end_ns - work.start_ns)[steady].tolist()) / 1000
    took = as_time(took_us)
    if not basis.own.on_device:
        return f"{gaps}, neither computation nor communication runs; operators take {took} (median).{loading}"
    launches = sorted(work.launch_ns[steady & (work.launch_ns != NEVER)].tolist())
    every_us = median(b - a for a, b in pairwise(launches)) / 1000 if len(launches) > 1 else 0.0
    if every_us <= took_us:
        return (
            f"The GPU has nothing to run {gaps}, though most kernels are launched in time (they take {took}, median)."
            f"{loading}"
        )
    return (
        f"The GPU has nothing to run {gaps}: kernels take {took}, and the host launches one every {as_time(every_us)} "
        f"(medians).{loading}"
    )


def _pauses_are(kind: str) -> Callable[[Basis], bool]:
    """Returns the condition that the longest pauses are of a kind, as of `kind_of_pause`."""
    return lambda basis: basis.about == PAUSES and kind_of_pause(_paused_ns(basis).most_common(1)[0][0]) == kind


CAUSE = Cause(
    order=80,
    meaning="the device waits for launches",
    evidence=evidence,
    idle=[Rule(10, paused), Rule(30, launched_late)],
    conditions={
        "loading": lambda basis: _loading_share(basis) >= MUCH,
        "pauses": lambda basis: basis.about == PAUSES,
        **{kind: _pauses_are(kind) for kind in KINDS_OF_PAUSES},
    },
    # The time between operators on a CPU is Python's.
    least_total_on_cpu=0.2,
)
