"""Communication by process group, and within and between nodes: sizes, times, bandwidths, skew, and what is exposed."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal, NamedTuple, TypeVar

import msgspec

from overlap_sweep.diagnosis import Pass, once
from overlap_sweep.diagnosis.arrivals import MEETING, Arrivals
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group, type_of
from overlap_sweep.diagnosis.facts import PLACES, Place, RankFacts, place_of, size_of
from overlap_sweep.diagnosis.slowed import slowed_by_call
from overlap_sweep.trace.intervals import Measure, intervals_of, length, merge
from overlap_sweep.trace.iterations import IterationSpan

Known = Literal["measured", "at_most", ""]

Key = TypeVar("Key", bound=Hashable)


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
    chosen: dict[Kind, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    kinds: list[dict[int, Kind]] = [{} for _ in facts]
    fastest_ns: dict[Kind, int] = {}
    for number, rank in enumerate(facts):
        counted = {step.number for step in _counted_steps(rank)}
        for i, call in enumerate(rank.calls):
            if call.step in counted:
                kind = _kind(facts, arrived, number, call)
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


def _counted_steps(rank: RankFacts) -> list[IterationSpan]:
    """Returns the steps without start-up; all if there are no others."""
    return [step for step in rank.steps if not step.startup] or rank.steps


def _group_key(arrived: Arrivals, rank: int, group: str) -> Hashable:
    """Returns what a group has in common on all its ranks."""
    return arrived.names[rank].get(group, (rank, group)) if group else ""


def _kind(facts: Sequence[RankFacts], arrived: Arrivals, number: int, call: Call) -> Kind:
    rank = facts[number]
    return Kind(
        group=_group_key(arrived, number, call.group),
        collective=call.collective,
        dtype=type_of(call.dtype),
        bytes=None if call.collective == "all_to_all" else call.buffer_bytes(size_of(rank, call)),
        pass_=call.pass_,
        backend=call.library,
        place=place_of(rank, call),
    )


def _met(facts: Sequence[RankFacts], match: Iterable[tuple[int, int]], offsets_ns: list[int]) -> Met:
    """Returns how long a collective took after its last rank had started: until the median of the ends where everybody
    needs everybody, else until the last, because those who only send may end before others have started."""
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
        every = (facts[rank].calls[i].buffer_bytes() for rank, own in calls.items() for i in own)
        sizes = [size for size in every if size is not None]
        size_bytes = round(median(sizes)) if sizes else None
    if met:
        size, _ = _members(facts, calls, met)
        is_whole = size is not None and all(one.ranks >= size for one in met)
        transfer_us = median(one.transfer_ns for one in met) / 1e3
        return Alike(kind, calls, met, size_bytes, transfer_us, "measured" if is_whole else "at_most")
    if kind.bytes is not None:
        return Alike(kind, calls, met, size_bytes, fastest_ns / 1e3, "at_most")
    return Alike(kind, calls, met, size_bytes, None, "")


def _members(
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


class GroupRow(msgspec.Struct, kw_only=True):
    """Calls of one kind and size in one process group, of all its ranks whose traces are there, without start-up
    steps. docs/columns.md explains the numbers; they are None where they are unknown."""

    group: str
    """Name on the first rank that has it; empty if the trace does not know the group."""
    about: str
    """What the program calls the group."""
    ranks: list[int]
    """Empty if unknown."""
    size: int | None
    place: Place
    backend: str
    collective: str
    pass_: Pass = msgspec.field(name="pass")
    dtype: str
    bytes: int | None
    calls: float
    """Per step of a rank, on average."""
    time_us: float
    """Median of all calls, with the wait for the last rank."""
    transfer_us: float | None
    transfer_is: Known
    """`measured` with the traces of all ranks of the group. `at_most` if some are missing, who may have come still
    later; of a single rank's trace it is the fastest call of the same size, in any pass. Empty if unknown."""
    algbw_gbs: float | None
    """10^9 bytes per second."""
    busbw_gbs: float | None
    skew_us: float | None
    """Median of the time from the first rank's start to the last rank's; None if only one rank's calls are known."""
    skew_max_us: float | None
    exposed_us: float
    """Per step, median, of the rank with most of it. What several groups expose at once counts for each."""
    hidden: float | None
    """Part of the calls' time, of all ranks, in which their rank computes."""
    slowdown: float | None
    """Time of the GEMMs next to the calls / time of the same GEMMs alone."""


