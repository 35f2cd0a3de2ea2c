"""Finds how long calls take without waiting for other ranks, and at what rate: for findings and for process groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from overlap_sweep.diagnosis import Pass
from overlap_sweep.diagnosis.arrivals import MEETING, Arrivals, common_names
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import type_of
from overlap_sweep.diagnosis.exposure import counted_steps
from overlap_sweep.diagnosis.facts import RankFacts, size_of
from overlap_sweep.diagnosis.nodes import Place, place_of

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
