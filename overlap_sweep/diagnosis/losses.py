"""Asks the rules of all causes what each rank lost, and to which cause.

Each nanosecond is given to one cause, but for what `dependency` and `issued_late` both are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.diagnosis.cause import Rule
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.causes.repeated_reduction import repeated_reductions
from overlap_sweep.diagnosis.loss import Loss
from overlap_sweep.diagnosis.rank import RankView
from overlap_sweep.diagnosis.times import ExposedTime, IdleTime

_EXPOSED = sorted(((one.name, one.exposed) for one in CAUSES.values() if one.exposed), key=lambda pair: pair[1].order)
_IDLE = sorted(((one.name, rule) for one in CAUSES.values() for rule in one.idle), key=lambda pair: pair[1].order)


def losses_of(view: RankView) -> list[Loss]:
    """Returns the losses of one rank."""
    return [*_of_idle_time(view), *_of_rank(view), *_of_exposed_time(view)]


def _of_rank(view: RankView) -> Iterator[Loss]:
    for cause in CAUSES.values():
        for loss in cause.of_rank(view) if cause.of_rank else ():
            step = loss.step if loss.call is None else view.facts.calls[loss.call].step
            yield replace(loss, cause=cause.name, step=step)


def _of_exposed_time(view: RankView) -> Iterator[Loss]:
    repeated = view.once(repeated_reductions)
    for i in range(len(view.facts.calls)):
        if i not in repeated and (hiding := view.hiding_of(i)):
            hiding.comm_ns += view.moving_ns[i]
    for i, call in enumerate(view.facts.calls):
        if not call.is_in_step:
            # What waits in a barrier between two steps delays neither.
            continue
        exposed, waiting, exposed_ns = view.exposure.exposed.get(i), view.waitings.get(i), 0.0
        if exposed:
            pieces = waiting.rest if waiting else exposed.pieces
            exposed_ns = float(sum(end - start for start, end in pieces))
            time = ExposedTime(view, exposed, exposed_ns, waiting.shares if waiting else ())
            yield from _explained(time, _EXPOSED)
        if hiding := view.hiding_of(i):
            hiding.used_ns += view.moving_ns[i] - exposed_ns
            hiding.last_launch_ns = call.launch_ns if call.launch_ns != NEVER else call.start_ns


def _of_idle_time(view: RankView) -> Iterator[Loss]:
    """Yields what was lost while the host was late."""
    waits = view.facts.waits
    to_come = sorted(range(len(waits)), key=lambda i: waits[i].end_ns)[::-1]
    waited_ns: list[tuple[int, float]] = []
    for late, loading_ns in zip(view.exposure.late, view.exposure.loading_ns.tolist(), strict=True):
        launch = int(view.facts.work.launch_ns[late.work])
        while to_come and waits[to_come[-1]].end_ns <= max(launch, late.start_ns):
            ended = to_come.pop()
            waited_ns.append((ended, float(waits[ended].end_ns - waits[ended].start_ns)))
        time = IdleTime(view, late, late.idle_ns + late.comm_ns, loading_ns, waited_ns)
        yield from _explained(time, _IDLE)


def _explained(time: ExposedTime | IdleTime, rules: list[tuple[str, Rule[Any]]]) -> Iterator[Loss]:
    for cause, rule in rules:
        for part in rule.losses(time):
            if loss := time.take(cause, part):
                yield loss
