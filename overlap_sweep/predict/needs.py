"""Finds what needed what between streams: a trace has the host's calls that record events and make streams wait, but
not for which event. Each wait is taken for the last event before it that none has been taken for, unless times show
that what was launched next did not wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.diagnosis.exposure import Exposure
from overlap_sweep.diagnosis.facts import RankFacts

EARLY_NS = 2_000
"""A kernel that starts so much before the end of another did not wait for it; clocks of streams differ by less."""

MOSTLY = 0.9
"""Share of the calls of a kind that show what all of them do."""

EVENTS_BEFORE = 16
"""Events that are looked at for what a wait is for."""


class Item(NamedTuple):
    """Computation or a collective of one rank: its place in the list of work or of calls."""

    is_call: bool
    number: int


class Needs(NamedTuple):
    after: Item
    before: Item


class _Launched(NamedTuple):
    launch_ns: int
    start_ns: int
    end_ns: int
    item: Item


def needs_of(facts: RankFacts) -> list[Needs]:
    """Returns what needed what on a rank, by the host's calls; without any, as times show it."""
    work = facts.work
    columns = zip(work.launch_ns.tolist(), work.start_ns.tolist(), work.end_ns.tolist(), strict=True)
    launched = [_Launched(*row, Item(False, i)) for i, row in enumerate(columns)]
    launched += [
        _Launched(call.launch_ns, call.start_ns, call.end_ns, Item(True, i)) for i, call in enumerate(facts.calls)
    ]
    launched = sorted(one for one in launched if one.launch_ns != NEVER)
    return list(_by_events(facts, launched)) or list(_by_times(facts, launched))


def seen_waiting(exposure: Exposure) -> Iterator[Needs]:
    """Yields computation that started when a call had ended, after nothing had computed."""
    for one in exposure.exposed.values():
        if one.first_blocked is not None and one.ended_by is not None:
            yield Needs(Item(False, one.first_blocked), Item(True, one.ended_by))


def _by_events(facts: RankFacts, launched: Sequence[_Launched]) -> Iterator[Needs]:
    """Yields what the host made wait, which it launched right after the call, and what it had launched right before it
    recorded the event."""
    launches = [one.launch_ns for one in launched]
    before = np.searchsorted(launches, [event.host_ns for event in facts.stream_events]).tolist()
    free: list[_Launched] = []
    for event, place in zip(facts.stream_events, before, strict=True):
        if not event.is_wait:
            if place:
                free.append(launched[place - 1])
            continue
        if place == len(launched):
            continue
        after = launched[place]
        for at in range(len(free) - 1, max(len(free) - 1 - EVENTS_BEFORE, -1), -1):
            if free[at].end_ns <= after.start_ns + EARLY_NS and free[at].item != after.item:
                yield Needs(after.item, free.pop(at).item)
                break


def _by_times(facts: RankFacts, launched: Sequence[_Launched]) -> Iterator[Needs]:
    """Yields for each call the computation launched before it, if calls of its kind start after that."""
    last: _Launched | None = None
    found: dict[tuple[str, str, str], list[tuple[_Launched, _Launched]]] = defaultdict(list)
    for one in launched:
        if not one.item.is_call:
            last = one
        elif last is not None:
            call = facts.calls[one.item.number]
            found[call.group, call.collective, call.pass_].append((one, last))
    for pairs in found.values():
        if _mostly(after.start_ns >= before.end_ns - EARLY_NS for after, before in pairs):
            yield from (Needs(after.item, before.item) for after, before in pairs)


def _mostly(flags: Iterable[bool]) -> bool:
    listed = list(flags)
    return sum(listed) >= MOSTLY * len(listed)
