"""The measurements of a workload=operator point: the times of each pass, of none and of the floor."""

from collections.abc import Iterable

import msgspec

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS
from overlap_sweep.results.gain import gain_of_sum
from overlap_sweep.results.measured import Measured, Timing
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import gain_of_point
from overlap_sweep.workloads.operator.config import Resolved


class DefaultTiming(msgspec.Struct):
    """The library's own default overlap in every slot of the operator, measured at intervals within the sweep."""

    default: Timing
    none: Timing
    """The operator with no overlap, measured in turns with the default: comparisons are relative to it."""
    measured: str
    """Time of the measurement, UTC, ISO 8601: several points may carry the same one."""


class PassTimes(msgspec.Struct):
    """Times of one pass (`fwd` or `bwd`) of the point and of its baselines, measured in turns."""

    point: Timing
    none: Timing
    """The same operator, communication not overlapped."""
    floor: Timing
    """The same local GEMMs with no communication at all."""
    tp1: Timing | None = None
    """The whole, unsharded operator on one rank: the baseline of TP scaling."""
    default: DefaultTiming | None = None
    """The library's default overlap; None for backends without one."""


def distinct(defaults: Iterable[DefaultTiming]) -> list[DefaultTiming]:
    """Returns each measurement of the default once, in time order, however many points carry it."""
    found = {(default.measured, *default.default.samples_us): default for default in defaults}
    return [found[key] for key in sorted(found)]


class OperatorTimes(Measured, kw_only=True, tag="operator"):
    times: dict[str, PassTimes]
    """Times by pass: `fwd`, `bwd`, and `all` for both together."""

    def __post_init__(self) -> None:
        if missing := set(space.PASSES) - self.times.keys():
            raise ValueError(f"no {min(missing)} times")

    def check(self, result: Result) -> None:
        operator = result.point_as(Resolved).operator
        for slot in result.settings:
            if not slot.startswith(f"{operator}_"):
                raise ValueError(f"{slot} is not a slot of {operator}")

    def compared(self, result: Result) -> str | None:
        """Returns the gain of the passes under test; None for a baseline, which overlaps nothing."""
        own = [self.times[name] for name in space.passes(result.point_as(Resolved))]
        device = result.point.runtime.device
        gains = [(gain_of_point(times.point, times.none, device), times.none.median_us) for times in own]
        return gain_of_sum(gains).in_words(NONE_IN_WORDS) if result.settings else None


MEASURED = OperatorTimes
