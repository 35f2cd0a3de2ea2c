"""Ranks waited for one that was late: always the same one, or in turn (IN_TURN). `lateness.py` splits a call's waiting
by who caused it and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from overlap_sweep.diagnosis import LOADING, MUCH, UNKNOWN_RANK, Cause, Loss, Rule, Why, as_time, counted, once
from overlap_sweep.diagnosis.causes.host_bound import KINDS_OF_PAUSES, kind_of_pause
from overlap_sweep.trace.kernel_classes import short_name

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime

IN_TURN = "in_turn"
"""What a finding is about if ranks wait for one another, none of them for one alone."""

NAMED = 0.1
"""Least share of all waiting from which on a late rank is named."""
MOST_NAMED = 4


def waited(time: ExposedTime) -> Iterator[Loss]:
    for share in time.waited_for:
        is_straggler = (time.call.group, share.root) in time.view.stragglers
        about = str(share.root) if is_straggler else IN_TURN
        yield Loss(share.waited_ns, about=about, late_rank=share.root, why=share.why, takes=False)
    if delay := time.view.delayed.get(time.index):
        lost_ns, late_rank = delay
        yield Loss(lost_ns, about=str(late_rank), late_rank=late_rank)


REASONS = (
    "host_late",
    "loads_longer",
    "more_work",
    "slower_kernels",
    "late_before",
    "as_much_work",
    "unknown_rank",
    "pauses",
)


class Lateness(NamedTuple):
    """Why ranks are late."""

    reason: str
    """One of REASONS."""
    words: str
    pause: str = ""
    """As of `kind_of_pause`."""


def lateness_of(basis: Basis) -> Lateness:
    """Returns what the late rank does more than the waiting one in the whole step, or, where that explains nothing,
    before the collectives that it is late for."""
    if basis.about == IN_TURN:
        waited_ns = sum(share.waited_ns for share in basis.turns.values())
        in_turn = reduce(Why.plus, (share.why for share in basis.turns.values()), Why())
        return _why_late(basis, waited_ns, in_turn) or Lateness("as_much_work", "")
    late = int(basis.about)
    if late == UNKNOWN_RANK:
        return Lateness("unknown_rank", "")
    (idle, loading), (own_idle, own_loading) = map(basis.host_late_ns, (late, basis.rank))
    more_ns = basis.views[late].facts.computed_ns - basis.own.computed_ns
    whole = Why(*(basis.num_steps * ns for ns in (idle - own_idle, loading - own_loading, more_ns)))
    before = reduce(Why.plus, (loss.why for loss in basis.losses), Why())
    return (
        _why_late(basis, 1000 * basis.num_steps * basis.lost_us, whole, late)
        or _why_late(basis, basis.all_lost_ns, before)
        or Lateness("as_much_work", "it computes as much as the others, but later")
    )


def _why_late(basis: Basis, waited_ns: float, why: Why, late: int | None = None) -> Lateness | None:
    """Returns what ranks did more that others waited for; None if nothing explains enough of the waiting. `late`: whose
    whole steps it is."""
    least_ns = MUCH * waited_ns
    host, loading, work, before = (as_time(basis.per_step(number) / 1000) for number in why)
    if why.before_ns > max(why.host_ns, why.work_ns, least_ns):
        return Lateness("late_before", f"it was late by {before} where its recording begins")
    if why.host_ns > max(why.work_ns, least_ns):
        idle, place, paused_ns = f"it is idle for {host} more", "", 0
        if late is not None:
            place, paused_ns = next(iter(basis.paused_ns(late).most_common(1)), ("", 0))
        is_paused = paused_ns >= MUCH * basis.per_step(why.host_ns)
        if why.loading_ns >= MUCH * why.host_ns:
            most = f", most of it {place}" if is_paused and not LOADING.search(place) else ""
            waits = f"its host waits {loading} longer for a DataLoader's next batch{most}"
            return Lateness("loads_longer", f"{idle}, and {waits}")
        if is_paused:
            there = f"its host starts nothing while it is {place}, for {as_time(paused_ns / 1000)} per step"
            return Lateness("pauses", f"{idle}, and {there}", kind_of_pause(place))
        return Lateness("host_late", f"{idle}{', since its host launches late' * basis.own.on_device}")
    if why.work_ns <= least_ns:
        return None
    if late is None:
        return Lateness("more_work", f"it computes {work} more")
    facts = basis.views[late].facts
    # With as many kernels it has slower clocks rather than more work.
    if facts.work_per_step <= 1.02 * basis.own.work_per_step:
        things = "kernels" if facts.on_device else "operators"
        return Lateness("slower_kernels", f"as many {things} as the others' take it {work} longer")
    extra = facts.time_by_kernel
    extra.subtract(basis.own.time_by_kernel)
    name, time_ns = extra.most_common(1)[0]
    most = ""
    if time_ns > 0:
        its, own = (counted(round(one.runs_per_step(name), 1), "time") for one in (facts, basis.own))
        most = f", most of it in {short_name(name)} ({its} per step, on the rank that waits {own})"
    return Lateness("more_work", f"it computes {work} more{most}")


def evidence(basis: Basis) -> str:
    waiting = "One rank" if basis.own.rank is None else f"Rank {basis.own.rank}"
    calls, lost = basis.calls_in_words, as_time(basis.lost_us)
    if basis.about == IN_TURN:
        who = "ranks that are late in turn" if len(basis.turns) > 1 else "a rank that is late at times"
        return f"{waiting} waits {lost} per step, in {calls}, for {who}. {_shares(basis)}."
    late = int(basis.about)
    if late == UNKNOWN_RANK:
        return (
            f"{waiting} probably waits {lost} per step in {calls}, which take more than twice as long as the fastest "
            "of their size. For which rank is unknown without the others' traces."
        )
    rank = basis.views[late].facts.rank
    who, steps = "another rank" if rank is None else f"rank {rank}", len({loss.step for loss in basis.losses})
    return (
        f"{waiting} waits {lost} per step for {who}, in {calls}: {once(basis, lateness_of).words}. It is "
        f"{_often(basis, late)}, and waited for in {steps} of {counted(basis.num_steps, 'step')}."
    )


def _often(basis: Basis, rank: int) -> str:
    return f"the last in {basis.often[rank].last} of {counted(basis.often[rank].met, 'collective')}"


_WHY = {
    "host_late": "its host launches late",
    "loads_longer": "its host waits for a DataLoader's next batch",
    "more_work": "it computes longer",
    "late_before": "it was late where its recording begins",
}


def _shares(basis: Basis) -> str:
    """Returns who causes how much of all waiting, and why, those who cause most first."""
    total = sum(share.waited_ns for share in basis.turns.values())
    named: list[str] = []
    for rank, share in sorted(basis.turns.items(), key=lambda item: -item[1].waited_ns):
        if share.waited_ns >= NAMED * total and len(named) < MOST_NAMED:
            late = _why_late(basis, share.waited_ns, share.why)
            why = f": {_WHY[late.reason]}" if late else ""
            verb, part = "" if named else "causes ", f"{share.waited_ns / total:.0%}"
            named.append(f"rank {basis.views[rank].facts.rank} {verb}{part} ({_often(basis, rank)}{why})")
    if not named:
        return f"None of {len(basis.turns)} ranks causes {NAMED:.0%} of it"
    return f"Of what all ranks wait so, {', '.join(named)}"


def _is_late_by(reason: str) -> Callable[[Basis], bool]:
    return lambda basis: reason in once(basis, lateness_of)[::2]


CAUSE = Cause(
    order=70,
    meaning="ranks wait for one that is late, always the same or in turn",
    evidence=evidence,
    exposed=Rule(10, waited),
    conditions={
        "in_turn": lambda basis: basis.about == IN_TURN,
        **{reason: _is_late_by(reason) for reason in (*REASONS, *KINDS_OF_PAUSES)},
    },
    is_exposed=True,
)
