"""Measurements of a point of workload=kernel: implementations of one kernel, and the baselines."""

from dataclasses import replace
from typing import Annotated

import msgspec

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import Name
from overlap_sweep.overlap.models import (
    BASELINES,
    COLLECTIVES,
    CUSTOM,
    GEMM_ONLY,
    PRECISION_OF_DTYPE,
    SEQUENTIAL,
    KernelShape,
)
from overlap_sweep.results.measured import Measured, Scalar, Timing, check_pairs
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import gain_of_point
from overlap_sweep.workloads.kernel.config import MOST_IMPLEMENTATIONS, Config, KernelSetting, Resolved


class ImplementationTimes(msgspec.Struct, kw_only=True):
    """One implementation of a kernel, or one of `models.BASELINES`. All in a point use the same tensors."""

    time: Timing
    """Times of the iterations. The i-th samples of all implementations pair: they were taken in the same round."""
    setting: dict[str, Scalar] = {}
    """Its `method` and knobs, and whatever another package's backend adds; empty for the baselines."""
    relative_error: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Largest difference from the float32 result, relative to its largest magnitude; null for `gemm_only` and
    `comm_only`."""
    independent: bool = False
    """Whether the GEMM neither reads the gathered tensor nor produces the scattered one, as in a bulk overlap. That
    does not compute the kernel, but shows what independent GEMMs and collectives of a model can gain."""
    launch_bound: bool = False
    beside: Timing | None = None
    """Of a collective alone: its times while GEMMs run."""
    gemm_beside: Timing | None = None
    """Of a collective alone: the times of a GEMM while it runs."""

    def __post_init__(self) -> None:
        msgspec.convert(self.setting, KernelSetting)


class KernelTimes(Measured, kw_only=True, tag="kernel"):
    implementations: Annotated[dict[Name, ImplementationTimes], msgspec.Meta(max_length=MOST_IMPLEMENTATIONS)]
    """Times by name: the backend's implementations and `models.BASELINES`."""
    left_out: Annotated[dict[Name, str], msgspec.Meta(max_length=MOST_IMPLEMENTATIONS)] = msgspec.field(
        default_factory=dict
    )
    """Reasons for implementations that were not timed, by name: refused, or wrong numbers."""

    def __post_init__(self) -> None:
        own = self.implementations.keys() - set(BASELINES)
        needed = {GEMM_ONLY} if any(self.implementations[name].beside for name in own) else set(BASELINES)
        if not self.implementations.keys() > needed or self.left_out.keys() & set(BASELINES):
            raise ValueError("an implementation and all baselines are needed")
        if any(self.implementations[name].independent for name in needed):
            raise ValueError("a baseline cannot be independent")
        of_all = ((one.time, one.beside, one.gemm_beside) for one in self.implementations.values())
        check_pairs(time for times in of_all for time in times if time)

    def check(self, result: Result) -> None:
        point = result.point_as(Resolved)
        alone = point.kernel in COLLECTIVES
        if alone != (point.size_mb is not None):
            raise ValueError(f"{point.kernel} has size_mb={point.size_mb}")
        for name, one in self.implementations.items():
            if alone and name != GEMM_ONLY and one.setting.get("num_sm") is None:
                raise ValueError(f"{name} has no num_sm")
            if (one.beside is not None, one.gemm_beside is not None) != (alone and name != GEMM_ONLY,) * 2:
                raise ValueError(f"{name} has {'no times' if alone else 'times'} beside a GEMM")
        if result.point.precision not in PRECISION_OF_DTYPE.values():
            raise ValueError(f"{result.point.precision} is none of {', '.join(PRECISION_OF_DTYPE.values())}")
        if reason := KernelShape.of(result.point_as(Resolved)).refusal():
            raise ValueError(reason)

    @classmethod
    def as_asked(cls, config: PointConfig) -> dict[str, object]:
        """Returns the composed config with m as its tokens, and no model if sizes were given."""
        assert isinstance(config, Config)
        known = {**replace(config, workload=replace(config.workload, tokens=config.m))}
        by_model = config.n is None and config.kernel not in COLLECTIVES
        return known if by_model else {**known, "model": {"name": CUSTOM}, "operator": None}

    def compared(self, result: Result) -> str | None:
        """Returns the gain of the fastest implementation."""
        own = [one.time for name, one in self.implementations.items() if name not in BASELINES and not one.independent]
        if not own:
            return None
        sequential, fastest = self.implementations[SEQUENTIAL].time, min(own, key=lambda time: time.median_us)
        return gain_of_point(fastest, sequential, result.point.runtime.device, len(own)).in_words(SEQUENTIAL)


MEASURED = KernelTimes
