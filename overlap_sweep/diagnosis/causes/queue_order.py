"""Communication stood behind kernels of other streams, or held them back, though neither needs the other: streams share
a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), or a kernel occupies all multiprocessors until it ends."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import LATENCY_NS, NEVER, TOGETHER_NS, Cause, Loss, Rule, as_time, once

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime

IN_THE_END = 0.5
"""Part of a kernel's time after which its first blocks have left multiprocessors to others."""

CALLS_BEFORE = 64
"""Calls, or kernels, that are looked at for what a call waited for."""


def queued(time: ExposedTime) -> Iterator[Loss]:
    view, call = time.view, time.call
    if time.blocks_backward:
        if time.facts.on_device and view.one_queue and call.lane not in view.compute_lanes:
            yield Loss(time.rest_ns, numbers={"blocked_ns": time.rest_ns})
        return
    since = once(time, queued_since) if time.rest_ns else None
    if since is not None:
        behind_ns = view.exposure.compute.between(since, call.start_ns)
        ready_ns, one_queue = float(call.start_ns - since), float(view.one_queue)
        numbers = {"behind_ns": behind_ns, "ready_ns": ready_ns, "one_queue": one_queue}
        yield Loss(min(time.hideable_ns, behind_ns), numbers=numbers)


def queued_since(time: ExposedTime) -> int | None:
    """Returns when a call could have started that stood behind kernels of other streams; None if it did not.

    What is launched right before the call on a stream that does not compute, such as a copy into its buffer, is part of
    it. If all streams share a queue, a call that starts when the kernel launched before it ends may need that kernel;
    one that starts while that still runs does not need it, and has waited for the queue. If they don't, a call that is
    ready while a kernel runs, and starts only in the end of that kernel, has waited for its multiprocessors.
    """
    view, work, call = time.view, time.facts.work, time.call
    if not view.facts.on_device or call.launch_ns == NEVER or call.lane in view.compute_lanes:
        return None
    if not call.group:
        # Parts of a GEMM's own exchange, such as userbuffers', wait for its chunks.
        return None
    place = int(work.launch_ns.searchsorted(call.launch_ns, sorter=view.by_launch))
    if place < len(work) and work.launch_ns[view.by_launch[place]] == call.launch_ns:
        # In a CUDA graph, whose launch has no order.
        return None
    if not view.one_queue:
        return _occupied_since(time)
    start, ready, with_copies = call.start_ns, _ready_ns(time), False
    before = None
    while place > 0:
        place -= 1
        other = int(view.by_launch[place])
        if int(work.lane[other]) in view.compute_lanes:
            before = other
            break
        end = int(work.end_ns[other])
        if end <= start + TOGETHER_NS and start - end <= LATENCY_NS:
            start, ready, with_copies = int(work.start_ns[other]), int(work.launch_ns[other]), True
    if before is None or start - ready <= LATENCY_NS or work.launch_ns[before] == NEVER:
        return None
    first, last = int(work.start_ns[before]), int(work.end_ns[before])
    if start >= last - TOGETHER_NS:
        # Parameters are copied on a stream of their own, which needs nothing of what computes.
        return ready if with_copies and time.role == "parameter" else None
    # An activation may have waited for the kernel before that one, which ended when that one started.
    return ready if time.role != "activation" or start - first > LATENCY_NS else None


def _occupied_since(time: ExposedTime) -> int | None:
    """Returns when a call was ready, copies into its buffer done, that started only in the end of a kernel that had run
    all the time since; None if there was none."""
    view, work, call = time.view, time.facts.work, time.call
    ready = _ready_ns(time)
    beyond = int(work.start_ns.searchsorted(call.start_ns))
    running = None
    for other in range(beyond - 1, max(-1, beyond - 1 - CALLS_BEFORE), -1):
        if int(work.lane[other]) not in view.compute_lanes:
            if work.launch_ns[other] <= call.launch_ns and work.end_ns[other] <= call.start_ns:
                ready = max(ready, int(work.end_ns[other]))
        elif work.end_ns[other] > call.start_ns + TOGETHER_NS and running is None:
            running = other
    if running is None or call.start_ns - ready <= LATENCY_NS or work.start_ns[running] > ready + LATENCY_NS:
        return None
    took = work.end_ns[running] - work.start_ns[running]
    return ready if call.start_ns - work.start_ns[running] >= IN_THE_END * took else None


def _ready_ns(time: ExposedTime) -> int:
    """Returns when a call had been launched, and what had been launched before it on its stream or in its process
    group, where NCCL keeps the order, had ended."""
    calls, call, index = time.facts.calls, time.call, time.index
    ready = call.launch_ns
    for other in calls[max(0, index - CALLS_BEFORE) : index]:
        same = other.lane == call.lane or (other.group == call.group and other.group)
        if same and other.launch_ns < call.launch_ns and other.end_ns <= call.start_ns + LATENCY_NS:
            ready = max(ready, other.end_ns)
    return min(ready, call.start_ns)


def is_occupied(basis: Basis) -> bool:
    """Returns whether calls waited for multiprocessors that other kernels occupied, rather than in a queue."""
    return any(loss.numbers.get("one_queue") == 0.0 for loss in basis.losses)


def evidence(basis: Basis) -> str:
    if basis.blocks_backward:
        work = basis.own.work
        late = [loss.work for loss in basis.losses if loss.work is not None]
        ahead = median((work.start_ns[late] - work.launch_ns[late]).tolist()) / 1000
        return (
            f"The backward pass waited for {basis.calls_in_words}, whose result it does not need: its next kernel, "
            f"launched {as_time(ahead)} before, started when the call ended."
        )
    ready, behind = (as_time(median(basis.numbers_us(name))) for name in ("ready_ns", "behind_ns"))
    head = f"{basis.calls_in_words} started {ready} after they were launched, though their stream was free"
    if is_occupied(basis):
        return f"{head}: when a kernel of another stream ended, which had run for {behind} of it."
    return f"{head}; other kernels ran for {behind} of it, and none overtook another, as if all streams shared a queue."


CAUSE = Cause(
    order=30,
    meaning="launched in time, but it stood behind kernels of other streams",
    evidence=evidence,
    exposed=Rule(50, queued),
    conditions={"occupied": is_occupied},
    is_exposed=True,
)
