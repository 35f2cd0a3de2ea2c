"""Finds the calls of different ranks that are one collective, what their clocks differ by, and who came last."""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import NEVER, UNKNOWN_RANK
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.trace.activity import NO_ITERATION

SAME_CLOCK_NS = 20_000
"""Ranks of one host see the end of a short NCCL collective at times that differ by less."""

OLD_CLOCK_NS = 100_000
"""The same in traces that don't name process groups: versions before 2.3 with the CUPTI of their time."""

SAME_HOST_CLOCK_NS = 500_000
"""The same for gloo, whose threads also wait for a core."""

TRANSFER_SHARE = 0.25
"""Ranks that waited see a long collective end later than the rank that came last, by up to a fifth of its transfer."""

MEETING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Nobody ends before the last one has started: everybody needs something of everybody."""

_END_TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
_IN_GROUPS = MEETING | {"broadcast", "reduce", "gather", "scatter"}
_MOST_FAILURES = 0.1
_Member = tuple[int, int]
"""Index of a rank, and of one of its calls."""

_Difference = tuple[float, int]
"""Nanoseconds by which a rank may see the end of a collective of two ranks later than the other, on one clock, and by
which the second rank saw it later, each on its own clock."""


class _Sequence(NamedTuple):
    """The matched calls of a process group, or of what stands for one, over all steps."""

    matches: list[tuple[_Member, ...]]
    is_one_group: bool
    """Whether all of these ranks must be in the group."""
    is_shown_by_ends: bool = False
    """Whether otherwise only calls that end at the same time show that they are."""


@dataclass(frozen=True)
class Arrivals:
    """When the ranks came to their collectives. Indices of ranks are those of the facts."""

    offsets_ns: list[int]
    """Per rank: add to its times to get those of the first rank's clock."""
    last_ns: list[NDArray[np.int64]]
    """Per rank and call: when the last rank started the same collective, on this rank's clock; NEVER where no other
    rank's call was matched."""
    last_rank: list[NDArray[np.intp]]
    """Per rank and call: the rank that started last; UNKNOWN_RANK where no other rank's call was matched."""
    matches: list[tuple[_Member, ...]]
    """The calls of several ranks, as pairs of a rank and an index of its calls, that are one collective."""
    names: list[dict[str, Hashable]]
    """Per rank, by its name of a process group: a name that the same group has on every rank."""


def arrivals(facts: Sequence[RankFacts]) -> Arrivals:
    """Returns when the last of these ranks came to each collective. Calls are one if they have the same process group
    (of the same ranks, whatever its name), step, kind, sizes and place in the order of launches, from the beginning of
    the step or from its end; and if none ends before the last one has started. Where the trace does not name groups,
    see docs/diagnosis.md (What is unknown)."""
    names = _common_names(facts)
    sequences = list(_sequences(facts, names))
    certain = [match for sequence in sequences if sequence.is_one_group for match in sequence.matches]
    offsets = _offsets(facts, certain)
    found = [match for sequence in sequences for match in _that_met(facts, sequence, offsets)]
    last_ns = [np.full(len(rank.calls), NEVER, np.int64) for rank in facts]
    last_rank = [np.full(len(rank.calls), UNKNOWN_RANK, np.intp) for rank in facts]
    for match in found:
        start_ns, last = max((facts[rank].calls[call].start_ns + offsets[rank], rank) for rank, call in match)
        for rank, call in match:
            last_ns[rank][call] = start_ns - offsets[rank]
            last_rank[rank][call] = last
    return Arrivals(offsets, last_ns, last_rank, found, names)


