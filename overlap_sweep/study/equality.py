"""Decides whether settings compute the same as the reference: by numbers that every run records, such as norms of
gradients, where the reference's own runs agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Literal, NamedTuple

from overlap_sweep.report.numbers import some_of
from overlap_sweep.study import C, CaseAnalysis, R, Study

Verdict = Literal["equal", "rounding", "differs", "unknown"]

SPREADS = 3.0
"""Multiple of the largest difference between the reference's runs by which another setting may differ: of what runs can
differ by, two or three of them show only a part."""
LEAST_RUNS = 2
"""Runs of the reference that must agree."""


class Seen(NamedTuple):
    """A number that a run has computed."""

    value: float
    """NaN or infinite if the training has diverged."""
    rounding: float
    """Relative difference that is explained by sums in another order."""
    scale: float | None = None
    """What differences are relative to; None: the number itself."""

    def difference(self, reference: Seen) -> float:
        """Returns the relative difference, which is not negative; infinite if one of both is not finite."""
        if not isfinite(self.value) or not isfinite(reference.value):
            return inf
        scale = abs(reference.value) if reference.scale is None else reference.scale
        difference = abs(self.value - reference.value)
        return difference / scale if scale else inf if difference else 0.0


Run = Mapping[str, Seen]
"""What one run has computed, by what it is, such as `norm of gradients after step 5`."""


@dataclass(frozen=True)
class Equality:
    """Whether a setting computes the same as the reference."""

    verdict: Verdict
    """`equal`: bit by bit, as far as is seen; `rounding`: as near as sums in another order are."""
    quantity: str = ""
    """Where it is farthest from the reference, as a share of what is allowed; empty if unknown."""
    value: float = nan
    reference: float = nan
    why: str = ""
    """Why it is unknown."""

    @property
    def in_words(self) -> str:
        """Returns the numbers, such as `norm of gradients after step 5 is 1.2 instead of 1.1`."""
        return f"{self.quantity} is {self.value:.7g} instead of {self.reference:.7g}"


def equality(reference: Sequence[Run], own: Sequence[Run]) -> Equality:
    """Returns whether all runs of a setting compute what the reference's runs do, in what all of them have recorded.

    Where the reference's runs do not repeat some of the numbers, only those count that they repeat bit by bit: with
    random data, a norm of them may well be as near as rounding by chance."""
    names = [name for name in reference[0] if all(name in run for run in (*reference, *own))]
    if not names:
        return Equality("unknown", why="nothing is recorded that could be compared")
    if len(reference) < LEAST_RUNS:
        return Equality("unknown", why="there is one run of it, so it is unknown what its runs differ by")
    spreads = {
        name: max(one[name].difference(other[name]) for one in reference for other in reference) for name in names
    }
    agreed = [name for name in names if spreads[name] <= reference[0][name].rounding]
    if len(agreed) < len(names):
        agreed = [name for name in names if not spreads[name]]
    if not agreed:
        name = max(names, key=spreads.__getitem__)
        values = some_of(f"{run[name].value:.7g}" for run in reference)
        return Equality("unknown", why=f"its own runs differ ({name}: {values}), as with random seeds or data")
    found = []
    for name in agreed:
        allowed = max(reference[0][name].rounding, SPREADS * spreads[name])
        for number in (run[name] for run in own):
            nearest = min((run[name] for run in reference), key=number.difference)
            found.append((number.difference(nearest) / allowed, name, number.value, nearest.value))
    share, name, value, nearest_value = max(found)
    same = share == 0 and not any(spreads[name] for name in agreed)
    verdict: Verdict = "differs" if share > 1 else "equal" if same else "rounding"
    return Equality(verdict, name, value, nearest_value)


def with_equality(study: Study[C, R], analyses: Sequence[CaseAnalysis[C, R]]) -> list[CaseAnalysis[C, R]]:
    """Returns the analyses in which rows say whether they compute the same as the reference, where that matters: in
    settings of which it is asked, and if one is seen to differ."""
    return [_with_equality(study, one) for one in analyses]


def _with_equality(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> CaseAnalysis[C, R]:
    reference = [study.computed(point) for point in analysis.reference.points]
    rows = [
        replace(row, equality=equality(reference, [study.computed(point) for point in row.points]))
        for row in analysis.rows
    ]
    matters = any(row.must_compute_the_same or row.computes_differently for row in rows)
    return analysis.with_rows(rows) if matters else analysis


def cautions(analysis: CaseAnalysis[C, R]) -> Iterator[str]:
    """Yields which settings compute something else than the reference, the best first, and if that is unknown, why."""
    rows, reference = [analysis.best, *analysis.rows], analysis.reference
    # Of other amounts of work other results are expected, and said.
    found = {row.setting: row.equality for row in rows if row.equality and row.amounts == reference.amounts}
    numbers = [f"{name}: {one.in_words}" for name, one in found.items() if one.verdict == "differs"]
    if numbers:
        yield (
            f"Results differ from those of {reference.setting} by more than rounding: "
            f"{some_of(numbers, separator='; ')}. Compare losses over a longer training before using it."
        )
    if declared := dict.fromkeys(option for row in rows for option in row.trains_differently):
        yield (
            f"Made to train differently: {some_of(declared, separator='; ')}. Compare losses over a longer training "
            "before using it."
        )
    if unknown := dict.fromkeys(one.why for one in found.values() if one.verdict == "unknown"):
        yield f"Whether results equal those of {reference.setting} is unknown: {'; '.join(unknown)}."
