"""Decides for every exposed collective, and every time that the host was late, what caused it.

Each nanosecond is given to one cause. Of a collective that held back computation first comes the time in which it waited
for another rank (`straggler`). What remains depends on its role:

- Activations: `dependency`.
- Parameters and gradients could have run beside the computation of their pass that came before. As far as there was
  such computation, and as no other communication used it already, an earlier start would have hidden them. The
  collective was launched in time but stood behind kernels of other streams (`queue_order`), or the host waited for the
  device before it launched it (`host_sync`), or it was launched late (`issued_late`). If a gradient's reduction holds
  back the backward pass, which does not need it, that is `queue_order`, too.
- What no computation could have hidden: `bandwidth`, as far as a pass has more communication than computation, else
  `dependency`.

Time in which the host was late is `host_sync` as far as the host had waited for the device before, which had cost it its
lead, else `host_bound`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import Cause
from overlap_sweep.diagnosis.arrivals import Arrivals
from overlap_sweep.diagnosis.exposure import LATENCY_NS, Exposed, Exposure, Measure
from overlap_sweep.diagnosis.facts import NEVER, Call, RankFacts
from overlap_sweep.diagnosis.roles import Role, roles_of
from overlap_sweep.trace.activity import BWD, FWD, RECOMPUTE

TOGETHER_NS = 5_000
"""Longest time between the end of a kernel and the start of one that waited for it on another stream."""

MOSTLY = 0.6
"""Share of all waiting that one rank must have caused to be a straggler; else all ranks are late in turn."""

PAUSE_NS = 1_000_000
"""A host that launches nothing for longer does something else; if only one rank's does, it is a straggler."""

POINT_TO_POINT = ("send", "recv", "send_recv")
"""To wait for what another rank computes is their nature: nobody is late."""


@dataclass(frozen=True)
class Loss:
    """Time lost in one step of one rank. Nanoseconds."""

    cause: Cause
    step: int
    lost_ns: float
    call: int | None = None
    """Index into the rank's calls."""
    wait: int | None = None
    """Index into the rank's waits."""
    work: int | None = None
    """Index of the work that was late."""
    late_rank: int = -1
    """Of a straggler: index of the rank that started last."""
    role: Role | None = None
    """What the call carries."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What decided, for the evidence."""


@dataclass
class _Pass:
    """What one pass of one step has for hiding communication. Nanoseconds."""

    start_ns: int
    compute_ns: float
    comm_ns: float = 0.0
    """Communication that could be hidden, without waiting."""
    used_ns: float = 0.0
    """Computation that hid communication so far, or could have."""


def stragglers_of(
    facts: Sequence[RankFacts], exposures: Sequence[Exposure], arrivals: Arrivals
) -> set[tuple[str, int]]:
    """Returns the pairs of process group and index of a rank for which the group's other ranks wait."""
    waited: dict[str, Counter[int]] = defaultdict(Counter)
    for rank, exposure in enumerate(exposures):
        for i, exposed in exposure.exposed.items():
            call = facts[rank].calls[i]
            if call.collective not in POINT_TO_POINT:
                lost, _ = _waited(exposed, call, int(arrivals.last_ns[rank][i]))
                waited[call.group][int(arrivals.last_rank[rank][i])] += round(lost)
    return {
        (group, late)
        for group, by_rank in waited.items()
        for late, lost in by_rank.items()
        if lost and lost >= MOSTLY * by_rank.total()
    }


def losses_of(
    facts: RankFacts, exposure: Exposure, arrivals: Arrivals, rank: int, stragglers: set[tuple[str, int]]
) -> list[Loss]:
    """Returns the losses of one rank, `rank` being its index in `arrivals`. `stragglers` as of `stragglers_of`."""
    roles = roles_of(facts.calls)
    late_ranks = {late for _, late in stragglers}
    losses = list(_late_losses(facts, exposure, is_straggler=rank in late_ranks))
    passes = _passes(facts, exposure.compute, roles, arrivals, rank)
    waiting = Measure(np.array([(w.start_ns, w.end_ns) for w in facts.waits], np.int64).reshape(-1, 2))
    compute_lanes = _compute_lanes(facts)
    previous: dict[tuple[int, str], int] = {}
    for i, call in enumerate(facts.calls):
        exposed = exposure.exposed.get(i)
        if roles[i] == "activation":
            if exposed:
                losses += _of_activation(facts, exposure, exposed, compute_lanes, arrivals, rank, stragglers)
            continue
        key = call.step, _hiding_pass(call, roles[i])
        hiding = passes.get(key)
        if exposed and hiding:
            losses += _of_async(
                *(facts, exposure, exposed, roles, hiding, waiting, compute_lanes),
                *(arrivals, rank, stragglers, previous.get(key)),
            )
        elif exposed:
            losses += _of_activation(facts, exposure, exposed, compute_lanes, arrivals, rank, stragglers)
        if hiding:
            hiding.used_ns += _moving_ns(call, arrivals, rank, i) - _blocked_ns(exposed)
        previous[key] = call.launch_ns if call.launch_ns != NEVER else call.start_ns
    return losses