def _sequences(facts: Sequence[RankFacts], names: Sequence[dict[str, Hashable]]) -> Iterator[_Sequence]:
    streams = _streams(facts)
    is_pair = len(facts) == 2 and all(rank.world_size in (2, None) for rank in facts)
    by_order: dict[Hashable, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    by_stream: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for number, rank in enumerate(facts):
        for i, call in enumerate(rank.calls):
            if call.step == NO_ITERATION:
                continue
            key = _key(facts, number, call, names[number], streams[number])
            if key is not None:
                by_order[key][call.step].setdefault(number, []).append(i)
            elif not call.group and not call.is_message:
                by_stream[call.step].setdefault(number, []).append(i)
    for steps in by_order.values():
        matches = [match for ranks in steps.values() for match in _in_order(facts, ranks)]
        if matches:
            number, i = matches[0][0]
            first = facts[number].calls[i]
            is_nameless = _is_nameless(facts[number], first)
            is_only_one = is_nameless and all(len(own) == 1 for own in streams)
            yield _Sequence(matches, bool(first.group) or is_pair or is_only_one, is_nameless)
    for ranks in by_stream.values():
        yield _Sequence(list(_on_streams(facts, ranks)), is_pair)


def _streams(facts: Sequence[RankFacts]) -> list[dict[int, int]]:
    """Returns, per rank, a number for each stream of nameless collectives that the same group's has on every rank: of
    those that do the same, or else in their order. Nothing if ranks use different numbers of streams."""
    done: list[dict[int, list[Hashable]]] = []
    for rank in facts:
        done.append(defaultdict(list))
        for call in rank.calls:
            if call.step != NO_ITERATION and _is_nameless(rank, call):
                done[-1][call.lane].append((call.step, _kind(call)))
    if len({len(own) for own in done}) != 1:
        return [{} for _ in facts]
    is_same = len({str(sorted(map(str, own.values()))) for own in done}) == 1
    found = []
    for rank, own in zip(facts, done, strict=True):
        keys = {
            lane: (str(kinds) if is_same else "", len(rank.lanes[lane][1]), rank.lanes[lane][1])
            for lane, kinds in own.items()
        }
        found.append({lane: number for number, lane in enumerate(sorted(keys, key=lambda lane: keys[lane]))})
    return found


def _is_nameless(rank: RankFacts, call: Call) -> bool:
    return rank.on_device and not call.group and not call.is_wait and call.collective in _IN_GROUPS


def _key(
    facts: Sequence[RankFacts], number: int, call: Call, names: dict[str, Hashable], streams: dict[int, int]
) -> Hashable | None:
    """Returns what calls that may be one collective have in common; None if only their streams show it."""
    rank = facts[number]
    group = rank.groups.get(call.group)
    common = names.get(call.group, ())
    if call.group and not common:
        return None
    if not call.group and rank.on_device:
        if call.is_wait or not (call.is_message or call.collective in _IN_GROUPS):
            return None
        if streams and not call.is_message:
            return (streams[call.lane], "")
    if not call.is_message:
        return (common, "" if call.group else call.collective)
    if (group.size if group else call.group_size or rank.world_size or len(facts)) != 2:
        return None
    lowest = min(range(len(facts)), key=lambda i: (facts[i].rank is None, facts[i].rank or 0))
    is_first = rank.rank == min(group.ranks) if group and group.ranks else number == lowest
    return (common, call.collective if call.collective == "send_recv" else (call.collective == "send") == is_first)


def _common_names(facts: Sequence[RankFacts]) -> list[dict[str, Hashable]]:
    """Returns, per rank, a name for each of its process groups that the same group has on every rank: its set of ranks,
    with what distinguishes several groups of the same ranks. Groups whose ranks are unknown go by their names, unless
    more ranks than they have members know the name."""
    by_ranks: dict[frozenset[int], dict[int, list[Group]]] = defaultdict(dict)
    by_name: dict[str, list[Group]] = defaultdict(list)
    for number, rank in enumerate(facts):
        for group in rank.groups.values():
            if group.ranks:
                by_ranks[frozenset(group.ranks)].setdefault(number, []).append(group)
            else:
                by_name[group.name].append(group)
    found: list[dict[str, Hashable]] = [{} for _ in facts]
    for ranks, groups in by_ranks.items():
        field = _distinguishing_field(list(groups.values()))
        for number, own in groups.items():
            if field is not None:
                found[number] |= {group.name: (ranks, getattr(group, field, "")) for group in own}
    for number, rank in enumerate(facts):
        for group in rank.groups.values():
            if not group.ranks and len(by_name[group.name]) <= (group.size or len(facts)):
                found[number][group.name] = group.name
    return found


def _distinguishing_field(groups: list[list[Group]]) -> str | None:
    """Returns the field that distinguishes groups of the same ranks, given each rank's list of them; empty if there is
    nothing to distinguish, None if no field does."""
    if all(len(own) == 1 for own in groups):
        return ""
    if len({frozenset(group.name for group in own) for own in groups}) == 1:
        return "name"
    return "about" if all(len({group.about for group in own}) == len(own) for own in groups) else None


def _in_order(facts: Sequence[RankFacts], ranks: dict[int, list[int]]) -> Iterator[tuple[_Member, ...]]:
    """Yields matched calls of one step: those at the same place from its beginning, then from its end."""
    if len(ranks) < 2:
        return
    ordered = {number: _launched_in_order(facts[number].calls, calls) for number, calls in ranks.items()}
    calls_of = [[facts[number].calls[i] for i in calls] for number, calls in ordered.items()]
    exchanged = [{_exchanged(call) for call in calls if call.collective == "all_to_all"} for calls in calls_of]
    # Experts are sent different amounts; other all-to-alls have the same sizes everywhere.
    fewest = min(exchanged, key=len)
    are_equal = all(fewest <= own for own in exchanged)
    kinds = [[(_kind(call), are_equal and _exchanged(call)) for call in calls] for calls in calls_of]
    first, last = _ends_in_common(kinds)
    for place in (*range(first), *range(-last, 0)):
        yield tuple((number, calls[place]) for number, calls in ordered.items())


def _launched_in_order(calls: Sequence[Call], chosen: list[int]) -> list[int]:
    """Returns the calls in the order of their launches; as they ran if those are unknown."""
    is_known = all(calls[i].launch_ns != NEVER for i in chosen)
    return sorted(chosen, key=lambda i: (calls[i].launch_ns * is_known, calls[i].start_ns, calls[i].end_ns))


def _kind(call: Call) -> Hashable:
    """Returns what every rank's call of one collective has."""
    if call.collective in ("send", "recv"):
        return ("", call.received if call.collective == "recv" else call.sent, call.dtype)
    sizes = (call.sent, call.received, call.dtype) if call.collective in _END_TOGETHER | {"broadcast"} else ()
    return (call.collective, call.is_wait, *sizes)


def _exchanged(call: Call) -> Hashable:
    """Returns the sizes of an all-to-all; nothing for other calls."""
    return (call.sent, call.received) if call.collective == "all_to_all" else ()


def _ends_in_common(sequences: Sequence[Sequence[Hashable]]) -> tuple[int, int]:
    """Returns how many items at the beginning, and at the end, all sequences have in common and in only one way."""
    shortest = min(map(len, sequences))
    if all(sequence == sequences[0] for sequence in sequences):
        return shortest, 0
    first, last = (
        sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*ways, strict=False)))
        for ways in (sequences, [sequence[::-1] for sequence in sequences])
    )
    return min(first, shortest - last), min(last, shortest - first)


