"""Building blocks of measured types: times, settings, and the configuration fields that analysis reads.

Every workload declares the measurements of its points as a `Measured`, in its module `result`. Results are read by
converting them to that type, which checks ranges and consistency.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import Count, Us, one_of
from overlap_sweep.overlap import space

if TYPE_CHECKING:
    from overlap_sweep.results.run_directory import Result

Total = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Flag = bool | Annotated[int, msgspec.Meta(ge=0, le=1)]
Scalar = str | int | float | bool | None
_ROUNDING = 1e-6
"""Relative tolerance: quartiles of equal times may differ in the last digit."""


Slot = Annotated[str, one_of(*space.SLOTS)]
Phase = Annotated[str, one_of(*space.PHASES)]


class Timing(msgspec.Struct):
    """One variant's times of one pass, in microseconds: samples of the slowest rank, and their quartiles."""

    median_us: Us
    q1_us: Us
    q3_us: Us
    samples_us: Annotated[list[Us], msgspec.Meta(min_length=2)]

    def __post_init__(self) -> None:
        for name, low_us, high_us in (
            ("quartiles", self.q1_us, self.q3_us),
            ("samples", min(self.samples_us, default=0.0), max(self.samples_us, default=0.0)),
        ):
            if not low_us <= self.median_us * (1 + _ROUNDING) or not self.median_us <= high_us * (1 + _ROUNDING):
                raise ValueError(f"the median, {self.median_us:g} us, is outside its {name}")


def summarise(samples_us: list[float]) -> Timing:
    """Returns median and quartiles (linear interpolation between order statistics)."""
    q1, median, q3 = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(median_us=median, q1_us=q1, q3_us=q3, samples_us=samples_us)


def check_pairs(timings: Iterable[Timing]) -> None:
    """Raises ValueError unless all have the same number of samples, whose i-th were taken in the same round."""
    if len({len(timing.samples_us) for timing in timings}) > 1:
        raise ValueError("unequal numbers of samples")


class Knobs(msgspec.Struct, kw_only=True):
    """space.KNOBS."""

    num_sm: Count | None = None
    num_splits: Count | None = None
    cga_size: Count | None = None
    aggregate: Flag | None = None
    set_sm_margin: Flag | None = None
    use_ce: Flag | None = None
    atomic_gemm: Flag | None = None
    fp8_buf: Flag | None = None
    comm_priority: bool | int | None = None
    gemm_priority: bool | int | None = None
    pipeline_rs_overlap_first_gemm: Flag | None = None


class Setting(Knobs, kw_only=True, forbid_unknown_fields=True):
    """The setting of one slot: its method, knobs, and Transformer Engine's `is_reduce_scatter`."""

    method: Annotated[str, one_of(*space.METHODS)] | None = None
    is_reduce_scatter: Flag | None = None


class WholeSetting(Setting, kw_only=True):
    method: Annotated[str, one_of(*space.METHODS)]


class Measured(msgspec.Struct, kw_only=True, tag_field="workload"):
    """The measurements of a point. Every workload has its own type, `MEASURED` of its module `result`, whose tag is the
    workload's name and whose `__post_init__` raises ValueError for impossible values."""

    is_users_program: ClassVar[bool] = False
    """Whether the steps are those of a user's program: its host may be late, and waits for the device are its own."""

    @property
    def host_was_ahead(self) -> bool:
        """Returns whether a user's program is known to launch ahead of the GPU without the profiler."""
        return False

    @property
    def gave_up(self) -> bool:
        """Returns whether it was seen to be too slow and not measured to its end."""
        return False

    def check(self, result: Result) -> None:
        """Raises ValueError if the measurements don't fit the result's point."""

    def compared(self, result: Result) -> str | None:
        """Returns how the result's point compares with no overlap, in words; None if that was not measured."""
        return None

    def shown_us(self, result: Result) -> float | None:
        """Returns the time that the point's progress line shows."""
        return result.objective_us

    @property
    def rate(self) -> str:
        """Returns the work per second, in words; empty for workloads without one."""
        return ""

    @classmethod
    def as_asked(cls, config: PointConfig) -> dict[str, object]:
        """Returns a composed configuration with what the workload fills in whatever the machine."""
        return asdict(config)
