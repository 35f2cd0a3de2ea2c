"""The host waited for the device, and so launched late: idle time after a wait as far as its own length goes, the last
wait first; and calls that were launched right after it, or that it lasted for."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import END_OF_STEP, NEVER, UNBLOCKED_NS, Cause, Loss, Rule, as_time, counted, once
from overlap_sweep.diagnosis.causes.queue_order import queued_since

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.host import Wait
    from overlap_sweep.diagnosis.losses import ExposedTime, IdleTime, RankView

COPIED_NS = 300_000
"""Longest time from a collective's launch to its start in which only its buffer is filled: half a GB on an H200."""


def launched_after_wait(time: ExposedTime) -> Iterator[Loss]:
    """Yields the exposed time of calls that the host launched late, or that it waited for itself."""
    view, call, hiding = time.view, time.call, time.hiding
    if not hiding:
        return
    through = _waited_through(time)
    if through is not None:
        yield Loss(time.rest_ns, wait=through, numbers={"through_ns": time.rest_ns})
        return
    in_time = time.facts.on_device and call.launch_ns != NEVER and call.start_ns - call.launch_ns <= COPIED_NS
    if not in_time or time.blocks_backward or once(time, queued_since) is not None:
        return
    since = max(time.ready_ns, hiding.last_launch_ns or time.ready_ns)
    waited_ns = view.computed_while_waiting_ns(since, call.launch_ns)
    last = _last_wait(view, call.launch_ns)
    yield Loss(min(time.hideable_ns, waited_ns), wait=last, numbers={"waited_ns": waited_ns})


def _waited_through(time: ExposedTime) -> int | None:
    """Returns the wait of the host that lasted until a reduction of gradients ended, so that only then the next kernel
    of the backward pass was launched, which does not need it; None if there was none."""
    work, end_ns, blocked = time.facts.work, time.call.end_ns, time.exposed.first_blocked
    if time.role != "gradient" or blocked is None:
        return None
    if not time.view.is_backward(blocked) or work.launch_ns[blocked] <= end_ns:
        return None
    last = _last_wait(time.view, int(work.launch_ns[blocked]))
    if last is None:
        return None
    wait = time.facts.waits[last]
    return last if wait.start_ns < end_ns <= wait.end_ns + UNBLOCKED_NS else None


def _last_wait(view: RankView, moment_ns: int) -> int | None:
    waits, order = view.facts.waits, view.facts.waits_by_end
    ended = bisect_right(order, moment_ns, key=lambda i: waits[i].end_ns)
    return order[ended - 1] if ended else None


def idle_after_wait(time: IdleTime) -> Iterator[Loss]:
    """Yields the idle time after waits, as far as their own length goes, the last wait first."""
    while time.waited_ns and time.rest_ns > 0:
        last, left_ns = time.waited_ns.pop()
        lost_ns = min(time.rest_ns, left_ns)
        wait = time.view.facts.waits[last]
        about = END_OF_STEP if wait.ends_step else wait.operator or wait.name
        yield Loss(lost_ns, wait=last, about=about, where=(not wait.ends_step and wait.where) or about)
        if left_ns > lost_ns:
            time.waited_ns.append((last, left_ns - lost_ns))


def _waits(basis: Basis) -> list[Wait]:
    return [basis.own.waits[i] for i in dict.fromkeys(loss.wait for loss in basis.losses) if i is not None]


def evidence(basis: Basis) -> str:
    waits, calls = _waits(basis), basis.calls_in_words
    names = Counter(f"{w.name} ({w.operator})" if w.operator else w.name for w in waits).most_common(1)
    name = names[0][0] if names else "a call of the runtime"
    if any("through_ns" in loss.numbers for loss in basis.losses):
        return (
            f"Until {calls} had ended, the host waited for the device in {name}; only then it launched the "
            "next kernel of the backward pass, which does not need them."
        )
    if basis.calls:
        return (
            f"Before it launched {calls}, the host waited for the device in {name}; meanwhile "
            f"{as_time(median(basis.numbers_us('waited_ns')))} of computation ran that could have hidden each."
        )
    took = as_time(median(wait.end_ns - wait.start_ns for wait in waits) / 1000)
    if basis.about == END_OF_STEP:
        return (
            f"At the end of the step the host waits {took} for the device, in {name}; then the GPU has nothing to run "
            "until the host has launched the next step."
        )
    return (
        f"The host waits for the device {counted(round(basis.per_step(len(waits)), 1), 'time')} per step, {took} each, "
        f"in {name}; then the GPU has nothing to run until the host has launched more."
    )


def _waits_in(pattern: str) -> Callable[[Basis], bool]:
    """Returns the condition that the name of a wait, after what called it, has the pattern."""
    return lambda basis: any(re.search(pattern, f"{wait.operator or wait.name} {wait.name}") for wait in _waits(basis))


CAUSE = Cause(
    order=90,
    meaning="the host waits for the device in mid-step",
    evidence=evidence,
    exposed=Rule(40, launched_after_wait),
    idle=[Rule(20, idle_after_wait)],
    conditions={
        "item": _waits_in("aten::item|_local_scalar_dense"),
        "copy": _waits_in("^((cuda|hip)Memcpy|aten::(copy_|to|_to_copy) )"),
        "device_sync": _waits_in("DeviceSynchronize"),
        "end_of_step": lambda basis: basis.about == END_OF_STEP,
    },
)