def _on_streams(facts: Sequence[RankFacts], ranks: dict[int, list[int]]) -> Iterator[tuple[_Member, ...]]:
    """Yields matched kernels of one step, if every rank has the same ones in the same order on as many streams."""
    if len(ranks) < 2 or len(ranks) < len(facts):
        return
    streams = []
    for number, chosen in ranks.items():
        lanes: dict[int, list[int]] = defaultdict(list)
        for i in chosen:
            lanes[facts[number].calls[i].lane].append(i)
        kinds = {lane: [_kind(facts[number].calls[i]) for i in own] for lane, own in lanes.items()}
        # Numbers of streams differ between ranks; streams with the same kernels are taken in the order of their use.
        ordered = sorted(lanes, key=lambda lane: (str(kinds[lane]), lanes[lane][0]))
        streams.append(([kinds[lane] for lane in ordered], [[(number, i) for i in lanes[lane]] for lane in ordered]))
    if all(kinds_of_rank == streams[0][0] for kinds_of_rank, _ in streams):
        for same_stream in zip(*(own for _, own in streams), strict=True):
            yield from zip(*same_stream, strict=True)


def _that_met(facts: Sequence[RankFacts], sequence: _Sequence, offsets_ns: list[int]) -> list[tuple[_Member, ...]]:
    """Returns the matches whose ranks were in the collective at once; none if too many of them were not, or if the
    ranks are not known to be of one group."""
    met, together, apart = [], 0, 0
    clock_ns = OLD_CLOCK_NS if sequence.is_shown_by_ends and sequence.is_one_group else SAME_CLOCK_NS
    for match in sequence.matches:
        calls = [(facts[rank].calls[call], rank) for rank, call in match]
        last_ns = max(call.start_ns + offsets_ns[rank] for call, rank in calls)
        ends_ns = [call.end_ns + offsets_ns[rank] for call, rank in calls]
        collective = calls[0][0].collective
        if collective not in MEETING or last_ns <= min(ends_ns) + clock_ns:
            met.append(match)
        if collective in _END_TOGETHER:
            transfer_ns = min(call.end_ns - call.start_ns for call, _ in calls)
            is_together = max(ends_ns) - min(ends_ns) <= clock_ns + _explained_ns(collective, transfer_ns)
            together, apart = together + is_together, apart + (not is_together)
    if sequence.is_shown_by_ends and (
        apart > _MOST_FAILURES * (together + apart) or not (together or sequence.is_one_group)
    ):
        return []
    return met if len(sequence.matches) - len(met) <= _MOST_FAILURES * len(sequence.matches) else []