def _blocked_ns(exposed: Exposed | None) -> float:
    return float(sum(end - start for start, end in exposed.pieces)) if exposed else 0.0


def _moving_ns(call: Call, arrivals: Arrivals, rank: int, index: int) -> float:
    """Returns how long the call ran without waiting for other ranks, as far as their traces are there."""
    last = int(arrivals.last_ns[rank][index])
    return float(call.end_ns - (call.start_ns if last == NEVER else min(max(last, call.start_ns), call.end_ns)))


def _hiding_pass(call: Call, role: Role) -> str:
    """Returns the pass whose computation could hide the call."""
    if call.pass_ == "other":
        return "bwd" if role == "gradient" else "fwd"
    return call.pass_


_WORK_PASSES = {FWD: "fwd", BWD: "bwd", RECOMPUTE: "bwd"}


def _passes(
    facts: RankFacts, compute: Measure, roles: Sequence[Role], arrivals: Arrivals, rank: int
) -> dict[tuple[int, str], _Pass]:
    work = facts.work
    found: dict[tuple[int, str], _Pass] = {}
    for step in facts.steps:
        for name in ("fwd", "bwd"):
            codes = [code for code, of in _WORK_PASSES.items() if of == name]
            own = np.flatnonzero((work.step == step.number) & np.isin(work.pass_, codes))
            if len(own):
                length = Measure(work.intervals[own])
                start, end = int(work.start_ns[own].min()), int(work.end_ns[own].max())
                found[step.number, name] = _Pass(start, length.between(start, end))
    for i, call in enumerate(facts.calls):
        if roles[i] != "activation" and (hiding := found.get((call.step, _hiding_pass(call, roles[i])))):
            hiding.comm_ns += _moving_ns(call, arrivals, rank, i)
    return found


def _compute_lanes(facts: RankFacts) -> set[int]:
    """Returns the streams that do a good part of the computation."""
    lanes, place = np.unique(facts.work.lane, return_inverse=True)
    took = np.bincount(place, facts.work.end_ns - facts.work.start_ns, len(lanes))
    return {int(lane) for lane, ns in zip(lanes, took, strict=True) if ns > 0.1 * took.sum()}


def _waited(exposed: Exposed, call: Call, last_ns: int) -> tuple[float, list[tuple[int, int]]]:
    """Returns the exposed time before the last rank arrived, and the pieces after it."""
    if last_ns == NEVER or last_ns <= call.start_ns:
        return 0.0, exposed.pieces
    waited = sum(max(0, min(end, last_ns) - start) for start, end in exposed.pieces)
    rest = [(max(start, last_ns), end) for start, end in exposed.pieces if end > last_ns]
    return float(waited), rest


def _straggler(
    facts: RankFacts, exposed: Exposed, arrivals: Arrivals, rank: int, stragglers: set[tuple[str, int]]
) -> tuple[list[Loss], list[tuple[int, int]]]:
    """Returns the loss to a straggler, and the pieces of the exposed time that remain."""
    call = facts.calls[exposed.call]
    late = int(arrivals.last_rank[rank][exposed.call])
    if call.collective in POINT_TO_POINT or (call.group, late) not in stragglers:
        return [], exposed.pieces
    waited, rest = _waited(exposed, call, int(arrivals.last_ns[rank][exposed.call]))
    if not waited:
        return [], rest
    return [Loss("straggler", call.step, waited, exposed.call, late_rank=late)], rest


