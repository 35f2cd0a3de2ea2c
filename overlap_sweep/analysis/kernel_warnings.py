"""What to know before believing the answers about kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from overlap_sweep.analysis.kernels import KernelAnalysis, ShapeAnalysis, differ
from overlap_sweep.kernel_shape import BASELINES, COMM_ONLY, GEMM_ONLY, SEQUENTIAL


def warnings(analysis: KernelAnalysis) -> list[str]:
    """A sentence each, none where all is well."""
    return [
        *_beyond_bound(analysis),
        *_launch_bound(analysis),
        *_wrong_numbers(analysis),
        *dict.fromkeys(warning for point in analysis.points if point.result for warning in point.result.warnings),
    ]


def _beyond_bound(analysis: KernelAnalysis) -> Iterator[str]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for shape in analysis.shapes:
        for row in shape.implementations:
            faster = row.time_us < shape.bound_us and differ(row, shape.binding)
            if faster and row.comparable and not shape.binding.launch_bound:
                found[row.label, shape.binding.name].append(f"m={shape.m} by {-row.over_bound:.1%}")
    whose = {GEMM_ONLY: "its GEMM is faster than torch's", COMM_ONLY: "its communication is faster than the library's"}
    for (label, binding), where in found.items():
        yield f"{label} beats the bound ({', '.join(where)}): {whose[binding]}, so the bound is none there."


def _launch_bound(analysis: KernelAnalysis) -> Iterator[str]:
    by_label: dict[str, list[int]] = defaultdict(list)
    for shape in analysis.shapes:
        for row in shape.rows:
            if row.launch_bound:
                by_label[row.label].append(shape.m)
    for label, ms in by_label.items():
        where = f"m={', '.join(map(str, ms))}"
        if label == SEQUENTIAL:
            yield f"{label} was launch-bound at {where}: nothing can be compared with it there."
        elif label in BASELINES:
            yield f"{label} was launch-bound at {where}: the bound and the hidden fractions there are of the host."
        else:
            yield f"{label} was launch-bound at {where}, and is left out of the choice there."


def _wrong_numbers(analysis: KernelAnalysis) -> Iterator[str]:
    found: dict[str, list[ShapeAnalysis]] = defaultdict(list)
    for shape in analysis.shapes:
        for label in sorted(shape.wrong):
            found[label].append(shape)
    for label, (first, *others) in found.items():
        also = f", and also at m={', '.join(str(shape.m) for shape in others)}" if others else ""
        why = first.left_out[label].removeprefix("wrong numbers: ")
        where = f"m={first.m} ({why}){also}"
        yield f"{label} computed wrong numbers at {where}: don't trust it at any m before you know why."
