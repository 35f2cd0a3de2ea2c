"""Communication by process group: sizes, times with and without waiting, bandwidths, skew, and what is exposed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import Pass
from overlap_sweep.diagnosis.arrivals import MEETING, Arrivals, common_names
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group, type_of
from overlap_sweep.diagnosis.exposure import Measure, counted_steps, exposed_per_step
from overlap_sweep.diagnosis.facts import RankFacts, Step, size_of
from overlap_sweep.diagnosis.nodes import Place, place_of
from overlap_sweep.diagnosis.slowdown import slowed_by_call, slowed_gemms

Known = Literal["measured", "at_most", ""]


class Kind(NamedTuple):
    """What calls have in common that are alike."""

    group: Hashable
    collective: str
    dtype: str
    bytes: int | None
    """Of one call; None if unknown, and of all-to-alls: experts are sent a different number of tokens each time."""
    pass_: Pass
    backend: str
    place: Place


class Met(NamedTuple):
    """One collective, as all ranks that were matched saw it."""

    ranks: int
    transfer_ns: float
    """From the last rank's start to the end."""
    skew_ns: int
    """From the first rank's start to the last rank's."""


@dataclass(frozen=True)
class Alike:
    """Calls of one kind of all ranks, without start-up steps."""

    kind: Kind
    calls: dict[int, list[int]]
    """Indices of each rank's calls, by index of the rank."""
    met: list[Met]
    bytes: int | None
    """Of one call, the median."""
    transfer_us: float | None
    """Median without waiting."""
    transfer_is: Known

    @property
    def rate_gbs(self) -> float | None:
        """Returns bytes / time without waiting, in 10^9 bytes per second."""
        return self.bytes / self.transfer_us / 1e3 if self.bytes is not None and self.transfer_us else None