def _offsets(facts: Sequence[RankFacts], matches: list[tuple[_Member, ...]]) -> list[int]:
    """Returns what to add to each rank's times to get those of the first rank's clock: the median difference of ends of
    the shortest quarter of their collectives (on two H200s these end within 1 us, longer ones within a fifth of the
    transfer), unless one clock explains the differences. Ranks without a collective in common are compared through
    others. `matches`: of calls that are known to be of one process group."""
    differences: dict[int, dict[int, list[_Difference]]] = defaultdict(lambda: defaultdict(list))
    for match in matches:
        calls = [(rank, facts[rank].calls[call]) for rank, call in match]
        first, one = calls[0]
        if one.collective in _END_TOGETHER | {"all_to_all"}:
            explained_ns = _explained_ns(one.collective, min(call.end_ns - call.start_ns for _, call in calls))
            for rank, call in calls[1:]:
                later_ns = call.end_ns + facts[rank].base_time_ns - one.end_ns - facts[first].base_time_ns
                differences[first][rank].append((explained_ns, later_ns))
                differences[rank][first].append((explained_ns, -later_ns))
    offsets = [rank.base_time_ns - facts[0].base_time_ns for rank in facts]
    compared, waiting = {0}, deque([0] if facts else [])
    while waiting:
        known = waiting.popleft()
        shift_ns = offsets[known] - (facts[known].base_time_ns - facts[0].base_time_ns)
        for rank, seen in sorted(differences[known].items(), key=lambda item: -len(item[1])):
            if rank not in compared:
                compared.add(rank)
                waiting.append(rank)
                least_ns = SAME_CLOCK_NS if facts[rank].on_device else SAME_HOST_CLOCK_NS
                offsets[rank] += shift_ns - _clock_difference_ns(seen, least_ns)
    return offsets


def _explained_ns(collective: str, transfer_ns: int) -> float:
    """Returns how much later one rank may see the end than another. `transfer_ns`: time of the rank that came last."""
    # Ranks exchange different amounts.
    return transfer_ns if collective == "all_to_all" else TRANSFER_SHARE * transfer_ns


def _clock_difference_ns(seen: list[_Difference], least_ns: int) -> int:
    """Returns what two clocks differ by; 0 if one clock explains the differences."""
    lowest, highest = np.quantile([later_ns for _, later_ns in seen], (0.1, 0.9))
    explained_ns, later_ns = np.median(sorted(seen)[: max(len(seen) // 4, 5)], axis=0)
    return 0 if abs(later_ns) < least_ns + explained_ns or lowest <= 0 <= highest else round(later_ns)