class GroupTotal(msgspec.Struct, kw_only=True):
    """All calls of one process group by one library, without start-up steps: medians per step of the rank that exposes
    most."""

    group: str
    about: str
    ranks: list[int]
    backend: str
    exposed_us: float
    hidden_us: float


class NodeTimes(msgspec.Struct, kw_only=True):
    """Communication of a run on several nodes: medians per step of the rank that communicates most between them, calls
    at the same time counted once, with the wait for the last rank; and bus bandwidths without it, in 10^9 bytes per
    second."""

    ranks_per_node: int
    comm_us: float
    within_us: float
    between_us: float
    unknown_us: float
    """Time of calls whose process group the trace does not know."""
    exposed_between_us: float
    within_gb_s: float | None
    between_gb_s: float | None
    at_least: bool
    """Whether the bandwidths may be higher: without the traces of all ranks of a group, the last rank's start is
    unknown."""


def _times_by(rank: RankFacts, key_of: Callable[[Call], Key]) -> defaultdict[Key, list[tuple[int, int]]]:
    """Returns, for each kind of calls, how long they took in each step that counts, and the part of it in which nothing
    computed, in nanoseconds. Calls at the same time count once."""
    compute, counted = Measure(rank.work.intervals), dict.fromkeys(step.number for step in _counted_steps(rank))
    calls: dict[Key, dict[int, list[Call]]] = defaultdict(lambda: {number: [] for number in counted})
    for call in rank.calls:
        if call.step in counted:
            calls[key_of(call)][call.step].append(call)
    found: defaultdict[Key, list[tuple[int, int]]] = defaultdict(lambda: [(0, 0)])
    for key, by_step in calls.items():
        unions = [merge(intervals_of(own)) for own in by_step.values()]
        found[key] = [(length(union), length(union) - round(compute.within(union).sum())) for union in unions]
    return found


def group_totals(facts: Sequence[RankFacts], arrived: Arrivals) -> list[GroupTotal]:
    """Returns what each process group exposes and hides, what exposes most first."""
    found: dict[tuple[Hashable, str], list[GroupTotal]] = defaultdict(list)
    for number, rank in enumerate(facts):
        for (name, library), each in _times_by(rank, lambda call: (call.group, call.library)).items():
            group = rank.groups.get(name) or Group("", "", (), None)
            total = GroupTotal(
                group=group.name,
                about=group.about,
                ranks=list(group.ranks),
                backend=library,
                exposed_us=median(exposed for _, exposed in each) / 1e3,
                hidden_us=median(took - exposed for took, exposed in each) / 1e3,
            )
            found[_group_key(arrived, number, name), library].append(total)
    most = [max(by_rank, key=lambda total: total.exposed_us) for by_rank in found.values()]
    return sorted(most, key=lambda total: -total.exposed_us)


def group_rows(facts: Sequence[RankFacts], arrived: Arrivals) -> list[GroupRow]:
    """Returns a row for each process group, collective, type, size and pass; what costs most first."""
    times = [_times_by(rank, partial(_kind, facts, arrived, number)) for number, rank in enumerate(facts)]
    slowed = [once(rank, slowed_by_call) for rank in facts]
    rows = []
    for one in alike_calls(facts, arrived):
        lost_ns, alone_ns = (
            sum(float(slowed[number][column][own].sum()) for number, own in one.calls.items()) for column in (0, 1)
        )
        own_times = [times[number][one.kind] for number in one.calls]
        rows.append(_row(facts, one, own_times, 1 + lost_ns / alone_ns if alone_ns else None))
    return sorted(rows, key=lambda row: (-row.exposed_us, -row.calls * row.time_us, row.group, row.collective))


