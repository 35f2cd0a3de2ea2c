"""Measurements of a point of workload=kernel: implementations of one kernel, and the baselines."""

from dataclasses import replace
from typing import Annotated

import msgspec

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import Name
from overlap_sweep.overlap.models import BASELINES, CUSTOM, PRECISION_OF_DTYPE, SEQUENTIAL, KernelShape
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
        if not self.implementations.keys() > set(BASELINES) or self.left_out.keys() & set(BASELINES):
            raise ValueError("an implementation and all baselines are needed")
        if any(self.implementations[name].independent for name in BASELINES):
            raise ValueError("a baseline cannot be independent")
        check_pairs(one.time for one in self.implementations.values())

    def check(self, result: Result) -> None:
        if result.point.precision not in PRECISION_OF_DTYPE.values():
            raise ValueError(f"{result.point.precision} is none of {', '.join(PRECISION_OF_DTYPE.values())}")
        if reason := KernelShape.of(result.point_as(Resolved)).refusal():
            raise ValueError(reason)

    @classmethod
    def as_asked(cls, config: PointConfig) -> dict[str, object]:
        """Returns the composed config with m as its tokens, and no model if sizes were given."""
        assert isinstance(config, Config)
        known = {**replace(config, workload=replace(config.workload, tokens=config.m))}
        return known if config.n is None else {**known, "model": {"name": CUSTOM}, "operator": None}

    def compared(self, result: Result) -> str | None:
        """Returns the gain of the fastest implementation."""
        own = [one.time for name, one in self.implementations.items() if name not in BASELINES and not one.independent]
        if not own:
            return None
        sequential, fastest = self.implementations[SEQUENTIAL].time, min(own, key=lambda time: time.median_us)
        return gain_of_point(fastest, sequential, result.point.runtime.device, len(own)).in_words(SEQUENTIAL)


MEASURED = KernelTimes
