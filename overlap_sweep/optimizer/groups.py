"""The process groups of a training, and which values of a lever each of them is worth trying with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlap_sweep.scopes import scope_of

if TYPE_CHECKING:
    from overlap_sweep.diagnosis import Finding
    from overlap_sweep.diagnosis.collectives import Group
    from overlap_sweep.diagnosis.facts import RankFacts


@dataclass(frozen=True)
class Purpose:
    """Process groups of NCCL that serve the same purpose: each rank has its own of them."""

    scopes: Sequence[str]
    """What stands for them in the values of levers; none if they are all that there are."""
    blocks: int
    """Most thread blocks of their kernels as it is; 0 if unknown."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """What fixing each cause could gain at most in them, as a share of the step."""

    @property
    def title(self) -> str:
        return "+".join(self.scopes)

    def value(self, value: object) -> str:
        """Returns a lever's value that is for them alone."""
        text = str(value).lower()
        return "+".join(f"{scope}:{text}" for scope in self.scopes) if self.scopes else text


def purposes_of(ranks: Sequence[RankFacts], findings: Sequence[Finding]) -> list[Purpose]:
    """Returns the purposes of the process groups that communicated by NCCL; without those that no value can tell from
    others. `findings`: of the same ranks."""
    blocks: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    titles: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    for facts in ranks:
        for call in facts.calls:
            group = facts.groups.get(call.group)
            if call.library == "nccl" and group and group.size != 1:
                blocks[_key(group)] = max(blocks[_key(group)], call.blocks or 0)
                titles[_key(group)].add(group.title)
    alike: dict[object, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
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
            found.append(Purpose(() if is_all else scopes, max(blocks[key] for key in keys), dict(shares)))
    return found


def _key(group: Group) -> tuple[str, tuple[int, ...]]:
    return group.described, tuple(sorted(group.ranks))


def values_for(purpose: Purpose, name: str, values: Sequence[object]) -> Iterator[str]:
    """Yields a lever's values for the groups, of those that are for all, without such as change nothing: more thread
    blocks at most than they have, or fewer at least."""
    for value in values:
        if isinstance(value, str) and ":" in value:
            continue
        number = int(value) if isinstance(value, int) else 0
        is_idle = purpose.blocks and (
            (name == "group.max_ctas" and number >= purpose.blocks)
            or (name == "group.min_ctas" and number <= purpose.blocks)
        )
        if not is_idle:
            yield purpose.value(value)
