"""The kernels of a dataset: their implementations, pooled over all points of the same backend and shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from overlap_sweep.compare.measured import WHOLE, Key, Measured
from overlap_sweep.overlap.kernel_shape import GEMM_ONLY, SEQUENTIAL
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.kernel.answer import KernelAnalysis, analyse_kernels


def measured_kernels(points: Iterable[Point]) -> list[Measured]:
    """Without the launch-bound, whose times say nothing, and without the baselines, which every backend measured: they
    are the `none_us` and `floor_us` of the others. A kernel matches by its sizes, whatever model has them."""
    by_backend: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.is_kernel and point.status == "ok":
            by_backend[point.config["backend"]].append(point)
    return [
        measured
        for backend, of_backend in by_backend.items()
        for analysis in analyse_kernels(of_backend)
        for measured in _measured(backend, analysis)
    ]


def _measured(backend: str, analysis: KernelAnalysis) -> Iterator[Measured]:
    case = analysis.case
    for shape in analysis.shapes:
        key = Key(
            model=None,
            tokens=shape.m,
            precision=case.precision,
            backend=backend,
            device=case.device,
            tp_size=case.tp_size,
            operator=f"{case.kernel} n={case.n} k={case.k}",
            pass_name=WHOLE,
            setting="",
        )
        for row in shape.implementations:
            if row.comparable:
                yield Measured(
                    key=key._replace(setting=row.name),
                    time=row.estimate,
                    none_us=shape.baselines[SEQUENTIAL].time_us,
                    floor_us=shape.baselines[GEMM_ONLY].time_us,
                    points=row.points,
                )
