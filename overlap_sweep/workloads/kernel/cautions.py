"""What to know before believing the answers about kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from overlap_sweep.overlap.kernel_shape import BASELINES, COMM_ONLY, SEQUENTIAL
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments
from overlap_sweep.workloads.kernel.answer import KernelAnalysis, ShapeAnalysis

K = TypeVar("K")


def warnings(analysis: KernelAnalysis) -> list[str]:
    """Returns why not to believe an answer: a sentence each, none where all is well."""
    return [
        *_beyond_bound(analysis),
        *_launch_bound(analysis),
        *_wrong_numbers(analysis),
        *dict.fromkeys(warning for point in analysis.points if point.result for warning in point.result.warnings),
    ]


def cautions(analysis: KernelAnalysis) -> list[str]:
    """Returns what to know before believing the answers, and what was left out: a sentence each."""
    lines = warnings(analysis)
    if _environments(analysis.points) > 1:
        # Flux's wheels exist for old versions of torch only.
        lines.append(
            "The points were measured in different environments, each beside a sequential of its own; see "
            "tuning_report.json for what differs."
        )
    return [*lines, *_left_out(analysis)]


def _beyond_bound(analysis: KernelAnalysis) -> Iterator[str]:
    for shape in analysis.shapes:
        faster = [
            row
            for row in sorted(shape.implementations, key=lambda row: row.time_us)
            if row.comparable and row.time_us < shape.bound_us and row.estimate.differs_from(shape.binding.estimate)
        ]
        if not faster or shape.binding.launch_bound:
            continue
        fastest, several = faster[0], len(faster) > 1
        by = f"by {1 - fastest.time_us / shape.bound_us:.1%}"
        many = f"{len(faster)} of {len(shape.implementations)} beat the bound, {fastest.label} {by}"
        who = many if several else f"{fastest.label} beats the bound {by}"
        same_gemm = next((row for row in faster if row.backend == "torch"), None)
        if shape.binding.name == COMM_ONLY:
            why = ": its communication is faster than the library's, so the bound is none there"
        elif same_gemm:
            also = "" if same_gemm is fastest else f", {same_gemm.label} among them"
            why = f"{also}: its GEMM is the one that was measured alone, so that baseline is doubtful; measure it again"
        else:
            why = ": its GEMM is faster than torch's, so the bound is none there"
        yield f"m={shape.m}: {who}{why}."


def _launch_bound(analysis: KernelAnalysis) -> Iterator[str]:
    found = _ms_by((row.label, shape.m) for shape in analysis.shapes for row in shape.rows if row.launch_bound)
    for label, where in found.items():
        if label == SEQUENTIAL:
            what = ": nothing can be compared with it there."
        elif label in BASELINES:
            what = ": the bound and the hidden fractions there are of the host."
        else:
            what = ", and is left out of the choice there."
        yield f"{label} was launch-bound at {where}{what}"


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


def _environments(points: Sequence[Point]) -> int:
    """Returns how many there are, not counting what backends set for themselves, each as it is trained with."""
    found = []
    for environment in environments(points):
        variables = {**environment.get("variables", {}), "CUDA_DEVICE_MAX_CONNECTIONS": None}
        if (alike := {**environment, "variables": variables}) not in found:
            found.append(alike)
    return len(found)


def _left_out(analysis: KernelAnalysis) -> list[str]:
    """Returns what was not timed, but for wrong numbers: a sentence for each reason."""
    found = _ms_by(
        ((label, next(iter(reason.splitlines()), "no reason given")), shape.m)
        for shape in analysis.shapes
        for label, reason in shape.left_out.items()
        if label not in shape.wrong
    )
    return [f"Left out: {label} at {where}: {reason.removesuffix('.')}." for (label, reason), where in found.items()]


def _ms_by(pairs: Iterable[tuple[K, int]]) -> dict[K, str]:
    """Returns by what was found at which m: `m=64, 128`."""
    found: dict[K, list[int]] = defaultdict(list)
    for what, m in pairs:
        found[what].append(m)
    return {what: f"m={', '.join(map(str, ms))}" for what, ms in found.items()}
