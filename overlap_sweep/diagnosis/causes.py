"""Decides for every exposed collective, and every time that the host was late, what caused it.

Each nanosecond is given to one cause, but for one case. Of a collective that held back computation first comes the time
in which it waited for the last rank (`straggler`, `lateness.py`), or in which it was late itself because collectives
before it had waited for a rank that is late more often than others. What remains, the transfer, depends on its role
(`roles.py`):

- Activations: `queue_order` as far as it stood behind kernels that it does not need (`queues.py`). What remains is
  `bandwidth` if computation ran next to a good part of it, but ended before it, else `dependency`.
- Gradients that the host waited for before it launched more of the backward pass, which does not need them:
  `host_sync`.
- Parameters and gradients could have run next to the computation of their pass that came before. As far as there was
  such computation that no other communication used, an earlier start would have hidden them. Either the collective was
  launched in time but stood behind kernels of other streams (`queue_order`), or the host waited for the device before
  it launched it (`host_sync`), or it was launched, or placed behind other work, too late (`issued_late`). A reduction
  of gradients may hold back the backward pass, which does not need it: if all streams share a queue, that is
  `queue_order`, else the program waits for it. Then two causes fit, and both are given all of it: `dependency`, as the
  program made one, and `issued_late`, as another order of hooks would hide it.
- Gradients that a later backward pass reduces again before the optimizer's step (`repeated.py`): `repeated_reduction`,
  before all of these.
- Of many collectives that are so small that their time is latency (`latency.py`), what merging them could save is
  `latency`, before all of these.
- What no computation could have hidden: `bandwidth`, as far as a pass has more communication than computation, else
  `dependency`.

Time in which the host was late is `host_bound` as far as it paused (`pauses.py`), then `host_sync` as far as the host's
waits for the device before took its time, else `host_bound`. Time in which the device ran nothing, though what ran next
had been launched, is `unexplained`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from overlap_sweep.diagnosis import Cause
from overlap_sweep.diagnosis.calls import NEVER
from overlap_sweep.diagnosis.exposure import UNBLOCKED_NS, Exposed, Late, Measure
from overlap_sweep.diagnosis.latency import Small, small_calls
from overlap_sweep.diagnosis.lateness import NOTHING_MORE, UNKNOWN_RANK, Waiting, Why
from overlap_sweep.diagnosis.pauses import PAUSE_NS
from overlap_sweep.diagnosis.queues import holds_back_backward, queued_since
from overlap_sweep.diagnosis.rank import Hiding, RankView
from overlap_sweep.diagnosis.roles import Role
from overlap_sweep.diagnosis.stalls import LATENCY_NS
from overlap_sweep.trace.activity import BWD, NO_ITERATION, RECOMPUTE

COPIED_NS = 300_000
"""Longest time from a collective's launch to its start in which only its buffer is filled: half a GB on an H200."""

PARTLY_HIDDEN = 0.2
"""Least part of a collective of activations that computation hides for the rest to be too long rather than needed."""


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
    pause: int | None = None
    """Index into the rank's pauses."""
    work: int | None = None
    """Index of the work that was late."""
    stall: int | None = None
    """Index into the rank's stalls."""
    late_rank: int = UNKNOWN_RANK
    """Of a straggler: index of the rank that is waited for."""
    in_turn: bool = False
    """Of a straggler: whether the ranks of the process group are late in turn."""
    why: Why = NOTHING_MORE
    """Of a straggler: what that rank did more."""
    role: Role | None = None
    """What the call carries."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What decided, for the evidence."""


class _Split:
    """The exposed time of one call, which is given away to causes."""

    def __init__(self, view: RankView, exposed: Exposed, pieces: list[tuple[int, int]]) -> None:
        self.rest_ns = float(sum(end - start for start, end in pieces))
        self.losses: list[Loss] = []
        self._exposed, self._role = exposed, view.roles[exposed.call]
        self._step = view.facts.calls[exposed.call].step

    def give(self, cause: Cause, lost_ns: float, *, wait: int | None = None, **numbers: float) -> float:
        """Gives at most this much to a cause; returns how much. `wait`: the wait of the host that caused it."""
        lost_ns = max(0.0, min(lost_ns, self.rest_ns))
        if lost_ns:
            self.losses.append(
                Loss(
                    *(cause, self._step, lost_ns, self._exposed.call, wait),
                    work=self._exposed.first_blocked,
                    role=self._role,
                    numbers=numbers,
                )
            )
            self.rest_ns -= lost_ns
        return lost_ns


