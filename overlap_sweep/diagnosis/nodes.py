"""Tells communication within a node from that between nodes, and what each costs.

Ranks are placed on nodes in order: rank r is on node r // ranks per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.exposure import Measure, counted_steps, exposed_per_step
from overlap_sweep.diagnosis.facts import RankFacts, size_of

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.groups import GroupRow

Place = Literal["within", "between", ""]
"""Within a node, between nodes, or empty: unknown."""

PLACES: tuple[Place, ...] = get_args(Place)

_PEER_MEMORY = frozenset({"peer_copy", "userbuffers"})
"""Libraries that write into another GPU's memory, which they map through CUDA's handles for processes of one host."""


class NodeTimes(msgspec.Struct, kw_only=True):
    """The communication of a run on several nodes: medians per step of the rank that communicates most between them.
    Times include the wait for the last rank; bandwidths do not."""

    ranks_per_node: int
    comm_us: float
    """Time in which a call runs; calls at the same time count once, here and below."""
    within_us: float
    between_us: float
    unknown_us: float
    """Time of calls whose process group the trace does not tell."""
    exposed_between_us: float
    """Part of between_us in which the rank computes nothing."""
    within_gb_s: float | None
    """Bus bandwidth (`groups.bus_factor`) of the calls whose sizes are known, weighted by their time, in 10^9 bytes per
    second; None if the traces have no sizes."""
    between_gb_s: float | None
    at_least: bool
    """Whether the bandwidths may be higher: without the traces of all ranks of a group, the last rank's start is
    unknown."""


def place_of(facts: RankFacts, call: Call) -> Place:
    """Returns where a call's communication goes.

    A send or recv goes to its peer, any other call to all ranks of its process group. Where the trace does not name the
    group, as those of gloo, all groups of its size that the rank belongs to must agree.
    """
    per_node, world_size = facts.ranks_per_node, facts.world_size
    if per_node is None:
        return ""
    if world_size is not None and world_size <= per_node:
        return "within"
    if facts.rank is not None and call.peer is not None:
        return _of_ranks((facts.rank, call.peer), per_node)
    size = size_of(facts, call)
    if size == 1:
        return "within"
    if call.group:
        groups = [facts.groups[call.group]] if call.group in facts.groups else []
    elif call.library in _PEER_MEMORY:
        return "within"
    else:
        own = [group for group in facts.known_groups if not group.ranks or facts.rank in (None, *group.ranks)]
        groups = [group for group in own if _size(group) != 1 and size in (None, _size(group))]
    messages = call.collective in ("send", "recv", "send_recv")
    places = {_of_group(group, facts, per_node, messages=messages) for group in groups}
    if not places:
        # Groups that have more ranks than a node.
        return "between" if per_node == 1 or (not messages and (size or 0) > per_node) else ""
    return places.pop() if len(places) == 1 else ""


def _size(group: Group) -> int | None:
    return len(group.ranks) or group.size


def _of_group(group: Group, facts: RankFacts, per_node: int, *, messages: bool) -> Place:
    """Returns where the communication of a whole group goes; `messages`: of two of its ranks, but not which."""
    size = _size(group) or 0
    ranks = group.ranks or (range(size) if size and size == facts.world_size else ())
    if per_node == 1:
        return "within" if size == 1 else "between"
    if ranks and _of_ranks(ranks, per_node) == "within":
        return "within"
    if messages and size != 2:
        return ""
    if ranks:
        return "between"
    # A trace cuts the list of a large group's ranks.
    return "between" if size > per_node else ""


def _of_ranks(ranks: Iterable[int], per_node: int) -> Place:
    return "within" if len({rank // per_node for rank in ranks}) == 1 else "between"


def node_times_of(facts: Sequence[RankFacts], rows: Sequence[GroupRow]) -> NodeTimes | None:
    """Returns what communication within and between nodes costs; `rows`: of the process groups. None if the run is
    known to have one node, or the ranks of a node are unknown."""
    per_node = facts[0].ranks_per_node
    world_size = max((own.world_size or 0 for own in facts), default=0)
    if per_node is None or (0 < world_size <= per_node):
        return None
    most = max((_times(own) for own in facts), key=lambda times: (times["between"][0], times["all"][0]))
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


def _times(facts: RankFacts) -> dict[str, tuple[float, float]]:
    """Returns the time of a rank's calls per step, and the exposed part of it, by place and of `all`."""
    steps, compute = counted_steps(facts.steps), Measure(facts.work.intervals)
    counted = {step.number for step in steps}
    calls: dict[str, list[Call]] = {name: [] for name in (*PLACES, "all")}
    for call in facts.calls:
        if call.step in counted:
            calls[place_of(facts, call)].append(call)
            calls["all"].append(call)
    found = {}
    for name, own in calls.items():
        each = exposed_per_step(own, steps, compute) or [(0, 0)]
        found[name] = (median(took for took, _ in each) / 1e3, median(exposed for _, exposed in each) / 1e3)
    return found


def _bandwidth(rows: Iterable[GroupRow]) -> float | None:
    """Returns the bus bandwidth over all calls of the rows, in 10^9 bytes per second; None if none is known."""
    known = [(row.busbw_gbs, row.calls * row.transfer_us) for row in rows if row.busbw_gbs and row.transfer_us]
    total_us = sum(took_us for _, took_us in known)
    return sum(rate * took_us for rate, took_us in known) / total_us if total_us else None
