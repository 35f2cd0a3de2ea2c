"""Kernels in comparisons and histories: their implementations, pooled over all points of the same backend and shape."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_sweep.overlap.models import COMM_ONLY, GEMM_ONLY, SEQUENTIAL
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, KeyedTime, Sample
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.kernel.answer import ImplementationRow, KernelCase, analyse_kernels, name_in_tables
from overlap_sweep.workloads.kernel.config import Resolved
from overlap_sweep.workloads.kernel.result import KernelTimes


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the measurements that are not launch-bound. The baselines, which every backend measured, are the
    `none_us` and `floor_us` of the others. Kernels match by their sizes, whatever the model."""
    by_backend = group_points(points, "kernel", lambda point: point.config.backend)
    return Comparable(
        [
            _time(analysis.case, row)
            for of_backend in by_backend.values()
            for analysis in analyse_kernels(of_backend)
            for shape in analysis.shapes
            for row in shape.rows
            if row.backend and not row.launch_bound
        ]
    )


def samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of each implementation that is not launch-bound, and of `sequential`."""
    point, implementations = result.point_as(Resolved), result.measured_as(KernelTimes).implementations
    sequential_us = implementations[SEQUENTIAL].time.median_us
    return {
        name_in_tables(name, point): Sample((one.time,), sequential_us, "fwd", point.workload.tokens)
        for name, one in implementations.items()
        if name not in (GEMM_ONLY, COMM_ONLY) and not one.launch_bound
    }


COMPARED = Comparing(measured, samples, matched=("operator", "kernel", "m", "n", "k", "implementations"))


def _time(case: KernelCase, row: ImplementationRow) -> KeyedTime:
    key = Key(
        model=None,
        tokens=row.m,
        precision=case.precision,
        backend=row.backend,
        device=case.device,
        tp_size=case.tp_size,
        operator=f"{case.kernel} n={case.n} k={case.k}",
        pass_name=WHOLE,
        setting=row.name,
        nodes=case.nodes,
    )
    return KeyedTime(key, row.estimate, row.baselines_us[SEQUENTIAL], row.baselines_us[GEMM_ONLY], row.points)
