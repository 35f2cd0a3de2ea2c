"""The process groups of a training, and which values of a lever each of them is worth trying with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlap_sweep.levers import Lever, Value
from overlap_sweep.scopes import parts_of, scope_of

if TYPE_CHECKING:
    from overlap_sweep.diagnosis import Finding
    from overlap_sweep.diagnosis.collectives import Group
    from overlap_sweep.diagnosis.facts import RankFacts


GroupKey = tuple[str, tuple[int, ...]]
"""Description and ranks."""


@dataclass(frozen=True)
class Purpose:
    """Process groups of NCCL that serve the same purpose: each rank has its own of them."""

    groups: Sequence[GroupKey]
    scopes: Sequence[str]
    """What stands for them in the values of levers; none if they are all that there are."""
    blocks: int
    """Most thread blocks of their kernels as it is; 0 if unknown."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """What fixing each cause could gain at most in them, as a share of the step."""

    @property
    def title(self) -> str:
        return "+".join(self.scopes)

    def is_meant(self, value: object) -> bool:
        """Returns whether a value, as `value` gives it, is for them."""
        return [scope for scope, _ in parts_of(str(value))] == [*(self.scopes or [""])]

    def value(self, value: object) -> str:
        """Returns a lever's value that is for them alone."""
        text = str(value).lower()
        return "+".join(f"{scope}:{text}" for scope in self.scopes) if self.scopes else text


def purposes_of(ranks: Sequence[RankFacts], findings: Sequence[Finding]) -> list[Purpose]:
    """Returns the purposes of the process groups that communicated by NCCL; without those that no value can tell from
    others. `findings`: of the same ranks."""
    blocks: dict[GroupKey, int] = defaultdict(int)
    titles: dict[GroupKey, set[str]] = defaultdict(set)
    for facts in ranks:
        for call in facts.calls:
            group = facts.groups.get(call.group)
            if call.library == "nccl" and group and group.size != 1:
                blocks[_key(group)] = max(blocks[_key(group)], call.blocks or 0)
                titles[_key(group)].add(group.title)
    alike: dict[object, list[GroupKey]] = defaultdict(list)
    for description, own in blocks:
        alike[description or (len(own), own[-1] - own[0] if own else 0)].append((description, own))
    found = []
    for keys in alike.values():
        scopes = sorted({scope_of(*key, [other for other in blocks if other != key]) for key in keys})
        named = {title for key in keys for title in titles[key]}
        shares: dict[str, float] = defaultdict(float)
        for one in findings:
            if one.process_group in named:
                shares[one.cause] += one.share
        is_all = len(alike) == 1
        if is_all or all(scopes):
            most = max(blocks[key] for key in keys)
            found.append(Purpose(keys, () if is_all else scopes, most, dict(shares)))
    return found


def shares_by_collective(findings: Sequence[Finding]) -> dict[str, dict[str, float]]:
    """Returns what fixing each cause could gain at most in each collective, as a share of the step."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in findings:
        if one.collective:
            found[one.collective][one.cause] += one.share
    return {collective: {**shares} for collective, shares in found.items()}


def _key(group: Group) -> GroupKey:
    return group.described, tuple(sorted(group.ranks))


def values_for(lever: Lever, purpose: Purpose) -> Iterator[Value]:
    """Yields a lever's values for the groups alone, without such as change nothing: more thread blocks at most than
    they have, or fewer at least."""
    assert lever.constructor
    for value in lever.values:
        if isinstance(value, str) and ":" in value:
            # An example, of groups that others have.
            continue
        made = lever.constructor.make.rpartition(":")[2]
        is_idle = isinstance(value, int) and (
            (made == "max_ctas" and value >= purpose.blocks > 0) or (made == "min_ctas" and value <= purpose.blocks)
        )
        if not is_idle:
            yield purpose.value(value)


def is_of_groups(lever: Lever) -> bool:
    """Returns whether process groups can have each their own value of a lever."""
    return lever.constructor is not None and lever.constructor.argument == "pg_options"
