"""Measurements of a point of workload=copy_engine: GEMMs and copies, alone, in sequence and overlapped."""

from dataclasses import replace

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import Name
from overlap_sweep.overlap.models import CUSTOM, PRECISION_OF_DTYPE
from overlap_sweep.results.measured import Measured, Timing, Total, check_pairs
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import gain_of_point
from overlap_sweep.workloads.copy_engine.config import Config, Resolved

VARIANTS = ("gemm", "copy", "sequential", "overlapped")
CHUNKED = ("chunked_gemm", "chunked_overlapped")
"""Variants with the GEMMs split into chunks."""


class CopyTimes(Measured, kw_only=True, tag="copy_engine"):
    times: dict[Name, Timing]
    """Times by variant: `gemm` and `copy` alone, `sequential` on one stream, `overlapped` on two; with chunks,
    `chunked_gemm` and `chunked_overlapped` with the GEMMs split. Their i-th samples pair."""
    launch_bound: dict[Name, bool]
    bytes_copied: Total
    flops: Total

    def __post_init__(self) -> None:
        if missing := set(VARIANTS) - self.times.keys():
            raise ValueError(f"no {min(missing)} times")
        check_pairs(self.times.values())

    @classmethod
    def as_asked(cls, config: PointConfig) -> dict[str, object]:
        assert isinstance(config, Config)
        copy = config.copy_engine
        return {
            **replace(config, workload=replace(config.workload, tokens=copy.matrix_size)),
            "backend": "copy_engine",
            "precision": PRECISION_OF_DTYPE[copy.dtype],
            "tp_size": 1,
            "model": {"name": CUSTOM},
        }

    def check(self, result: Result) -> None:
        if result.point_as(Resolved).copy_engine.chunks and (missing := set(CHUNKED) - self.times.keys()):
            raise ValueError(f"no {min(missing)} times")

    @property
    def asked(self) -> str:
        """Returns the variant that was configured."""
        return "chunked_overlapped" if "chunked_overlapped" in self.times else "overlapped"

    def compared(self, result: Result) -> str | None:
        device = result.point.runtime.device
        return gain_of_point(self.times[self.asked], self.times["sequential"], device).in_words("sequential")


MEASURED = CopyTimes
