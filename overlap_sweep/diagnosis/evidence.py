"""Writes the sentence with the numbers that decided a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from overlap_sweep.diagnosis import Cause
from overlap_sweep.diagnosis.advice import advice_for
from overlap_sweep.diagnosis.causes import Loss
from overlap_sweep.diagnosis.collectives import BYTES_OF, type_of
from overlap_sweep.diagnosis.exposure import Exposure
from overlap_sweep.diagnosis.facts import Call, RankFacts
from overlap_sweep.diagnosis.rank import POINT_TO_POINT, UNKNOWN_RANK
from overlap_sweep.diagnosis.waits import END_OF_STEP


@dataclass(frozen=True)
class Basis:
    """What a finding rests on."""

    facts: Sequence[RankFacts]
    exposures: Sequence[Exposure]
    rank: int
    """Index of the rank that loses the time."""
    cause: Cause
    about: str
    losses: Sequence[Loss]
    """Those of steady steps."""
    lost_us: float
    step_us: float
    num_steps: int

    @property
    def own(self) -> RankFacts:
        return self.facts[self.rank]

    @cached_property
    def calls(self) -> list[Call]:
        """Returns the calls that lost time."""
        return [self.own.calls[i] for i in dict.fromkeys(loss.call for loss in self.losses) if i is not None]

    @property
    def late(self) -> int:
        """Returns the index of the rank that the others waited for."""
        return int(self.about)

    @property
    def late_rank(self) -> int | None:
        """Returns the rank that the others waited for; None if its trace is missing."""
        return None if self.late == UNKNOWN_RANK else self.facts[self.late].rank

    def per_step(self, number: float) -> float:
        return number / max(self.num_steps, 1)

    def total_us(self, name: str) -> float:
        """Returns a number of the losses, in microseconds per step."""
        return self.per_step(sum(loss.numbers.get(name, 0.0) for loss in self.losses)) / 1000

    def median_us(self, values_ns: Iterable[float]) -> float:
        values = list(values_ns)
        return median(values) / 1000 if values else 0.0


def bytes_of(call: Call) -> int | None:
    """Returns the size of the whole buffer; None if the trace does not know."""
    elements, size = max(call.sent or 0, call.received or 0), BYTES_OF.get(type_of(call.dtype))
    return elements * size if elements and size else None


def evidence_of(basis: Basis) -> str:
    """Returns the sentence with the numbers that decided."""
    return _SENTENCES[basis.cause](basis)


def try_of(basis: Basis) -> str:
    """Returns the sentence with the setting to change."""
    has = set(basis.own.libraries) | {loss.role for loss in basis.losses if loss.role}
    collectives = {call.collective for call in basis.calls}
    has |= collectives
    if collectives & set(POINT_TO_POINT):
        has.add("point_to_point")
    if not basis.own.on_device:
        has.add("cpu")
    if "item" in basis.about or "_local_scalar_dense" in basis.about:
        has.add("item")
    if basis.about == END_OF_STEP:
        has.add("end_of_step")
    return advice_for(basis.cause, has)


def _calls(basis: Basis) -> str:
    """Returns such as `12 calls per step of 67.1 MB`."""
    count = round(basis.per_step(len(basis.calls)), 1)
    sizes = [size for call in basis.calls if (size := bytes_of(call))]
    of = ""
    if sizes:
        low, high = min(sizes), max(sizes)
        of = f" of {_megabytes(high)}" if high < 1.1 * low else f" of {_megabytes(low)} to {_megabytes(high)}"
    return f"{count:g} call{'' if count == 1 else 's'} per step{of}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} KB"


def _us(time_us: float) -> str:
    return f"{time_us:,.0f} us" if abs(time_us) >= 10 else f"{time_us:,.1f} us"


def _dependency(basis: Basis) -> str:
    took = basis.median_us(call.end_ns - call.start_ns for call in basis.calls)
    return (
        f"{_calls(basis)}, {_us(took)} each: the next kernel had been launched and started when the call ended, and there "
        "was no other computation to run."
        if basis.own.on_device
        else f"{_calls(basis)}, {_us(took)} each: the next operator started when the call ended, and nothing else ran."
    )


def _issued_late(basis: Basis) -> str:
    available = max((loss.numbers.get("available_ns", 0.0) for loss in basis.losses), default=0.0) / 1000
    if any(loss.role == "gradient" for loss in basis.losses):
        return (
            f"{_calls(basis)} began when {_us(available)} of computation of the backward pass had run without any "
            "communication next to it, which could have hidden it."
        )
    return (
        f"{_calls(basis)} began only when the next kernels needed them, though the parameters were there: up to "
        f"{_us(available)} of computation before had no communication next to it."
    )


def _queue_order(basis: Basis) -> str:
    held = [loss for loss in basis.losses if "blocked_ns" in loss.numbers]
    if len(held) * 2 > len(basis.losses):
        work = basis.own.work
        ahead = basis.median_us(
            float(work.start_ns[loss.work] - work.launch_ns[loss.work]) for loss in held if loss.work is not None
        )
        return (
            f"{_calls(basis)} held back the backward pass, which does not need the result: its next kernel had been launched "
            f"{_us(ahead)} before it started, when the call ended."
        )
    ready = basis.median_us(loss.numbers.get("ready_ns", 0.0) for loss in basis.losses)
    behind = basis.median_us(loss.numbers.get("behind_ns", 0.0) for loss in basis.losses)
    return (
        f"{_calls(basis)} started {_us(ready)} after they were launched and their stream was free; kernels of other streams "
        f"ran for {_us(behind)} of it."
    )


def _bandwidth(basis: Basis) -> str:
    comm = max((loss.numbers["comm_ns"] for loss in basis.losses), default=0.0) / 1000
    compute = max((loss.numbers["compute_ns"] for loss in basis.losses), default=0.0) / 1000
    factor = comm / compute if compute else float("inf")
    rates = [size / (call.end_ns - call.start_ns) for call in basis.calls if (size := bytes_of(call))]
    rate = f", at {median(rates):,.0f} GB/s" if rates else ""
    return (
        f"The pass has {_us(comm)} of such communication{rate}, and {_us(compute)} of computation: {factor:.1f} times the "
        "computation would be needed to hide it."
    )


def _straggler(basis: Basis) -> str:
    if basis.late == UNKNOWN_RANK:
        return (
            f"Rank {basis.own.rank} probably waits {_us(basis.lost_us)} per step in {_calls(basis)}, which take much longer "
            "than the fastest of their size; which rank is late is unknown without the traces of the others."
        )
    late, own = basis.facts[basis.late], basis.own
    who = "one rank" if late.rank is None else f"rank {late.rank}"
    doing = _doing(basis)
    return (
        f"Rank {own.rank} waits {_us(basis.lost_us)} per step in {_calls(basis)} for {who}, which starts them later; "
        f"{doing}."
    )


def _doing(basis: Basis) -> str:
    """Returns what the late rank does more than the waiting one."""
    late, own = basis.facts[basis.late], basis.own

    def per_step(facts: RankFacts, value: Callable[[RankFacts], float]) -> float:
        steps = max(sum(not step.startup for step in facts.steps), 1)
        return value(facts) / steps / 1000

    def steady(facts: RankFacts, steps: np.ndarray) -> np.ndarray:
        return np.isin(steps, [step.number for step in facts.steps if not step.startup])

    def computed(facts: RankFacts) -> float:
        work = facts.work
        return float((work.end_ns - work.start_ns)[steady(facts, work.step)].sum())

    def host(rank: int) -> float:
        numbers = {step.number for step in basis.facts[rank].steps if not step.startup}
        work = basis.facts[rank].work
        return sum(late.idle_ns for late in basis.exposures[rank].late if int(work.step[late.work]) in numbers)

    more = per_step(late, computed) - per_step(own, computed)
    idle = per_step(late, lambda _: host(basis.late)) - per_step(own, lambda _: host(basis.rank))
    if idle > max(more, 0.3 * basis.lost_us):
        return f"meanwhile its host launches nothing for {_us(idle)} per step more than that of rank {own.rank}"
    if more > 0.3 * basis.lost_us:
        name = _most_extra(late, own)
        return f"it computes {_us(more)} per step more than rank {own.rank}{name}"
    return "it computes as much as the others, but runs later"


def _most_extra(late: RankFacts, own: RankFacts) -> str:
    def by_name(facts: RankFacts) -> Counter[str]:
        found: Counter[str] = Counter()
        took = facts.work.end_ns - facts.work.start_ns
        for name, time_ns in zip(facts.work.signature.tolist(), took.tolist(), strict=True):
            found[facts.names[name]] += time_ns
        return found

    extra = by_name(late)
    extra.subtract(by_name(own))
    from overlap_sweep.trace.kernel_classes import function_name

    name, time_ns = extra.most_common(1)[0] if extra else ("", 0)
    return f", most of it in {(function_name(name) or name)[:60]}" if time_ns > 0 else ""


def _host_bound(basis: Basis) -> str:
    count = round(basis.per_step(len(basis.losses)))
    kernels = basis.own.work
    took = float(np.median(kernels.end_ns - kernels.start_ns)) / 1000 if len(kernels) else 0.0
    if not basis.own.on_device:
        return f"In {count} pauses per step neither computation nor communication runs; the median operator takes {_us(took)}."
    return (
        f"In {count} gaps per step the GPU had finished everything that was launched; the median kernel takes {_us(took)}, "
        "less than the host needs for launching."
        if took < 10
        else f"In {count} gaps per step the GPU had finished everything that was launched; the median kernel takes {_us(took)}."
    )


def _host_sync(basis: Basis) -> str:
    waits = [basis.own.waits[i] for i in dict.fromkeys(loss.wait for loss in basis.losses) if i is not None]
    took = basis.median_us(wait.end_ns - wait.start_ns for wait in waits)
    names = Counter(wait.name for wait in waits).most_common(1)
    name = names[0][0] if names else "a copy"
    called = "" if basis.about in ("", name, END_OF_STEP) else f" ({basis.about})"
    count = round(basis.per_step(len(waits)), 1)
    if any(loss.call is not None for loss in basis.losses):
        return (
            f"The host waited for the device in {name}{called} before it launched {_calls(basis)}: computation ran meanwhile "
            "that could have hidden them."
        )
    if basis.about == END_OF_STEP:
        return (
            f"{name} at the end of the step: the host waits {_us(took)} for the device, which then has nothing to run "
            "until the host has launched the next step."
        )
    return (
        f"{name}{called} {count:g} times per step: the host waits {_us(took)} for the device, and the GPU then has nothing "
        "to run until the host has launched more."
    )


def _contention(basis: Basis) -> str:
    alone, hidden = basis.total_us("alone_ns"), basis.total_us("hidden_ns")
    slower = basis.lost_us / alone if alone else 0.0
    net = hidden - basis.lost_us
    verdict = f"a net gain of {_us(net)}" if net > 0 else f"a net loss of {_us(-net)}"
    return (
        f"GEMMs next to it take {slower:.0%} longer than the same GEMMs alone ({_us(alone + basis.lost_us)} instead of "
        f"{_us(alone)} per step): hiding {_us(hidden)} of communication is {verdict}."
    )


def _none(basis: Basis) -> str:
    raise AssertionError(basis)


_SENTENCES: dict[Cause, Callable[[Basis], str]] = {
    "none": _none,
    "dependency": _dependency,
    "issued_late": _issued_late,
    "queue_order": _queue_order,
    "bandwidth": _bandwidth,
    "straggler": _straggler,
    "host_bound": _host_bound,
    "host_sync": _host_sync,
    "contention": _contention,
}
