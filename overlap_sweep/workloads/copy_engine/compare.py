"""Copies in comparisons and histories: their variants, pooled over all points of the same direction and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, Sample, pooled_by_key
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER
from overlap_sweep.workloads.copy_engine.answer import copy_row, options_of
from overlap_sweep.workloads.copy_engine.result import CHUNKED, VARIANTS, CopyTimes


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the measurements that are not launch-bound."""
    ok = (point for point in points if point.workload == "copy_engine" and point.status == "ok")
    return Comparable(pooled_by_key(map(_times, ok), TYPICAL_SCATTER))


def _times(point: Point) -> tuple[Key, Point, Mapping[str, Timing]]:
    copies = point.measured_as(CopyTimes)
    key = Key(
        model=None,
        tokens=None,
        precision=point.case.precision,
        backend=point.config.backend,
        device=point.case.device,
        tp_size=1,
        operator=f"{options_of(point).direction}, {copy_row(point).size}",
        pass_name=WHOLE,
        setting="",
    )
    known = (name for name in (*VARIANTS, *CHUNKED) if name in copies.times)
    return key, point, {name: copies.times[name] for name in known if not copies.launch_bound.get(name)}


def samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of the overlapped GEMMs and copies; empty if the point is launch-bound."""
    copies = result.measured_as(CopyTimes)
    times = copies.times
    # The rows of the matrices are not tokens of a model.
    sample = Sample((times[copies.asked],), times["sequential"].median_us, WHOLE, tokens=None)
    return {} if result.launch_bound else {"overlapped": sample}


COMPARED = Comparing(measured, samples, matched=("copy_engine",))