def losses_of(view: RankView) -> list[Loss]:
    """Returns the losses of one rank."""
    losses = [*_late_losses(view), *_unexplained_losses(view)]
    small = small_calls(view)
    launched_before: dict[int, int] = {}
    delays: dict[str, _Delay] = {}
    for i, call in enumerate(view.facts.calls):
        if call.step == NO_ITERATION:
            # What waits in a barrier between two steps delays neither.
            continue
        exposed, hiding = view.exposure.exposed.get(i), view.hiding_of(i)
        delay = _delay_before(view, i, delays.get(call.group))
        waited_ns = exposed_ns = 0.0
        if exposed:
            waiting = view.waitings.get(i)
            straggler = _straggler(view, i, waiting) if waiting else []
            waited_ns = sum(loss.lost_ns for loss in straggler)
            split = _Split(view, exposed, waiting.rest if waiting else exposed.pieces)
            exposed_ns = split.rest_ns
            if delay and split.rest_ns and delay.left_ns:
                pushed = min(split.rest_ns, delay.left_ns)
                straggler.append(Loss("straggler", call.step, pushed, i, late_rank=delay.late_rank))
                split.rest_ns -= pushed
                delay.left_ns -= pushed
            if i in view.repeated:
                split.give("repeated_reduction", split.rest_ns, passes=float(view.repeated[i]))
            if i in small:
                _give_to_latency(view, exposed, split, small[i])
            if hiding:
                _split_hideable(view, exposed, hiding, split, launched_before.get(id(hiding)))
            else:
                _split_activation(view, exposed, split)
            losses += straggler + split.losses
        delays[call.group] = _delay_after(view, i, delay, waited_ns)
        if hiding:
            hiding.used_ns += view.moving_ns(i) - exposed_ns
            launched_before[id(hiding)] = call.launch_ns if call.launch_ns != NEVER else call.start_ns
    return losses


@dataclass
class _Delay:
    """How much later the calls of a group end because some of them waited for a straggler while computation ran."""

    end_ns: int
    """End of the last call."""
    left_ns: float = 0.0
    """Part that has cost nothing so far."""
    late_rank: int = UNKNOWN_RANK


def _delay_before(view: RankView, index: int, before: _Delay | None) -> _Delay | None:
    """Returns the delay that a call takes over, because it was launched before the one before it had ended."""
    call = view.facts.calls[index]
    follows = before and call.group and call.launch_ns < before.end_ns and call.start_ns <= before.end_ns + LATENCY_NS
    return before if follows else None


def _delay_after(view: RankView, index: int, delay: _Delay | None, waited_ns: float) -> _Delay:
    """Returns the delay of what follows a call. `waited_ns`: its waiting for a straggler that was exposed."""
    call, late = view.facts.calls[index], int(view.late_rank[index])
    after = _Delay(call.end_ns, delay.left_ns, delay.late_rank) if delay else _Delay(call.end_ns)
    if (call.group, late) in view.stragglers and int(view.last_ns[index]) > call.start_ns:
        after.left_ns += max(0.0, float(view.last_ns[index] - call.start_ns) - waited_ns)
        after.late_rank = late
    return after


def _straggler(view: RankView, index: int, waiting: Waiting) -> list[Loss]:
    """Returns the losses to the ranks that a call waited for."""
    call = view.facts.calls[index]
    return [
        Loss(
            *("straggler", call.step, share.waited_ns, index),
            late_rank=share.root,
            in_turn=(call.group, share.root) not in view.stragglers,
            why=share.why,
        )
        for share in waiting.shares
    ]


def _give_to_latency(view: RankView, exposed: Exposed, split: _Split, small: Small) -> None:
    """Gives what would be saved if one call did the work of all: their latency but once."""
    call = view.facts.calls[exposed.call]
    latency_ns = min(split.rest_ns, call.end_ns - call.start_ns - small.transfer_ns)
    split.give(
        *("latency", latency_ns * (1 - 1 / small.num_calls)),
        took_ns=float(call.end_ns - call.start_ns),
        transfer_ns=small.transfer_ns,
        rate_gbs=small.rate_gbs,
        num_calls=float(small.num_calls),
    )


