"""How fast collectives are by their thread blocks, and what they and GEMMs beside them lose: as recordings have shown,
or as it was measured.

Measured ones are kept in `$OVERLAP_SWEEP_CALIBRATIONS`, else in `overlap_sweep/calibrations` below `$XDG_DATA_HOME` or
`~/.local/share`: every YAML file there is read, before those of this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from overlap_sweep.errors import UserError


class RateSeen(msgspec.Struct):
    """What the collectives of a recording moved."""

    blocks: int
    gb_per_s: float
    """Bus bandwidth as nccl-tests counts it, without the latency."""
    mb: float
    """Size of the buffers."""
    recording: str


class SlowdownSeen(msgspec.Struct):
    """What GEMMs took longer beside collectives, or these beside them, as a share of their time alone."""

    blocks: int
    share: float
    recording: str


class Calibration(msgspec.Struct, omit_defaults=True):
    """An entry of `calibration.yaml`, which benchmarks/calibration_table.py writes, or of a file that is kept."""

    device: str
    """Kind of GPU, as traces name it."""
    ranks: int
    nccl: str
    rates: dict[str, list[RateSeen]]
    """By collective."""
    slowdowns: list[SlowdownSeen]
    """Of GEMMs: with two numbers of blocks at least."""
    comm_slowdowns: list[SlowdownSeen] = []

    @property
    def exponent(self) -> float:
        """Returns how the slowdown of GEMMs grows with the thread blocks beside them: to their power of this."""
        return self._fit[0]

    @property
    def gpus(self) -> str:
        """Returns whose figures they are: `2 NVIDIA H200`."""
        return f"{self.ranks} {self.device}"

    def gemm_slowdown(self, blocks: float) -> float:
        """Returns what GEMMs lose beside so many thread blocks, as a share of their time alone."""
        exponent, offset = self._fit
        return float(np.exp(offset) * blocks**exponent)

    def comm_slowdown(self, blocks: float) -> float:
        """Returns what collectives with about so many thread blocks lose beside GEMMs; some must be known."""
        nearest = min((one.blocks for one in self.comm_slowdowns), key=lambda own: abs(np.log(own / blocks)))
        return median(one.share for one in self.comm_slowdowns if one.blocks == nearest)

    @property
    def _fit(self) -> tuple[float, float]:
        blocks, shares = zip(*((one.blocks, one.share) for one in self.slowdowns), strict=True)
        exponent, offset = np.polyfit(np.log(blocks), np.log(shares), 1)
        return float(exponent), float(offset)


def kept_folder() -> Path:
    """Returns the folder of the user's own calibrations, whether it exists or not."""
    if own := os.environ.get("OVERLAP_SWEEP_CALIBRATIONS"):
        return Path(own)
    data = os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
    return Path(data) / "overlap_sweep" / "calibrations"


def calibrations() -> list[Calibration]:
    """Returns what is known: the user's own, then this package's. UserError for a file that cannot be read."""
    kept = (one for path in sorted(kept_folder().glob("*.yaml")) for one in _read(path))
    return [*kept, *_read(Path(__file__).with_name("calibration.yaml"))]


@cache
def _read(path: Path) -> list[Calibration]:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=list[Calibration])
    except (msgspec.DecodeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read as a calibration ({reason}); measure again or remove it.") from None


def chosen(known: Sequence[Calibration], device: str, ranks: int | None) -> Calibration:
    """Returns the calibration of the kind of GPU, or of another one where there is none; of several the first of those
    with about so many ranks."""
    return min(known, key=lambda one: (one.device != device, abs(np.log(one.ranks / (ranks or one.ranks)))))


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