def _row(
    facts: Sequence[RankFacts], alike: Alike, times: list[list[tuple[int, int]]], slowdown: float | None
) -> GroupRow:
    """Returns the row of alike calls. `times`: of each of their ranks, as of `_times_by`."""
    kind, met, rate_gbs = alike.kind, alike.met, alike.rate_gbs
    every = [facts[number].calls[i] for number, own in alike.calls.items() for i in own]
    group = facts[next(iter(alike.calls))].groups.get(every[0].group) or Group("", "", (), None)
    size, ranks = _members(facts, alike.calls, met)
    factor = bus_factor(kind.collective, size)
    total_ns, exposed_ns = (sum(step[column] for steps in times for step in steps) for column in (0, 1))
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
        calls=len(every) / sum(map(len, times)),
        time_us=median(call.end_ns - call.start_ns for call in every) / 1e3,
        transfer_us=alike.transfer_us,
        transfer_is=alike.transfer_is,
        algbw_gbs=rate_gbs,
        busbw_gbs=None if rate_gbs is None or factor is None else rate_gbs * factor,
        skew_us=median(one.skew_ns for one in met) / 1e3 if met else None,
        skew_max_us=max(one.skew_ns for one in met) / 1e3 if met else None,
        exposed_us=max(median(exposed for _, exposed in steps) for steps in times) / 1e3,
        hidden=1 - exposed_ns / total_ns if total_ns else None,
        slowdown=slowdown,
    )


def bus_factor(collective: str, size: int | None) -> float | None:
    """Returns bus bandwidth / algorithm bandwidth by the formulas of nccl-tests (doc/PERFORMANCE.md); None if the
    collective has none."""
    if collective in ("broadcast", "reduce", "send", "recv", "send_recv"):
        return 1.0
    if size is None:
        return None
    if collective == "all_reduce":
        return 2 * (size - 1) / size
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return None


def node_times_of(facts: Sequence[RankFacts], rows: Sequence[GroupRow]) -> NodeTimes | None:
    """Returns what communication within and between nodes costs; `rows`: of the process groups. None if the run is
    known to have one node, or the ranks of a node are unknown."""
    per_node = facts[0].ranks_per_node
    world_size = max((own.world_size or 0 for own in facts), default=0)
    if per_node is None or (0 < world_size <= per_node):
        return None
    most = max(map(_by_place, facts), key=lambda times: (times["between"][0], times["all"][0]))
    within_gb_s, between_gb_s = (_bandwidth([row for row in rows if row.place == place]) for place in PLACES[:2])
    return NodeTimes(
        ranks_per_node=per_node,
        comm_us=most["all"][0],
        within_us=most["within"][0],
        between_us=most["between"][0],
        unknown_us=most[""][0],
        exposed_between_us=most["between"][1],
        within_gb_s=within_gb_s,
        between_gb_s=between_gb_s,
        at_least=any(row.place and row.busbw_gbs is not None and row.transfer_is == "at_most" for row in rows),
    )


def _by_place(rank: RankFacts) -> dict[str, tuple[float, float]]:
    """Returns the time of a rank's calls per step, and the exposed part of it, by place and of `all`, in
    microseconds."""
    place: Callable[[Call], str] = partial(place_of, rank)
    times = _times_by(rank, place) | _times_by(rank, lambda call: "all")
    return {
        name: (median(took for took, _ in times[name]) / 1e3, median(exposed for _, exposed in times[name]) / 1e3)
        for name in (*PLACES, "all")
    }


def _bandwidth(rows: Iterable[GroupRow]) -> float | None:
    """Returns the bus bandwidth over all calls of the rows; None if none is known."""
    known = [(row.busbw_gbs, row.calls * row.transfer_us) for row in rows if row.busbw_gbs and row.transfer_us]
    total_us = sum(took_us for _, took_us in known)
    return sum(rate * took_us for rate, took_us in known) / total_us if total_us else None