def _split_activation(view: RankView, exposed: Exposed, split: _Split) -> None:
    since = queued_since(view, exposed.call) if split.rest_ns else None
    if since is not None:
        _give_to_queue(view, exposed, split, since, split.rest_ns)
    moving = view.moving_ns(exposed.call)
    if view.facts.calls[exposed.call].group and moving - split.rest_ns >= PARTLY_HIDDEN * moving:
        split.give("bandwidth", split.rest_ns, comm_ns=moving, compute_ns=moving - split.rest_ns)
    split.give("dependency", split.rest_ns)


def _give_to_queue(view: RankView, exposed: Exposed, split: _Split, since_ns: int, most_ns: float) -> float:
    start_ns = view.facts.calls[exposed.call].start_ns
    behind = view.exposure.compute.between(since_ns, start_ns)
    return split.give(
        *("queue_order", min(most_ns, behind)),
        behind_ns=behind,
        ready_ns=float(start_ns - since_ns),
        one_queue=float(view.one_queue),
    )


def _split_hideable(
    view: RankView, exposed: Exposed, hiding: Hiding, split: _Split, launched_before_ns: int | None
) -> None:
    call, role = view.facts.calls[exposed.call], view.roles[exposed.call]
    through = _waited_through(view, exposed) if role == "gradient" else None
    if through is not None:
        split.give("host_sync", split.rest_ns, wait=through, through_ns=split.rest_ns)
        return
    if role == "gradient" and holds_back_backward(view, exposed):
        lost_ns = split.rest_ns
        if view.facts.on_device and view.one_queue and call.lane not in view.compute_lanes:
            split.give("queue_order", lost_ns, blocked_ns=lost_ns)
        else:
            split.give("issued_late", lost_ns, blocked_ns=lost_ns)
            split.rest_ns = lost_ns
            split.give("dependency", lost_ns, blocked_ns=lost_ns)
        return
    compute = view.exposure.compute
    # Parameters are there only after the optimizer's step.
    starts = call.start_ns if role == "parameter" and call.pass_ == "other" else hiding.start_ns
    available = max(0.0, compute.between(starts, call.start_ns) - hiding.used_ns)
    if role == "gradient" and call.pass_ == "bwd" and launched_before_ns is not None:
        # Its gradients were computed after those of the reduction before.
        available = min(available, compute.between(launched_before_ns, call.start_ns))
    could = min(split.rest_ns, available)
    hiding.used_ns += could
    since = queued_since(view, exposed.call)
    if since is not None:
        could -= _give_to_queue(view, exposed, split, since, could)
    elif view.facts.on_device and call.launch_ns != NEVER and call.start_ns - call.launch_ns <= COPIED_NS:
        waited = _both(compute, view.waits, max(starts, launched_before_ns or starts), call.launch_ns)
        could -= split.give("host_sync", min(could, waited), wait=_last_wait(view, call.launch_ns), waited_ns=waited)
    split.give("issued_late", could, available_ns=available)
    excess = max(0.0, hiding.comm_ns - hiding.compute_ns)
    split.give("bandwidth", excess, comm_ns=hiding.comm_ns, compute_ns=hiding.compute_ns)
    split.give("dependency", split.rest_ns)


def _waited_through(view: RankView, exposed: Exposed) -> int | None:
    """Returns the wait of the host that lasted until the call ended, so that only then the next kernel of the backward
    pass was launched; None if there was none."""
    work, call, blocked = view.facts.work, view.facts.calls[exposed.call], exposed.first_blocked
    if blocked is None or work.pass_[blocked] not in (BWD, RECOMPUTE) or work.launch_ns[blocked] <= call.end_ns:
        return None
    last = _last_wait(view, int(work.launch_ns[blocked]))
    if last is None:
        return None
    wait = view.facts.waits[last]
    return last if wait.start_ns < call.end_ns <= wait.end_ns + UNBLOCKED_NS else None


def _last_wait(view: RankView, moment_ns: int) -> int | None:
    """Returns the last wait of the host that ended before the moment."""
    ended = [i for i, wait in enumerate(view.facts.waits) if wait.end_ns <= moment_ns]
    return max(ended, key=lambda i: view.facts.waits[i].end_ns, default=None)


