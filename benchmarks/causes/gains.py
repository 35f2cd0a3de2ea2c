"""Computes what following the advice gained, from steps without the profiler before and after. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True)
class Gain:
    """Steps of a program, and of one that differs from it only in what the advice says."""

    mend: str
    advice: str
    before_ms: Sequence[float]
    after_ms: Sequence[float]
    """For the same work."""
    work: float
    """How much more a step does after than before."""

    @property
    def gained_ms(self) -> float:
        return median(self.before_ms) - median(self.after_ms)

    @property
    def uncertain_ms(self) -> float:
        """Returns two standard errors of the gain; a median's is 0.93 quartile ranges / sqrt(count) of normal times."""
        errors = []
        for times in self._both:
            low, _, high = _quartiles(times)
            errors.append(0.93 * (high - low) / len(times) ** 0.5)
        return 2 * hypot(*errors)

    @property
    def faster(self) -> float:
        return median(self.before_ms) / median(self.after_ms) - 1

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Returns the quartiles before and after."""
        return [(low, high) for low, _, high in map(_quartiles, self._both)]

    @property
    def _both(self) -> tuple[Sequence[float], Sequence[float]]:
        return self.before_ms, self.after_ms


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(times, n=4)
    return low, middle, high


def gains_of(described: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> list[Gain]:
    """Returns what the mends of a scenario gained, given its scenario.json and those of others.

    They were taken in turns if one process could run both.
    """
    found = []
    for mend, meant in described["mends"].items():
        in_turns = described["in_turns_ms"]
        if mend in in_turns:
            before, after = in_turns[described["name"]], in_turns[mend]
        elif mend in others:
            before, after = described["durations_ms"], others[mend]["durations_ms"]
        else:
            continue
        work = meant["work"]
        found.append(Gain(mend, meant["advice"], before, [took / work for took in after], work))
    return found