def _of_activation(
    facts: RankFacts,
    exposure: Exposure,
    exposed: Exposed,
    compute_lanes: set[int],
    arrivals: Arrivals,
    rank: int,
    stragglers: set[tuple[str, int]],
) -> list[Loss]:
    call = facts.calls[exposed.call]
    losses, rest = _straggler(facts, exposed, arrivals, rank, stragglers)
    lost = float(sum(end - start for start, end in rest))
    queued_since = _queued_since(facts, exposed.call, "activation", compute_lanes) if facts.on_device and lost else None
    if queued_since is not None:
        behind = exposure.compute.between(queued_since, call.start_ns)
        numbers = {"behind_ns": behind, "ready_ns": float(call.start_ns - queued_since)}
        queued = min(lost, behind)
        losses.append(
            Loss(
                *("queue_order", call.step, queued, exposed.call),
                work=exposed.first_blocked,
                role="activation",
                numbers=numbers,
            )
        )
        lost -= queued
    if lost > 0:
        losses.append(Loss("dependency", call.step, lost, exposed.call, work=exposed.first_blocked, role="activation"))
    return losses


def _of_async(
    facts: RankFacts,
    exposure: Exposure,
    exposed: Exposed,
    roles: Sequence[Role],
    hiding: _Pass,
    waiting: Measure,
    compute_lanes: set[int],
    arrivals: Arrivals,
    rank: int,
    stragglers: set[tuple[str, int]],
    previous_launch_ns: int | None,
) -> list[Loss]:
    call, role = facts.calls[exposed.call], roles[exposed.call]
    losses, pieces = _straggler(facts, exposed, arrivals, rank, stragglers)
    rest = float(sum(end - start for start, end in pieces))
    if not rest:
        return losses

    def give(cause: Cause, lost_ns: float, **numbers: float) -> None:
        nonlocal rest
        lost_ns = min(lost_ns, rest)
        if lost_ns > 0:
            losses.append(
                Loss(
                    *(cause, call.step, lost_ns, exposed.call),
                    work=exposed.first_blocked,
                    role=role,
                    numbers=numbers,
                )
            )
            rest -= lost_ns

    if role == "gradient" and _holds_back_backward(facts, exposed, roles):
        cause: Cause = "dependency" if call.lane in compute_lanes or not facts.on_device else "queue_order"
        give(cause, rest, blocked_ns=rest)
        return losses
    available = max(0.0, exposure.compute.between(hiding.start_ns, call.start_ns) - hiding.used_ns)
    could = min(rest, available)
    launch = call.launch_ns if call.launch_ns != NEVER else call.start_ns
    queued_since = _queued_since(facts, exposed.call, role, compute_lanes) if facts.on_device else None
    if queued_since is not None:
        behind = exposure.compute.between(queued_since, call.start_ns)
        queued = min(could, behind)
        give("queue_order", queued, behind_ns=behind, ready_ns=call.start_ns - queued_since)
        could -= queued
    elif facts.on_device and call.start_ns - launch <= LATENCY_NS:
        since = max(hiding.start_ns, previous_launch_ns or hiding.start_ns)
        waited = _both(exposure.compute, waiting, since, launch)
        synced = min(could, waited)
        give("host_sync", synced, waited_ns=waited)
        could -= synced
    give("issued_late", could, available_ns=available)
    hiding.used_ns += min(available, float(sum(end - start for start, end in pieces)) - rest)
    excess = max(0.0, hiding.comm_ns - hiding.compute_ns)
    give("bandwidth", min(rest, excess), comm_ns=hiding.comm_ns, compute_ns=hiding.compute_ns)
    give("dependency", rest)
    return losses


def _both(a: Measure, b: Measure, start: int, end: int) -> float:
    """Returns how long both run between two moments."""
    if end <= start or not len(b.union):
        return 0.0
    first, beyond = np.searchsorted(b.union[:, 1], start, side="right"), np.searchsorted(b.union[:, 0], end)
    return sum(a.between(max(start, int(s)), min(end, int(e))) for s, e in b.union[first:beyond])