def _both(a: Measure, b: Measure, start_ns: int, end_ns: int) -> float:
    """Returns how long both run between two moments."""
    if end_ns <= start_ns or not len(b.union):
        return 0.0
    first, beyond = np.searchsorted(b.union[:, 1], start_ns, side="right"), np.searchsorted(b.union[:, 0], end_ns)
    return sum(a.between(max(start_ns, s), min(end_ns, e)) for s, e in b.union[first:beyond].tolist())


def _late_losses(view: RankView) -> list[Loss]:
    """Returns what was lost while the host was late: to its pauses, then to its waits for the device as far as these
    took its time, the last one first."""
    losses: list[Loss] = []
    waits = view.facts.waits
    order = sorted(range(len(waits)), key=lambda i: waits[i].end_ns)
    place = 0
    took: list[tuple[int, float]] = []
    """Waits so far, each with the part of its time to which nothing was lost yet."""
    paused_in = _paused_losses(view)
    for late, loading_ns in zip(view.exposure.late, view.exposure.loading_ns.tolist(), strict=True):
        launch = int(view.facts.work.launch_ns[late.work])
        while place < len(order) and waits[order[place]].end_ns <= max(launch, late.start_ns):
            wait = waits[order[place]]
            took.append((order[place], float(wait.end_ns - wait.start_ns)))
            place += 1
        step = _step_at(view, late.end_ns)
        lost = late.idle_ns + late.comm_ns
        # What a wait at the end of a step costs comes first: starting the next step takes time in any case.
        ended = [waits[i].ends_step and waits[i].end_ns > late.start_ns for i, _ in took]
        waited = sum(left for _, left in took[ended.index(True) :]) if any(ended) else 0.0
        paused = list(paused_in(late, lost - waited))
        lost -= sum(loss.lost_ns for loss in paused)
        loading_ns -= sum(loss.numbers["loading_ns"] for loss in paused)
        if not view.is_straggler:
            losses += paused
        while took and lost > 0:
            last, left = took.pop()
            synced = min(lost, left)
            losses.append(Loss("host_sync", step, synced, wait=last, work=late.work))
            lost -= synced
            if left > synced:
                took.append((last, left - synced))
        pauses = view.is_straggler and late.end_ns - late.start_ns > PAUSE_NS
        if lost > 0 and not pauses:
            numbers = {"loading_ns": min(lost, max(0.0, loading_ns))}
            losses.append(Loss("host_bound", step, lost, work=late.work, numbers=numbers))
    return losses


def _unexplained_losses(view: RankView) -> Iterator[Loss]:
    for i, lost_ns in enumerate(view.exposure.unexplained_ns.tolist()):
        if lost_ns >= LATENCY_NS:
            yield Loss("unexplained", _step_at(view, view.facts.stalls[i].end_ns), lost_ns, stall=i)


def _step_at(view: RankView, gap_end_ns: int) -> int:
    """Returns the step that a gap in the computation belongs to, given its end: that in which it is, even if the next
    one's first kernel ends it."""
    steps = view.facts.steps
    place = bisect_left(steps, gap_end_ns, key=lambda step: step.start_ns) - 1
    return steps[place].number if place >= 0 and gap_end_ns <= steps[place].end_ns else NO_ITERATION


def _paused_losses(view: RankView) -> Callable[[Late, float], Iterator[Loss]]:
    """Returns a function that yields what was lost to the host's pauses in one time in which it was late, at most so
    many nanoseconds."""
    idle, pauses = Measure(view.exposure.host_late), view.facts.pauses
    starts, ends = (np.array([getattr(pause, name) for pause in pauses]) for name in ("start_ns", "end_ns"))

    def paused_in(late: Late, most: float) -> Iterator[Loss]:
        first, beyond = np.searchsorted(ends, late.start_ns, "right"), np.searchsorted(starts, late.end_ns)
        for i in range(int(first), int(beyond)):
            lost = idle.between(max(pauses[i].start_ns, late.start_ns), min(pauses[i].end_ns, late.end_ns))
            lost = min(lost, most)
            if lost > 0:
                most -= lost
                numbers = {"loading_ns": lost if pauses[i].loads else 0.0}
                step = _step_at(view, late.end_ns)
                yield Loss("host_bound", step, lost, pause=i, work=late.work, numbers=numbers)

    return paused_in
