"""The end of searches that compete with each other: the best settings of each are measured again in turns.

A search's own times don't compare with those of another one, which was measured at another time, and its best setting
was chosen for its time. So what wins is decided by new points alone, with the noise between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from overlap_sweep import workloads
from overlap_sweep.results import verdict
from overlap_sweep.results.records import Finalist, KnobFinal
from overlap_sweep.results.run_directory import Result
from overlap_sweep.search import Setting
from overlap_sweep.search.knob_trail import KnobTrail
from overlap_sweep.workloads import Searchable

if TYPE_CHECKING:
    from overlap_sweep.search.knob_space import KnobSpace
    from overlap_sweep.search.knob_sweeper import Searching

OF_EACH = 2
"""Settings of each search: the best, and the one that was fastest among the others."""


@dataclass
class Entry:
    """One setting in the end of its search, with its `ok` results."""

    searching: Searching
    setting: Setting
    results: list[Result] = field(default_factory=list)


def contests(spaces: Sequence[KnobSpace]) -> list[list[KnobSpace]]:
    """Returns the spaces that compete, by what they compete for; none that is alone."""
    groups: dict[str, list[KnobSpace]] = {}
    for space in spaces:
        point = space.point()
        found = workloads.of(point).searchable
        if found and found.rivals:
            groups.setdefault(found.rivals(point), []).append(space)
    return [group for group in groups.values() if len(group) > 1]


def finalists(trail: KnobTrail) -> list[Setting]:
    """Returns the best setting and the runner-up; none without a measured baseline."""
    if trail.baseline not in trail.found.of:
        return []
    others = sorted((s for s in trail.found.of if s != trail.best), key=trail.found.time_us)
    return [trail.best, *others][:OF_EACH]


def hold(searches: Sequence[Searching], rounds: int) -> KnobFinal:
    """Measures the finalists of the searches in rounds, whose order alternates."""
    entries = [Entry(searching, setting) for searching in searches for setting in finalists(searching.trail)]
    failed = {one.space.label: one.found.dropped or "no answer" for one in searches if not finalists(one.trail)}
    held, stopped = 0, ""
    for turn in range(rounds if len(searches) - len(failed) > 1 else 0):
        for searching in searches if turn % 2 == 0 else reversed(searches):
            own = [entry for entry in entries if entry.searching is searching]
            results = searching.results([entry.setting for entry in own])
            stopped = stopped or (searching.why_spent if None in results else "")
            for entry, result in zip(own, results, strict=True):
                if result is None:
                    continue
                if result.status == "ok":
                    entry.results.append(result)
                else:
                    failed[searching.space.label] = result.reason
        if stopped:
            break
        held += 1
    # What was measured before the first round was over has nothing to be compared with.
    measured = [entry for entry in entries if entry.results] if held else []
    compared = {entry.searching.space.label for entry in measured}
    amounts = {_searchable(entry).sample(entry.results[0]).amount for entry in measured}
    return KnobFinal(
        rounds=held,
        finalists=_judged(measured),
        work_of=measured[0].searching.space.label if len(amounts) > 1 else "",
        left_out={label: reason for label, reason in failed.items() if label not in compared},
        stopped=stopped,
    )


def _searchable(entry: Entry) -> Searchable:
    found = workloads.of(entry.results[0].point).searchable
    assert found
    return found


def _judged(entries: Sequence[Entry]) -> list[Finalist]:
    """Returns the entries from fast to slow. What deviates from most others is neither the fastest nor a tie."""
    if not entries:
        return []
    of = _searchable(entries[0])
    deviating = [_deviation(entry, entries, of) for entry in entries]
    amount = of.sample(entries[0].results[0]).amount
    samples = [[of.sample(result) for result in entry.results] for entry in entries]
    times = [[sample.scaled(amount / sample.amount).times_us for sample in own] for own in samples]
    limited = [any(result.launch_bound for result in entry.results) for entry in entries]
    estimates = verdict.times_of_steps(times, limited, entries[0].results[0].point.runtime.device)
    order = sorted(range(len(entries)), key=lambda index: estimates[index].time_us)
    sound = [index for index in order if not deviating[index]]
    ties = verdict.ties(sound, lambda index: estimates[index])
    place: Literal["fastest", "tie"] = "tie" if len(ties) > 1 else "fastest"
    return [
        Finalist(
            label=entries[index].searching.space.label,
            overrides=entries[index].searching.typed,
            changed=entries[index].searching.trail.overrides(entries[index].setting),
            time_us=estimates[index].time_us,
            noise_us=estimates[index].noise_us,
            freedom=estimates[index].freedom if math.isfinite(estimates[index].freedom) else None,
            points=[result.name for result in entries[index].results],
            place=place if index in ties else "",
            deviation=deviating[index],
        )
        for index in order
    ]


def _deviation(entry: Entry, entries: Sequence[Entry], of: Searchable) -> str:
    """Returns how the entry differs from those of most other searches; empty if it doesn't."""
    others: Mapping[str, Result] = {
        other.searching.space.label: other.results[0] for other in entries if other.searching is not entry.searching
    }
    found = {label: said for label, result in others.items() if (said := of.deviation(entry.results[0], result))}
    label, said = next(iter(found.items()), ("", ""))
    return f"{said} ({label})" if 2 * len(found) > len(others) else ""
