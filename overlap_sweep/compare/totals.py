"""Many points taken together: means of the ratios of those that match, and sums over the passes that all have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.fields import matchable
from overlap_sweep.compare.matching import VERDICTS, Match
from overlap_sweep.compare.ratios import geometric_mean, ratio
from overlap_sweep.compare.slots import SlotChange
from overlap_sweep.results.estimate import hidden_fraction


@dataclass(frozen=True)
class Aggregate:
    """Matching points taken together: of a pass of an operator at one TP size, or all of them."""

    dataset: str
    case: str
    """Empty where there is only one."""
    tp_size: int | None
    operator: str | None
    """None, like the pass, for all together."""
    pass_name: str | None
    counts: dict[str, int]
    """By verdict."""
    ratio: float
    """The geometric mean of the ratios of all matching points; so are the others."""
    best_ratio: float
    """Of the best settings, whether the same or not; NaN for layers."""
    none_ratio: float
    floor_ratio: float

    @property
    def points(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Totals:
    """One dataset as a whole: sums over the passes that were decided in all datasets. Microseconds."""

    label: str
    passes: int
    best_us: float
    none_us: float
    floor_us: float

    @property
    def speedup(self) -> float:
        return ratio(self.none_us, self.best_us)

    @property
    def hidden_fraction(self) -> float:
        return hidden_fraction(self.best_us, self.none_us, self.floor_us)


_Group = tuple[str, int | None, str | None, str | None]
"""Case, TP size, operator and pass."""


def aggregates(
    dataset: str, matches: Sequence[Match], slots: Sequence[SlotChange], telling: Sequence[str]
) -> list[Aggregate]:
    """By case, TP size, operator and pass, and last all together. Matches and slots are all of the dataset."""

    def group_of(match: Match) -> _Group:
        key = match.ours.key
        return key.case(telling), key.tp_size, key.operator, key.pass_name

    return [
        *(
            _aggregate(
                dataset,
                group,
                [match for match in matches if group_of(match) == group],
                [slot for slot in slots if group_of(slot) == group],
            )
            for group in dict.fromkeys(map(group_of, matches))
        ),
        _aggregate(dataset, ("", None, None, None), matches, slots),
    ]


def totals(datasets: Sequence[Dataset], compared: Collection[str]) -> list[Totals]:
    by_key = [{matchable(key, compared): choice for key, choice in d.choices.items()} for d in datasets]
    common = set.intersection(*map(set, by_key))
    return [
        Totals(
            label=dataset.label,
            passes=len(common),
            best_us=math.fsum(choices[key].chosen.time_us for key in common),
            none_us=math.fsum(choices[key].none.time_us for key in common),
            floor_us=math.fsum(choices[key].floor_us for key in common),
        )
        for dataset, choices in zip(datasets, by_key, strict=True)
    ]


def _aggregate(dataset: str, group: _Group, matches: Sequence[Match], slots: Sequence[SlotChange]) -> Aggregate:
    verdicts = Counter(match.verdict for match in matches)
    # Both slots of a pass have the same best, and all settings of a pass the same baselines.
    best = {slot.ours.key: slot.ratio for slot in slots}
    passes = {match.ours.key._replace(setting=""): match for match in matches}.values()
    return Aggregate(
        dataset,
        *group,
        counts={name: verdicts[name] for name in VERDICTS},
        ratio=geometric_mean(match.ratio for match in matches),
        best_ratio=geometric_mean(best.values()),
        none_ratio=geometric_mean(match.none_ratio for match in passes),
        floor_ratio=geometric_mean(match.floor_ratio for match in passes),
    )
