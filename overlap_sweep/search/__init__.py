"""Find the fastest settings without measuring all of them.

A search is a generator: it yields what to measure next, is sent what came of it, and returns why it ended. It knows
nothing of points and launchers. There are two:

- `bisect` searches one pass of an operator (`cell`: what its slots may be given, and what was measured so far). In
  `tasks` forward and backward searches share points, and `sweeper` advances all of a sweep's round by round.
- `knobs` searches any knobs of any workload, whose measurements `knob_trail` keeps and compares; `knob_sweeper` makes
  points of them.

`measured` has points measured by a Hydra launcher within a budget, for both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from overlap_sweep.results.estimate import Estimate

_Wanted = TypeVar("_Wanted")
_Answers = TypeVar("_Answers")
_Why = TypeVar("_Why")


@dataclass(frozen=True)
class Failure:
    """A setting that could not be measured."""

    reason: str
    wrong_numbers: bool = False
    """It computes something else than without overlap."""
    by_chance: bool = False
    """It may be measured at another time: nothing about the setting is to blame."""


def mean(estimates: Sequence[Estimate], spread_us: float) -> Estimate:
    """Returns several estimates of one setting as one. Its noise is that of a mean of theirs, or what single ones are
    found to differ by, whichever is larger."""
    count = len(estimates)
    noise_us = math.hypot(*(one.noise_us for one in estimates)) / count
    time_us = statistics.fmean(one.time_us for one in estimates)
    return Estimate(time_us, max(noise_us, spread_us / math.sqrt(count)), sum(one.repeats for one in estimates))


def conduct(search: Generator[_Wanted, _Answers, _Why], measure: Callable[[_Wanted], _Answers]) -> _Why:
    """Runs a search to its end; returns what it returns."""
    try:
        wanted = next(search)
        while True:
            wanted = search.send(measure(wanted))
    except StopIteration as stop:
        why: _Why = stop.value
        return why
