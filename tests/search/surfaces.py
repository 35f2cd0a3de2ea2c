"""Cells made up of a few knobs, and surfaces of which one knows the truth: noise that is drawn once per seed."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from overlap_sweep.config import Search
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.search import Failure, conduct
from overlap_sweep.search.bisect import bisect
from overlap_sweep.search.cell import NONE, Candidate, Cell, Measured, Trail

LADDER = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)
"""The tuner's num_sm."""
NONE_US = 1000.0


def settings(method: str, **knobs: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the knobs' values."""
    return [{"method": method, **dict(zip(knobs, values, strict=True))} for values in product(*knobs.values())]


def one_slot(settings: Iterable[Mapping[str, Any]], slot: str = "fc1_fprop") -> list[Candidate]:
    return [Candidate.of({slot: dict(setting)}) for setting in settings]


def pair(dgrad: Mapping[str, Any] | None, wgrad: Mapping[str, Any] | None) -> Candidate:
    """Of fc1's backward pass; None leaves a slot out."""
    given = {"fc1_dgrad": dgrad, "fc1_wgrad": wgrad}
    return Candidate.of({slot: dict(setting) for slot, setting in given.items() if setting})


def pairs(settings: Sequence[Mapping[str, Any]]) -> list[Candidate]:
    """dgrad x wgrad, both before one of them."""
    return [pair(*given) for given in product([*settings, None], repeat=2) if any(given)]


def cell(candidates: Iterable[Candidate]) -> Cell:
    return Cell(tuple(candidates))


def bulk_ladder(counts: Sequence[int] = LADDER) -> Cell:
    return cell(one_slot(settings("bulk", num_sm=counts), "fc1_dgrad"))


def two_methods(counts: Sequence[int] = LADDER, **of_pipelines: Sequence[Any]) -> list[Candidate]:
    """Pipelines and ring exchange in fc2's forward pass."""
    pipelines = settings("pipeline", num_sm=counts, **of_pipelines)
    return one_slot([*pipelines, *settings("ring_exchange", num_sm=counts)], "fc2_fprop")


def method_of(candidate: Candidate) -> str:
    """Of fc2's forward pass."""
    return str(candidate.settings["fc2_fprop"]["method"])


def num_sm(candidate: Candidate, slot: str | None = None) -> int:
    """Of the slot, or of the only one."""
    (setting,) = [candidate.settings[slot]] if slot else candidate.settings.values()
    return int(setting["num_sm"])


@dataclass
class Surface:
    """Answers a search with the true times and reproducible noise, and keeps what it was asked."""

    cell: Cell
    time_us: Callable[[Candidate], float]
    """Of a candidate but `none`."""
    none_us: float = NONE_US
    noise: float = 0.0
    """The standard deviation of a measurement, as a share of its time."""
    said_noise: float | None = None
    """What a measurement says of its noise; None: what it is."""
    seed: int = 0
    failures: Mapping[Candidate, Failure] = field(default_factory=dict)
    outliers: Mapping[tuple[Candidate, int], float] = field(default_factory=dict)
    """By candidate and how often it was measured before, what that measurement is multiplied by."""
    asked: Counter[Candidate] = field(default_factory=Counter)
    batches: list[list[Candidate]] = field(default_factory=list)

    def true_us(self, candidate: Candidate) -> float:
        return self.none_us if candidate == NONE else self.time_us(candidate)

    def regret(self, candidate: Candidate) -> float:
        """Against the best of what can be measured, `none` among it."""
        right = [c for c in (NONE, *self.cell.candidates) if c not in self.failures]
        return self.true_us(candidate) / min(map(self.true_us, right)) - 1

    def answer(self, candidate: Candidate) -> Measured:
        before = self.asked[candidate]
        self.asked[candidate] += 1
        if candidate in self.failures:
            return self.failures[candidate]
        drawn = random.Random(f"{self.seed} {candidate.slots} {before}")
        time_us = self.time_us(candidate) * drawn.gauss(1.0, self.noise) * self.outliers.get((candidate, before), 1.0)
        return Estimate(time_us, self._said_noise * time_us, 7)

    @property
    def _said_noise(self) -> float:
        return self.noise if self.said_noise is None else self.said_noise

    def search(self, effort: Search | None = None) -> Trail:
        """To the end."""
        none = Estimate(self.none_us, self._said_noise * self.none_us, 14)
        trail = Trail(self.cell, none, floor_us=0.5 * self.none_us)
        trail.stopped = conduct(bisect(trail, effort or Search()), self._answers)
        return trail

    def _answers(self, wanted: Sequence[Candidate]) -> dict[Candidate, Measured]:
        self.batches.append(list(wanted))
        return {candidate: self.answer(candidate) for candidate in wanted}


def hyperbola(best: float, rest: float, depth: float) -> Callable[[int], float]:
    """a + b / n + c * n: least at `best`, where all but `rest` of NONE_US * depth is a + what the terms share."""
    least_us = depth * NONE_US
    share_us = (1 - rest) * least_us / 2
    return lambda n: rest * least_us + share_us * best / n + share_us * n / best


def exposed(gemm_us: float, best: float, sms: int = 132) -> Callable[[int], float]:
    """max(gemm / (1 - n / sms), b / n): the communication takes SMs from the GEMM, and is as fast as it at `best`."""
    comm_us = gemm_us / (1 - best / sms) * best
    return lambda n: max(gemm_us / (1 - n / sms), comm_us / n)


def settings_tried(trail: Trail) -> int:
    """Returns how many settings were measured, well or in vain."""
    return len(trail.samples) + len(trail.failed)
