"""Tells whether communication stood behind kernels of other streams, or held them back, though neither needs the other.

A device that has fewer hardware queues than streams starts kernels of different streams in the order of their launches
(CUDA_DEVICE_MAX_CONNECTIONS=1 is one queue). And a kernel that occupies all multiprocessors keeps others waiting until
it ends.
"""

from __future__ import annotations

import numpy as np

from overlap_sweep.diagnosis.calls import NEVER
from overlap_sweep.diagnosis.exposure import Exposed
from overlap_sweep.diagnosis.rank import TOGETHER_NS, RankView
from overlap_sweep.diagnosis.stalls import LATENCY_NS
from overlap_sweep.trace.activity import BWD, RECOMPUTE

IN_THE_END = 0.5
"""Part of a kernel's time after which its first blocks have left multiprocessors to others."""

CALLS_BEFORE = 64
"""Calls, or kernels, that are looked at for what a call waited for."""


def queued_since(view: RankView, index: int) -> int | None:
    """Returns when a call could have started that stood behind kernels of other streams; None if it did not.

    What is launched right before the call on a stream that does not compute, such as a copy into its buffer, is part of
    it. If all streams share a queue, a call that starts when the kernel launched before it ends may need that kernel;
    one that starts while that still runs does not need it, and has waited for the queue. If they don't, a call that is
    ready while a kernel runs, and starts only in the end of that kernel, has waited for its multiprocessors.
    """
    work, call, role = view.facts.work, view.facts.calls[index], view.roles[index]
    if not view.facts.on_device or call.launch_ns == NEVER or call.lane in view.compute_lanes:
        return None
    if not call.group:
        # Parts of a GEMM's own exchange, such as userbuffers', wait for its chunks.
        return None
    place = int(np.searchsorted(work.launch_ns, call.launch_ns, sorter=view.by_launch))
    if place < len(work) and work.launch_ns[view.by_launch[place]] == call.launch_ns:
        # In a CUDA graph, whose launch tells no order.
        return None
    if not view.one_queue:
        return _occupied_since(view, index)
    start, ready, with_copies = call.start_ns, _ready_ns(view, index), False
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
        return ready if with_copies and role == "parameter" else None
    # An activation may have waited for the kernel before that one, which ended when that one started.
    return ready if role != "activation" or start - first > LATENCY_NS else None


def _occupied_since(view: RankView, index: int) -> int | None:
    """Returns when a call was ready that started only in the end of a kernel that had run all the time since; None if
    there was none.

    Copies into the call's buffer, on streams that don't compute, must have ended.
    """
    work, call = view.facts.work, view.facts.calls[index]
    ready = _ready_ns(view, index)
    beyond = int(np.searchsorted(work.start_ns, call.start_ns))
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


def _ready_ns(view: RankView, index: int) -> int:
    """Returns when a call had been launched, and what had been launched before it on its stream or in its process
    group, where NCCL keeps the order, had ended."""
    calls, call = view.facts.calls, view.facts.calls[index]
    ready = call.launch_ns
    for other in calls[max(0, index - CALLS_BEFORE) : index]:
        same = other.lane == call.lane or (other.group == call.group and other.group)
        if same and other.launch_ns < call.launch_ns and other.end_ns <= call.start_ns + LATENCY_NS:
            ready = max(ready, other.end_ns)
    return min(ready, call.start_ns)


def holds_back_backward(view: RankView, exposed: Exposed) -> bool:
    """Returns whether the backward pass waited for a reduction of gradients, which it does not need.

    Its first kernel to start was launched right after the call, or right after a later one that waited for this one.
    """
    work, call = view.facts.work, view.facts.calls[exposed.call]
    blocked = exposed.first_blocked
    if blocked is None or exposed.ended_by is None or call.launch_ns == NEVER:
        return False
    if work.pass_[blocked] not in (BWD, RECOMPUTE) or view.roles[exposed.ended_by] != "gradient":
        return False
    launch = int(work.launch_ns[blocked])
    if view.facts.on_device and launch > call.end_ns:
        return False
    launches = (other.launch_ns for other in view.facts.calls[exposed.call :])
    last = max((at for at in launches if call.launch_ns <= at < launch), default=NEVER)
    if last == NEVER:
        return False
    first, beyond = np.searchsorted(work.launch_ns, (last, launch), sorter=view.by_launch)
    return bool(beyond - first <= 1)