def _queued_since(facts: RankFacts, index: int, role: Role, compute_lanes: set[int]) -> int | None:
    """Returns when a call could have started that stood behind kernels of other streams; None if it did not.

    A device that has fewer queues than streams starts kernels of different streams in the order of their launches. What
    is launched right before the call on a stream that does not compute, such as copying into its buffer, is part of it.
    A call that starts when the kernel launched before it ends may need that kernel; one that starts while it still runs
    does not, and has waited for the queue.
    """
    work, call = facts.work, facts.calls[index]
    if call.launch_ns == NEVER or call.lane in compute_lanes:
        return None
    order = _by_launch(facts)
    launch, start, lane = call.launch_ns, call.start_ns, call.lane
    ready = _ready_ns(facts, index)
    with_copies = False
    place = int(np.searchsorted(work.launch_ns[order], launch)) - 1
    while place >= 0:
        before = int(order[place])
        if int(work.lane[before]) in compute_lanes:
            break
        if work.end_ns[before] <= start + TOGETHER_NS and start - work.end_ns[before] <= LATENCY_NS:
            launch, start = int(work.launch_ns[before]), int(work.start_ns[before])
            lane, ready, with_copies = int(work.lane[before]), launch, True
        place -= 1
    if place < 0 or start - ready <= LATENCY_NS:
        return None
    before = int(order[place])
    first, last = int(work.start_ns[before]), int(work.end_ns[before])
    if start < first or work.launch_ns[before] == NEVER:
        return None
    if last - start > TOGETHER_NS:
        # Next to a kernel that it does not need. An activation may have waited for the kernel before that one.
        return ready if role != "activation" or start - first > LATENCY_NS else None
    return ready if with_copies and role == "parameter" else None


def _by_launch(facts: RankFacts) -> NDArray[np.intp]:
    """Returns the indices of work in the order of launches."""
    return np.argsort(facts.work.launch_ns, kind="stable")


def _ready_ns(facts: RankFacts, index: int) -> int:
    """Returns when a call had been launched, and what had been launched before it on its stream or in its process group,
    where NCCL keeps the order, had ended."""
    call = facts.calls[index]
    ready = call.launch_ns
    for other in facts.calls[max(0, index - 64) : index]:
        same = other.lane == call.lane or (other.group == call.group and other.group)
        if same and other.launch_ns < call.launch_ns and other.end_ns <= call.start_ns + LATENCY_NS:
            ready = max(ready, other.end_ns)
    return min(ready, call.start_ns)


def _holds_back_backward(facts: RankFacts, exposed: Exposed, roles: Sequence[Role]) -> bool:
    """Returns whether the backward pass waited for the call, though it does not need gradients of other ranks.

    Its first kernel to start was launched right after the call, or after a later one that waited for this one.
    """
    work, call = facts.work, facts.calls[exposed.call]
    blocked = exposed.first_blocked
    if blocked is None or exposed.ended_by is None or call.launch_ns == NEVER:
        return False
    if work.pass_[blocked] not in (BWD, RECOMPUTE) or roles[exposed.ended_by] != "gradient":
        return False
    launch = int(work.launch_ns[blocked])
    if facts.on_device and launch > call.end_ns:
        return False
    last = max((other.launch_ns for other in facts.calls if call.launch_ns <= other.launch_ns < launch), default=NEVER)
    between = (work.launch_ns > last) & (work.launch_ns < launch)
    return last != NEVER and int(between.sum()) <= 1


def _late_losses(facts: RankFacts, exposure: Exposure, *, is_straggler: bool) -> list[Loss]:
    """Returns what was lost while the host was late: to its waits for the device as far as these took its time."""
    losses: list[Loss] = []
    order = sorted(range(len(facts.waits)), key=lambda i: facts.waits[i].end_ns)
    place, last_wait = 0, None
    budget = 0.0
    for late in exposure.late:
        launch = int(facts.work.launch_ns[late.work])
        while place < len(order) and facts.waits[order[place]].end_ns <= max(launch, late.start_ns):
            wait = facts.waits[order[place]]
            budget += wait.end_ns - wait.start_ns
            last_wait = order[place]
            place += 1
        step = int(facts.work.step[late.work])
        lost = late.idle_ns + late.comm_ns
        synced = min(lost, budget) if last_wait is not None else 0.0
        if synced > 0:
            budget -= synced
            losses.append(Loss("host_sync", step, synced, wait=last_wait, work=late.work))
        pauses = is_straggler and late.end_ns - late.start_ns > PAUSE_NS
        if lost > synced and not pauses:
            losses.append(Loss("host_bound", step, lost - synced, work=late.work))
    return losses
