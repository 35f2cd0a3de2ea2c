"""Copies in comparisons and histories: their variants, pooled over all points of the same direction and size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, KeyedTime, Sample
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER, Scatter
from overlap_sweep.workloads.copy_engine.result import VARIANTS, CopyTimes
from overlap_sweep.workloads.copy_engine.section import copy_row


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns all that was measured but for the launch-bound, whose times say nothing. Of GEMMs and copies at once
    `none_us` is one after the other, and `floor_us` the longer of both alone."""
    by_size: dict[Key, list[Point]] = defaultdict(list)
    for point in points:
        if point.workload == "copy_engine" and point.status == "ok":
            by_size[_key(point)].append(point)
    return Comparable([time for key, of_size in by_size.items() for time in _times(key, of_size)])


def samples(result: Result) -> dict[str, Sample]:
    """Returns GEMMs and copies at once; nothing where the host limited them."""
    times = result.measured_as(CopyTimes).times
    # The rows of the matrices are nothing that a model reads.
    sample = Sample((times["overlapped"],), times["sequential"].median_us, WHOLE, tokens=None)
    return {} if result.launch_bound else {"overlapped": sample}


COMPARED = Comparing(measured, samples, matched=("copy_engine",))


def _key(point: Point) -> Key:
    """Of no variant yet."""
    return Key(
        model=None,
        tokens=None,
        precision=point.config["copy_engine"]["dtype"],
        backend=point.config["backend"],
        device=point.case.device,
        tp_size=1,
        operator=f"{point.config['copy_engine']['direction']}, {copy_row(point).size}",
        pass_name=WHOLE,
        setting="",
    )


def _times(key: Key, points: Sequence[Point]) -> Iterator[KeyedTime]:
    between = Scatter(TYPICAL_SCATTER[points[0].config["runtime"]["device"]])
    found = [(point.name, point.measured_as(CopyTimes)) for point in points]
    times = {variant: _pooled([copies for _, copies in found], variant, between) for variant in VARIANTS}
    gemm, copy, sequential = times["gemm"], times["copy"], times["sequential"]
    for variant, time in times.items():
        if time is None:
            continue
        overlapped = variant == "overlapped"
        yield KeyedTime(
            key=key._replace(setting=variant),
            time=time,
            none_us=sequential.time_us if overlapped and sequential else None,
            floor_us=max(gemm.time_us, copy.time_us) if overlapped and gemm and copy else None,
            points=tuple(name for name, _ in found),
        )


def _pooled(copies: Iterable[CopyTimes], variant: str, between: Scatter) -> Estimate | None:
    """None where the host could never enqueue it as fast as the device ran."""
    series = [one.times[variant].samples_us for one in copies if not one.launch_bound.get(variant)]
    return between.added_to(estimate(*series), len(series)) if series else None
