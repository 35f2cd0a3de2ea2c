"""Copies in comparisons and histories: their variants, pooled over all points of the same direction and size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, Sample, pooled
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER, Scatter
from overlap_sweep.workloads.copy_engine.answer import copy_row
from overlap_sweep.workloads.copy_engine.result import CHUNKED, VARIANTS, CopyTimes


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the measurements that are not launch-bound."""
    by_size: dict[tuple[Key, str], list[tuple[str, Mapping[str, Timing]]]] = defaultdict(list)
    for point in points:
        if point.workload == "copy_engine" and point.status == "ok":
            copies, options = point.measured_as(CopyTimes), point.config["copy_engine"]
            key = Key(
                model=None,
                tokens=None,
                precision=point.case.precision,
                backend=point.config["backend"],
                device=point.case.device,
                tp_size=1,
                operator=f"{options['direction']}, {copy_row(point).size}",
                pass_name=WHOLE,
                setting="",
            )
            known = (name for name in (*VARIANTS, *CHUNKED) if name in copies.times)
            times = {name: copies.times[name] for name in known if not copies.launch_bound.get(name)}
            by_size[key, point.config["runtime"]["device"]].append((point.name, times))
    return Comparable(
        [
            time
            for (key, device), of_size in by_size.items()
            for time in pooled(key, of_size, Scatter(TYPICAL_SCATTER[device]))
        ]
    )


def samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of the overlapped GEMMs and copies; empty if the point is launch-bound."""
    copies = result.measured_as(CopyTimes)
    times = copies.times
    # The rows of the matrices are not tokens of a model.
    sample = Sample((times[copies.asked],), times["sequential"].median_us, WHOLE, tokens=None)
    return {} if result.launch_bound else {"overlapped": sample}


COMPARED = Comparing(measured, samples, matched=("copy_engine",))
