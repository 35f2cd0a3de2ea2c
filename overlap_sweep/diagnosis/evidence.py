"""Writes the sentence with the numbers that decided a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median

import numpy as np

from overlap_sweep.diagnosis import END_OF_STEP, IN_TURN, PAUSES, Cause, as_rate
from overlap_sweep.diagnosis.advice import advice_for
from overlap_sweep.diagnosis.basis import Basis, as_time, lateness_of, signs_of, steady_steps, why_late
from overlap_sweep.diagnosis.calls import NEVER, bytes_of
from overlap_sweep.diagnosis.facts import size_of
from overlap_sweep.diagnosis.latency import SLOWEST_GBS
from overlap_sweep.diagnosis.lateness import UNKNOWN_RANK

AT_ONCE_NS = 1_000_000
"""Longest time after a call until a kernel that waited for it; what starts later waited for something else, too."""
NAMED = 0.1
"""Least share of all waiting from which on a late rank is named."""
MOST_NAMED = 4
MENTIONED = 0.1
"""Least share of the time lost that is said to go into loading data."""


def evidence_of(basis: Basis) -> str:
    """Returns the sentence with the numbers that decided."""
    return f"{_SENTENCES[basis.cause](basis)}{_waiting_and_transfer(basis)}"


def _waiting_and_transfer(basis: Basis) -> str:
    """Returns a sentence with what the calls wait for other ranks, and what they transfer; empty if it is unknown."""
    if basis.waiting_us is None or basis.transfer_us is None:
        return ""
    transfer = f"{'' if basis.met_all else 'at most '}{as_time(basis.transfer_us)}"
    if basis.cause == "straggler":
        return f" Besides, these calls have {transfer} of exposed transfer per step."
    waiting = f"{'' if basis.met_all else 'at least '}{as_time(basis.waiting_us)}"
    return f" All such calls of a step: {transfer} of exposed transfer, besides {waiting} of waiting for the last rank."


def try_of(basis: Basis) -> str:
    """Returns the sentence with the setting to change."""
    return advice_for(basis.cause, signs_of(basis))


def _calls(basis: Basis) -> str:
    """Returns such as `12 calls of 67.1 MB per step`, or `4 calls of 67.1 MB in 3 steps`."""
    count, rest = divmod(len(basis.calls), max(basis.num_steps, 1))
    per = f"in {basis.num_steps} steps" if rest else "per step"
    count = len(basis.calls) if rest else count
    sizes = [size for call in basis.calls if (size := bytes_of(call, size_of(basis.own, call)))]
    of = ""
    if sizes:
        low, high = min(sizes), max(sizes)
        of = f" of {_megabytes(high)}" if high < 1.1 * low else f" of {_megabytes(low)} to {_megabytes(high)}"
    between = " between nodes" if basis.between_nodes else ""
    return f"{_counted(count, 'call')}{of}{between} {per}"


def _counted(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def _megabytes(size: int) -> str:
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} KB"


_PASS_NAMES = {"fwd": "forward", "bwd": "backward"}


def _pass(basis: Basis) -> str:
    names = {_PASS_NAMES.get(call.pass_, "") for call in basis.calls}
    name = "backward" if basis.roles == {"gradient"} else names.pop() if len(names) == 1 else ""
    return f"{name} pass" if name else "pass"


def _dependency(basis: Basis) -> str:
    head = f"{_calls(basis)}, {as_time(basis.median_us(loss.lost_ns for loss in basis.losses))} each"
    if not basis.own.on_device:
        return f"{head}: the next operator started when the call ended, and nothing else ran meanwhile."
    if basis.blocks:
        return f"{head}: the backward pass waited, though it does not need the result."
    if basis.roles <= {"activation"}:
        return f"{head}.{_next_kernel(basis)} No other computation was there to run."
    return f"{head}.{_next_kernel(basis)} No computation of the {_pass(basis)} was left to hide it."


def _next_kernel(basis: Basis) -> str:
    """Returns a sentence about the kernels that waited for the calls; empty if their launches are unknown."""
    own, exposed = basis.own, basis.exposures[basis.rank].exposed
    after = [
        (int(own.work.start_ns[loss.work] - own.calls[loss.call].end_ns), loss.work)
        for loss in basis.losses
        if loss.work is not None and loss.call is not None and exposed[loss.call].ended_by == loss.call
    ]
    waited = [(gap, work) for gap, work in after if 0 <= gap <= AT_ONCE_NS and own.work.launch_ns[work] != NEVER]
    if not waited:
        return ""
    ahead = basis.median_us(float(own.work.start_ns[work] - own.work.launch_ns[work]) for _, work in waited)
    gap = basis.median_us(gap for gap, _ in waited)
    launched, started = f"launched {as_time(ahead)} before", f"started {as_time(gap)} after the call ended"
    return f" The next kernel waited for it: {launched}, it {started}."


def _issued_late(basis: Basis) -> str:
    if basis.blocks:
        each = as_time(basis.median_us(loss.lost_ns for loss in basis.losses))
        return (
            f"The backward pass waited for {_calls(basis)}, {each} each, whose result it does not need: what computes "
            "after them could have hidden them."
        )
    calls, free = _calls(basis), f"up to {as_time(basis.largest_us('available_ns'))} of the {_pass(basis)}"
    if basis.before_gather:
        return (
            f"{calls} ran while the pass waited for the all_gather after them; before, {free} had no communication "
            "next to it."
        )
    if basis.roles == {"gradient"}:
        return f"{calls} started when {free} had run with no communication next to it."
    return (
        f"{calls} started only when the next kernels needed them; before, {free} had run with no communication next to "
        "it."
    )


def _queue_order(basis: Basis) -> str:
    if basis.blocks:
        work = basis.own.work
        ahead = basis.median_us(
            float(work.start_ns[loss.work] - work.launch_ns[loss.work])
            for loss in basis.losses
            if loss.work is not None
        )
        return (
            f"The backward pass waited for {_calls(basis)}, whose result it does not need: its next kernel, launched "
            f"{as_time(ahead)} before, started when the call ended."
        )
    ready = basis.median_us(loss.numbers.get("ready_ns", 0.0) for loss in basis.losses)
    behind = basis.median_us(loss.numbers.get("behind_ns", 0.0) for loss in basis.losses)
    head = f"{_calls(basis)} started {as_time(ready)} after they were launched, though their stream was free"
    if basis.occupied:
        return f"{head}: when a kernel of another stream ended, which had run for {as_time(behind)} of it."
    return (
        f"{head}; other kernels ran for {as_time(behind)} of it, and none overtook another, as if all streams shared a "
        "queue."
    )


def _bandwidth(basis: Basis) -> str:
    if basis.roles <= {"activation"}:
        moving, hidden = (
            basis.median_us(loss.numbers[name] for loss in basis.losses) for name in ("comm_ns", "compute_ns")
        )
        return (
            f"{_calls(basis)} take {as_time(moving)} each, and computation runs next to them for {as_time(hidden)}: "
            f"{as_time(moving - hidden)} of each have nothing that hides them."
        )
    comm, compute = basis.largest_us("comm_ns"), basis.largest_us("compute_ns")
    alike = [basis.alike[loss.call] for loss in basis.losses if loss.call is not None]
    rates = [one.rate_gbs for one in alike if one.rate_gbs is not None]
    rate = f" (these calls at {as_rate(median(rates))} GB/s)" if rates else ""
    return (
        f"The {_pass(basis)} has {as_time(comm)} of communication{rate} and {as_time(compute)} of computation: "
        f"{as_time(comm - compute)} cannot be hidden."
    )


def _latency(basis: Basis) -> str:
    took, transfer = (
        basis.median_us(loss.numbers[name] for loss in basis.losses) for name in ("took_ns", "transfer_ns")
    )
    numbers = max((loss.numbers for loss in basis.losses), key=lambda numbers: numbers["num_calls"])
    rate = f"{as_rate(numbers['rate_gbs'])} GB/s"
    if numbers["rate_gbs"] == SLOWEST_GBS:
        rate += " (assumed: no call of the group is faster)"
    return (
        f"{_calls(basis)}, {as_time(took)} each, of which their bytes would need {as_time(transfer)} at {rate}. The "
        f"rest is latency, which one call instead of {numbers['num_calls']:.0f} would have once."
    )


def _repeated_reduction(basis: Basis) -> str:
    passes = max(loss.numbers["passes"] for loss in basis.losses)
    slowed = basis.per_step(sum(loss.numbers.get("slowed_ns", 0.0) for loss in basis.losses)) / 1000
    exposed = basis.per_step(sum(loss.lost_ns for loss in basis.losses)) / 1000 - slowed
    slower = f", and GEMMs next to them take {as_time(slowed)} longer" if slowed > MENTIONED * exposed else ""
    return (
        f"The same gradients are reduced in {passes:.0f} backward passes for one step of the optimizer, which needs "
        f"only their sum after the last. All but the last: {_calls(basis)}, exposed for {as_time(exposed)}{slower}."
    )


def _straggler(basis: Basis) -> str:
    waiting = "One rank" if basis.own.rank is None else f"Rank {basis.own.rank}"
    if basis.about == IN_TURN:
        who = "ranks that are late in turn" if len(basis.turns) > 1 else "a rank that is late at times"
        return f"{waiting} waits {as_time(basis.lost_us)} per step, in {_calls(basis)}, for {who}. {_shares(basis)}."
    if basis.late == UNKNOWN_RANK:
        return (
            f"{waiting} probably waits {as_time(basis.lost_us)} per step in {_calls(basis)}, which take more than "
            "twice as long as the fastest of their size. For which rank is unknown without the others' traces."
        )
    who = "another rank" if basis.late_rank is None else f"rank {basis.late_rank}"
    steps = len({loss.step for loss in basis.losses})
    return (
        f"{waiting} waits {as_time(basis.lost_us)} per step for {who}, in {_calls(basis)}: {lateness_of(basis).words}. "
        f"It is {_often(basis, basis.late)}, and waited for in {steps} of {_counted(basis.num_steps, 'step')}."
    )


def _often(basis: Basis, rank: int) -> str:
    return f"the last in {basis.often[rank].last} of {_counted(basis.often[rank].met, 'collective')}"


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
            late = why_late(share, basis.num_steps, on_device=basis.own.on_device)
            why = f": {_WHY[late.signs]}" if late and late.signs in _WHY else ""
            verb = "" if named else "causes "
            part = f"{share.waited_ns / total:.0%}"
            named.append(f"rank {basis.facts[rank].rank} {verb}{part} ({_often(basis, rank)}{why})")
    if not named:
        return f"None of {len(basis.turns)} ranks causes {NAMED:.0%} of it"
    return f"Of what all ranks wait so, {', '.join(named)}"


def _pauses(basis: Basis) -> str:
    """Returns where the host was while it started nothing, the two places of most time."""
    most = [
        f"{place} for {as_time(basis.per_step(ns) / 1000)} per step"
        for place, ns in basis.pauses.most_common(2)
        if ns >= MENTIONED * basis.pauses.total()
    ]
    pauses = _counted(round(basis.per_step(len({loss.pause for loss in basis.losses})), 1), "time")
    longest = as_time(max(loss.lost_ns for loss in basis.losses) / 1000)
    idle = "the GPU has nothing to run" if basis.own.on_device else "nothing runs"
    where = f"it is {', '.join(most)}." if most else "in many places, each for little of it."
    return f"{pauses} per step, for up to {longest}, {idle} because the host starts nothing: {where}{_loading(basis)}"


def _host_bound(basis: Basis) -> str:
    if basis.about == PAUSES:
        return _pauses(basis)
    longest = as_time(max(loss.lost_ns for loss in basis.losses) / 1000)
    gaps = f"{_counted(round(basis.per_step(len(basis.losses))), 'time')} per step, for up to {longest}"
    work = basis.own.work
    steady = np.isin(work.step, steady_steps(basis.own))
    took_us = float(np.median((work.end_ns - work.start_ns)[steady])) / 1000
    took, loading = as_time(took_us), _loading(basis)
    if not basis.own.on_device:
        return f"{gaps}, neither computation nor communication runs; operators take {took} (median).{loading}"
    launches = np.sort(work.launch_ns[steady & (work.launch_ns != NEVER)])
    every_us = float(np.median(np.diff(launches))) / 1000 if len(launches) > 1 else 0.0
    if every_us <= took_us:
        return (
            f"The GPU has nothing to run {gaps}, though most kernels are launched in time (they take {took}, median)."
            f"{loading}"
        )
    return (
        f"The GPU has nothing to run {gaps}: kernels take {took}, and the host launches one every {as_time(every_us)} "
        f"(medians).{loading}"
    )


def _loading(basis: Basis) -> str:
    share, each = basis.loading_share, as_time(basis.per_step(basis.loading_us))
    if share < MENTIONED:
        return ""
    return f" In {share:.0%} of that time the host waits for a DataLoader's next batch, for {each} per step."


def _host_sync(basis: Basis) -> str:
    names = Counter(f"{w.name} ({w.operator})" if w.operator else w.name for w in basis.waits).most_common(1)
    name = names[0][0] if names else "a call of the runtime"
    if any("through_ns" in loss.numbers for loss in basis.losses):
        return (
            f"Until {_calls(basis)} had ended, the host waited for the device in {name}; only then it launched the "
            "next kernel of the backward pass, which does not need them."
        )
    if any(loss.call is not None for loss in basis.losses):
        waited = basis.median_us(loss.numbers.get("waited_ns", 0.0) for loss in basis.losses)
        return (
            f"Before it launched {_calls(basis)}, the host waited for the device in {name}; meanwhile "
            f"{as_time(waited)} of computation ran that could have hidden each."
        )
    took = basis.median_us(wait.end_ns - wait.start_ns for wait in basis.waits)
    if basis.about == END_OF_STEP:
        return (
            f"At the end of the step the host waits {as_time(took)} for the device, in {name}; then the GPU has "
            "nothing to run until the host has launched the next step."
        )
    count = round(basis.per_step(len(basis.waits)), 1)
    return (
        f"The host waits for the device {_counted(count, 'time')} per step, {as_time(took)} each, in {name}; "
        "then the GPU has nothing to run until the host has launched more."
    )


def _contention(basis: Basis) -> str:
    alone, hidden = (
        basis.per_step(sum(loss.numbers.get(name, 0.0) for loss in basis.losses)) / 1000
        for name in ("alone_ns", "hidden_ns")
    )
    slower = basis.lost_us / alone if alone else 0.0
    times = f"{as_time(alone + basis.lost_us)} instead of {as_time(alone)} per step"
    net = hidden - basis.lost_us
    verdict = f"still gains {as_time(net)}" if net > 0 else f"costs {as_time(-net)} more than it gains"
    return (
        f"GEMMs next to it take {slower:.0%} longer than alone ({times}). Hiding {as_time(hidden)} of communication "
        f"{verdict}."
    )


def _unexplained(basis: Basis) -> str:
    first = basis.stalls[0]
    count, longest = (
        round(basis.per_step(len(basis.losses)), 1),
        as_time(max(loss.lost_ns for loss in basis.losses) / 1000),
    )
    ahead = (
        "whose launch is not recorded"
        if first.launch_ns == NEVER
        else f"launched {as_time((first.end_ns - first.launch_ns) / 1000)} before it started"
    )
    holds_back = f", after a call of {first.holds_back}" if first.holds_back else ""
    return (
        f"Nothing runs on the device {_counted(count, 'time')} per step, for up to {longest}. Then {first.after} runs "
        f"on {first.stream}, {ahead}{holds_back}; {first.before} had ended. What the device waited for is not in the "
        "trace."
    )


_SENTENCES: dict[Cause, Callable[[Basis], str]] = {
    "dependency": _dependency,
    "issued_late": _issued_late,
    "queue_order": _queue_order,
    "bandwidth": _bandwidth,
    "latency": _latency,
    "repeated_reduction": _repeated_reduction,
    "straggler": _straggler,
    "host_bound": _host_bound,
    "host_sync": _host_sync,
    "contention": _contention,
    "unexplained": _unexplained,
}