def alike_calls(facts: Sequence[RankFacts], arrived: Arrivals) -> list[Alike]:
    """Returns the calls of all ranks by process group, collective, type, size, pass and library."""
    names = common_names(facts)
    chosen: dict[Kind, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    kinds: list[dict[int, Kind]] = [{} for _ in facts]
    fastest_ns: dict[Kind, int] = {}
    for number, rank in enumerate(facts):
        counted = {step.number for step in counted_steps(rank.steps)}
        for i, call in enumerate(rank.calls):
            if call.step in counted:
                kind = _kind(rank, call, name_of(names, number, call))
                chosen[kind][number].append(i)
                kinds[number][i] = kind
                same, took_ns = kind._replace(pass_=""), call.end_ns - call.start_ns
                fastest_ns[same] = min(took_ns, fastest_ns.get(same, took_ns))
    met: dict[Kind, list[Met]] = defaultdict(list)
    for match in arrived.matches:
        found = _met(facts, match, arrived.offsets_ns)
        for kind in {kinds[rank][call] for rank, call in match if call in kinds[rank]}:
            met[kind].append(found)
    return [
        _alike(facts, kind, calls, met[kind], fastest_ns[kind._replace(pass_="")]) for kind, calls in chosen.items()
    ]


def name_of(names: Sequence[Mapping[str, Hashable]], rank: int, call: Call) -> Hashable:
    """Returns what a call's group has in common on all its ranks. `names`: as `common_names` returns them."""
    return names[rank].get(call.group, (rank, call.group)) if call.group else ""


def members_of(
    facts: Sequence[RankFacts], calls: Mapping[int, Sequence[int]], met: Iterable[Met]
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the number of ranks of the calls' group, None if unknown, and the ranks, empty if unknown."""
    rank, own = next(iter(calls.items()))
    first, call = facts[rank], facts[rank].calls[own[0]]
    if not call.group and {one.ranks for one in met} == {first.world_size}:
        # All ranks of the run were in it.
        return first.world_size, tuple(range(first.world_size or 0))
    group = first.groups.get(call.group)
    return size_of(first, call), group.ranks if group else ()


def _kind(rank: RankFacts, call: Call, group: Hashable) -> Kind:
    return Kind(
        group=group,
        collective=call.collective,
        dtype=type_of(call.dtype),
        bytes=None if call.collective == "all_to_all" else call.buffer_bytes(size_of(rank, call)),
        pass_=call.pass_,
        backend=call.library,
        place=place_of(rank, call),
    )


def _met(facts: Sequence[RankFacts], match: Iterable[tuple[int, int]], offsets_ns: list[int]) -> Met:
    """Returns how long a collective took after its last rank had started.

    Where everybody needs everybody, they end together but for the noise of clocks, so it is the median of their ends;
    else the last end, because those who only send may end before others have started.
    """
    calls = [(facts[rank].calls[call], offsets_ns[rank]) for rank, call in match]
    starts = [call.start_ns + offset for call, offset in calls]
    ends = [call.end_ns + offset for call, offset in calls]
    end = median(ends) if calls[0][0].collective in MEETING else max(ends)
    return Met(len(calls), max(end - max(starts), 0), max(starts) - min(starts))


def _alike(
    facts: Sequence[RankFacts], kind: Kind, calls: dict[int, list[int]], met: list[Met], fastest_ns: int
) -> Alike:
    size_bytes = kind.bytes
    if kind.collective == "all_to_all":
        sizes = [
            size
            for rank, own in calls.items()
            for i in own
            if (size := facts[rank].calls[i].buffer_bytes()) is not None
        ]
        size_bytes = round(median(sizes)) if sizes else None
    transfer_us: float | None = None
    known: Known = ""
    if met:
        size, _ = members_of(facts, calls, met)
        transfer_us = median(one.transfer_ns for one in met) / 1e3
        known = "measured" if size is not None and all(one.ranks >= size for one in met) else "at_most"
    elif kind.bytes is not None:
        transfer_us, known = fastest_ns / 1e3, "at_most"
    return Alike(kind, calls, met, size_bytes, transfer_us, known)


class GroupRow(msgspec.Struct, kw_only=True):
    """Calls of one kind and size in one process group, of all its ranks whose traces are there, without start-up
    steps."""

    group: str
    """Name on the first rank that has it; empty if the trace does not know the group."""
    about: str
    """What the program calls the group."""
    ranks: list[int]
    """Empty if unknown."""
    size: int | None
    place: Place
    """Whether it is within a node or between nodes."""
    backend: str
    """Whose kernels they are: nccl, rccl, gloo, userbuffers, symm_mem, peer_copy, custom..."""
    collective: str
    pass_: Pass = msgspec.field(name="pass")
    dtype: str
    """As PyTorch calls it; empty if unknown."""
    bytes: int | None
    """Of one call, as nccl-tests counts: the whole buffer, which is an all-gather's output and a reduce-scatter's
    input. Of all-to-alls, whose sizes may change from call to call, the median."""
    calls: float
    """Per step of a rank, on average."""
    time_us: float
    """Median of all calls, as recorded: with the wait for the last rank."""
    transfer_us: float | None
    """The same without waiting: from the last rank's start to the end."""
    transfer_is: Known
    """`measured` with the traces of all ranks of the group. `at_most` if some are missing, who may have come still
    later; of a single rank's trace it is the fastest call of the same size, in any pass. Empty if unknown."""
    algbw_gbs: float | None
    """bytes / transfer_us, in 10^9 bytes per second; where the transfer took at most so long, at least so much."""
    busbw_gbs: float | None
    """algbw_gbs times the part of the data that each rank's links carry; comparable between collectives and sizes."""
    skew_us: float | None
    """Median of the time from the first rank's start to the last rank's; None if only one rank's calls are known."""
    skew_max_us: float | None
    exposed_us: float
    """Per step, median: part of the calls' time in which their rank computes nothing; of the rank with most of it.
    What several groups expose at once counts for each."""
    hidden: float | None
    """Part of the calls' time, of all ranks, in which their rank computes; None if they took no time."""
    slowdown: float | None
    """Time of the GEMMs next to the calls / time of the same GEMMs alone; None if none of them ever ran alone."""


class GroupTotal(msgspec.Struct, kw_only=True):
    """All calls of one process group by one library, without start-up steps: medians per step of the rank that exposes
    most."""

    group: str
    """As of GroupRow."""
    about: str
    ranks: list[int]
    backend: str
    exposed_us: float
    """Time in which a call runs and its rank computes nothing."""
    hidden_us: float
    """Time in which a call runs and its rank computes."""


def group_totals(facts: Sequence[RankFacts]) -> list[GroupTotal]:
    """Returns what each process group exposes and hides, what exposes most first."""
    names = common_names(facts)
    found: dict[tuple[Hashable, str], list[GroupTotal]] = defaultdict(list)
    for number, rank in enumerate(facts):
        steps, compute = counted_steps(rank.steps), Measure(rank.work.intervals)
        counted = {step.number for step in steps}
        own: dict[tuple[Hashable, str], list[Call]] = defaultdict(list)
        for call in rank.calls:
            if call.step in counted:
                own[name_of(names, number, call), call.library].append(call)
        for key, calls in own.items():
            each = exposed_per_step(calls, steps, compute)
            group = rank.groups.get(calls[0].group) or Group("", "", (), None)
            total = GroupTotal(
                group=group.name,
                about=group.about,
                ranks=list(group.ranks),
                backend=key[1],
                exposed_us=median(exposed for _, exposed in each) / 1e3,
                hidden_us=median(took - exposed for took, exposed in each) / 1e3,
            )
            found[key].append(total)
    most = [max(by_rank, key=lambda total: total.exposed_us) for by_rank in found.values()]
    return sorted(most, key=lambda total: -total.exposed_us)


def group_rows(facts: Sequence[RankFacts], arrived: Arrivals) -> list[GroupRow]:
    """Returns a row for each process group, collective, type, size and pass; what costs most first."""
    steps = [counted_steps(rank.steps) for rank in facts]
    compute = [Measure(rank.work.intervals) for rank in facts]
    slowed = [slowed_by_call(rank, slowed_gemms(rank)) for rank in facts]
    rows = [_row(facts, one, steps, compute, slowed) for one in alike_calls(facts, arrived)]
    return sorted(rows, key=lambda row: (-row.exposed_us, -row.calls * row.time_us, row.group, row.collective))


def bus_factor(collective: str, size: int | None) -> float | None:
    """Returns bus bandwidth / algorithm bandwidth; None if the collective has none.

    These are the formulas of nccl-tests (doc/PERFORMANCE.md): each of n ranks sends and receives 2(n - 1)/n of an
    all-reduce, (n - 1)/n of what gathers, scatters or exchanges, and all of a broadcast, a reduction to one rank or a
    message.
    """
    if collective in ("broadcast", "reduce", "send", "recv", "send_recv"):
        return 1.0
    if size is None:
        return None
    if collective == "all_reduce":
        return 2 * (size - 1) / size
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return None


def _row(
    facts: Sequence[RankFacts],
    alike: Alike,
    steps: list[list[Step]],
    compute: list[Measure],
    slowed: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> GroupRow:
    kind, met, rate_gbs = alike.kind, alike.met, alike.rate_gbs
    calls = {number: [facts[number].calls[i] for i in own] for number, own in alike.calls.items()}
    every = [call for own in calls.values() for call in own]
    group = facts[next(iter(calls))].groups.get(every[0].group) or Group("", "", (), None)
    size, ranks = members_of(facts, alike.calls, met)
    factor = bus_factor(kind.collective, size)
    exposed, total_ns, exposed_ns = [], 0, 0
    for number, own in calls.items():
        each = exposed_per_step(own, steps[number], compute[number])
        exposed.append(median(per_step for _, per_step in each))
        total_ns += sum(per_step for per_step, _ in each)
        exposed_ns += sum(per_step for _, per_step in each)
    lost_ns, alone_ns = (
        sum(float(slowed[number][of][own].sum()) for number, own in alike.calls.items()) for of in (0, 1)
    )
    return GroupRow(
        group=group.name,
        about=group.about,
        ranks=list(ranks),
        size=size,
        place=kind.place,
        backend=kind.backend,
        collective=kind.collective,
        pass_=kind.pass_,
        dtype=kind.dtype,
        bytes=alike.bytes,
        calls=len(every) / sum(len(steps[number]) for number in calls),
        time_us=median(call.end_ns - call.start_ns for call in every) / 1e3,
        transfer_us=alike.transfer_us,
        transfer_is=alike.transfer_is,
        algbw_gbs=rate_gbs,
        busbw_gbs=None if rate_gbs is None or factor is None else rate_gbs * factor,
        skew_us=median(one.skew_ns for one in met) / 1e3 if met else None,
        skew_max_us=max(one.skew_ns for one in met) / 1e3 if met else None,
        exposed_us=max(exposed) / 1e3,
        hidden=1 - exposed_ns / total_ns if total_ns else None,
        slowdown=1 + lost_ns / alone_ns if alone_ns else None,
    )
