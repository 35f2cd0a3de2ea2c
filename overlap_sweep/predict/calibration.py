"""How fast collectives are by their thread blocks, and what GEMMs beside them lose: as recordings have shown it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

import msgspec
import numpy as np


class RateSeen(msgspec.Struct):
    """What the collectives of a recording moved."""

    blocks: int
    gb_per_s: float
    """Bus bandwidth as nccl-tests counts it, without the latency."""
    mb: float
    """Size of the buffers."""
    recording: str


class SlowdownSeen(msgspec.Struct):
    """What GEMMs took longer beside collectives, as a share of their time alone."""

    blocks: int
    share: float
    recording: str


class Calibration(msgspec.Struct):
    """An entry of `calibration.yaml`, which benchmarks/calibration_table.py writes."""

    device: str
    """Kind of GPU, as traces name it."""
    ranks: int
    nccl: str
    rates: dict[str, list[RateSeen]]
    """By collective."""
    slowdowns: list[SlowdownSeen]

    @property
    def exponent(self) -> float:
        """Returns how the slowdown of GEMMs grows with the thread blocks beside them: to their power of this."""
        blocks, shares = ([np.log(value) for value in own] for own in zip(*self._slowdowns(), strict=True))
        return float(np.polyfit(blocks, shares, 1)[0])

    def _slowdowns(self) -> Iterable[tuple[int, float]]:
        return ((one.blocks, one.share) for one in self.slowdowns)


@cache
def calibrations() -> list[Calibration]:
    return msgspec.yaml.decode(Path(__file__).with_name("calibration.yaml").read_bytes(), type=list[Calibration])


def chosen(known: Sequence[Calibration], device: str) -> Calibration:
    """Returns the calibration of the kind of GPU, or of another one where there is none."""
    return next((one for one in known if one.device == device), known[0])


@dataclass(frozen=True)
class Rates:
    """The rate of a kind of collective by its thread blocks: a block moves as much, until the link is full."""

    of_block: float
    """Gigabytes per second, as all rates here."""
    of_link: float

    def of(self, blocks: float, link: float | None = None) -> float:
        """Returns the rate with so many blocks. The two times add up as squares: within 7% of the rates of all-reduces
        with 4 to 64 blocks on two H200s (docs/results/2026-11-28-predict.md)."""
        return ((blocks * self.of_block) ** -2 + (link or self.of_link) ** -2) ** -0.5

    def longer(self, before: float, after: float, rate: float | None) -> float:
        """Returns by what factor moving takes longer with other blocks. `rate`: the recorded one, if it is known; one
        that is lower than these rates shows a slower link."""
        link = None
        if rate is not None and rate < self.of(before):
            link = (rate**-2 - (before * self.of_block) ** -2) ** -0.5
        return self.of(before, link) / self.of(after, link)


def fitted(rates: Mapping[int, float] | Iterable[tuple[int, float]]) -> Rates:
    """Returns what fits rates by thread blocks best, by relative errors. `rates`: of two numbers of blocks at least."""
    pairs = np.array([*(rates.items() if isinstance(rates, Mapping) else rates)], float)
    blocks, squares = pairs[:, 0], pairs[:, 1] ** 2
    columns = np.stack((squares / blocks**2, squares), axis=1)
    (of_block, of_link), *_ = np.linalg.lstsq(columns, np.ones(len(pairs)), rcond=None)
    if of_block <= 0:
        return Rates(inf, float(np.mean(1 / squares) ** -0.5))
    if of_link <= 0:
        return Rates(float(np.mean(blocks**2 / squares) ** -0.5), inf)
    return Rates(float(of_block**-0.5), float(of_link**-0.5))
