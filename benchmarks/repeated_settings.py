"""Measures how often the decisions of sweeps separate equal settings, from points measured repeatedly.

    python -m benchmarks.repeated_settings OUT     (written by repeated_settings.sh)

Groups of points with equal settings are drawn, named as different settings, and decided between as in a sweep.
`scatter` is the standard deviation between points beyond the noise within each, as a share of the time; for operators,
kernels and layers relative to the baselines of the same point.
"""

import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import BASELINES
from overlap_sweep.results.estimate import Estimate, estimate, normalised
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.verdict import verdict
from overlap_sweep.study.analysis import analyse
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.fsdp.study import STUDY as TRAINING
from overlap_sweep.workloads.kernel import answer as kernels
from overlap_sweep.workloads.kernel.result import KernelTimes
from overlap_sweep.workloads.layer import answer as layers
from overlap_sweep.workloads.operator import choice
from overlap_sweep.workloads.tp_training.result import TpTrainingRun
from overlap_sweep.workloads.tp_training.study import STUDY as STACKS

GROUPS = 300
COUNTS = (1, 4)
UNIT = Estimate(1.0, 0.0, 1)


def between(points: Sequence[Estimate]) -> float:
    """Standard deviation beyond the noise within, as a share of the mean; 0 where that explains it."""
    mean = statistics.fmean(point.time_us for point in points)
    within = statistics.fmean((point.error_us / mean) ** 2 for point in points)
    return math.sqrt(max(0.0, statistics.variance(point.time_us / mean for point in points) - within))


def ratios(pairs: Sequence[tuple[Timing, Timing]]) -> list[Estimate]:
    return [normalised([pair], UNIT) for pair in pairs]


def groups(points: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yields groups of that many, drawn at random."""
    for _ in range(GROUPS):
        yield random.sample(points, size)


def operators(points: Sequence[Point]) -> Iterator[tuple[str, int, float, list[bool]]]:
    """Yields decisions on what overlaps nothing, named as rings: each against the `none` beside it."""
    by_operator = defaultdict(list)
    for point in points:
        by_operator[point.recorded["operator"]].append(point)
    for operator, alike in by_operator.items():
        for name in space.PASSES:
            times = [point.result.measured.times[name] for point in alike if point.result]
            scatter = between(ratios([(one.point, one.none) for one in times]))
            slot = f"{operator}_{'fprop' if name == 'fwd' else 'dgrad'}"
            for count in COUNTS:
                told = []
                for group in groups(times, count):
                    observed = [
                        choice.Observation(str(n), {slot: {"method": "ring_exchange", "num_sm": n + 1}}, one, None)
                        for n, one in enumerate(group)
                    ]
                    told.append(bool(choice.choose(2, operator, name, observed, kind(points)).chosen.settings))
                yield f"{operator} {name}", count, scatter, told


def of_kernels(points: Sequence[Point]) -> Iterator[tuple[str, int, float, list[bool]]]:
    """Yields decisions between points of one implementation, named as several."""
    by_shape = defaultdict(list)
    for point in points:
        by_shape[point.recorded["kernel"], point.recorded["m"], point.recorded["operator"]].append(point)
    for shape, alike in by_shape.items():
        assert alike[0].result
        for name in sorted(alike[0].result.measured.implementations.keys() - set(BASELINES)):
            measured = [point for point in alike if point.result and name in point.result.measured.implementations]
            beside = [point.result.measured.implementations for point in measured if point.result]
            scatter = between(ratios([(one[name].time, one["sequential"].time) for one in beside]))
            told = []
            for group in groups(measured, 2):
                renamed = [_as_implementation(point, name, number) for number, point in enumerate(group)]
                ((analysed,),) = (analysis.shapes for analysis in kernels.analyse_kernels(renamed))
                first, second = (row.estimate for row in analysed.rows if row.backend)
                told.append(first.differs_from(second))
            yield f"{shape[0]} m={shape[1]} {name}", 2, scatter, told


def _as_implementation(point: Point, name: str, number: int) -> Point:
    assert point.result
    measured = point.result.measured.implementations
    kept = {baseline: measured[baseline] for baseline in BASELINES} | {f"{name}_{number}": measured[name]}
    return replace(point, result=msgspec.structs.replace(point.result, measured=KernelTimes(implementations=kept)))


def of_layers(points: Sequence[Point]) -> Iterator[tuple[str, int, float, list[bool]]]:
    """Yields the decision on files of one content, each against the first of them."""
    told, rounds = [], []
    for point in points:
        assert point.result
        first, *others = (times for name, times in point.result.measured.variants.items() if name.startswith("file:"))
        compared = layers.compare([(other, first) for other in others], kind(points), len(others))
        told.append(any(one.sure for one in compared))
        rounds += [(other.times["all"], first.times["all"]) for other in others]
    yield "layer", len(rounds) // max(len(points), 1), between(ratios(rounds)), told


def of_steps(
    points: Sequence[Point], decide: Callable[[Sequence[Point]], bool], timing: Callable[[Point], Timing], name: str
) -> Iterator[tuple[str, int, float, list[bool]]]:
    scatter = between([estimate(timing(point).samples_us) for point in points])
    for count in COUNTS:
        if count < len(points):
            yield name, count, scatter, [decide(group) for group in groups(points, count + 1)]


def _changed(point: Point, **changes: Any) -> Point:
    assert point.result
    result = msgspec.structs.replace(point.result, recorded={**point.recorded, **changes})
    return replace(point, config=result.point, recorded=result.recorded, result=result)


def fsdp_tells(group: Sequence[Point]) -> bool:
    """Whether anything but the first is best."""
    named = []
    for number, point in enumerate(group):
        env = {"NCCL_MAX_CTAS": str(number)} if number else {}
        distributed = {**point.recorded["distributed"], "env": env}
        named.append(_changed(point, distributed=distributed, repetition=0))
    (analysis,) = analyse(TRAINING, named)
    return analysis.best.points[0] is not named[0]


def stacks_tell(group: Sequence[Point]) -> bool:
    named = [
        _changed(point, runtime={**point.recorded["runtime"], "max_connections": number + 1})
        for number, point in enumerate(group)
    ]
    return any(analysis.best is not analysis.reference for analysis in analyse(STACKS, named))


def compared(points: Sequence[Point]) -> Iterator[tuple[str, int, float, list[bool]]]:
    """One sweep against another of the same: operators' times as measured."""
    times = [estimate(one.result.measured.times["fwd"].point.samples_us) for one in points if one.result]
    alike = [one for one, point in zip(times, points, strict=True) if point.recorded["operator"] == "fc1"]
    yield "compare", 1, between(alike), [verdict(one, other) != "same" for one, other in groups(alike, 2)]


def kind(points: Sequence[Point]) -> str:
    return str(points[0].config.runtime.device)


def main(directory: Path) -> None:
    random.seed(1)
    print(f"{'decision':34} {'settings':>8} {'points':>6} {'scatter':>8} {'apart':>6}")
    for name in ("operator", "kernel", "layer", "fsdp", "tp_training"):
        if not (directory / name).exists():
            continue
        points = [point for point in read_points(directory / name).points if point.status == "ok"]
        if not points:
            print(f"{name}: nothing was measured")
            continue
        found: list[Iterator[tuple[str, int, float, list[bool]]]] = []
        if name == "operator":
            found = [operators(points), compared(points)]
        elif name == "kernel":
            found = [of_kernels(points)]
        elif name == "layer":
            found = [of_layers(points)]
        elif name == "fsdp":
            found = [of_steps(points, fsdp_tells, lambda point: point.measured_as(TrainingRun).step["point"], name)]
        else:
            found = [of_steps(points, stacks_tell, lambda point: point.measured_as(TpTrainingRun).timing, name)]
        for one in found:
            for label, count, scatter, told in one:
                apart = f"{sum(told) / len(told):6.1%}" if told else "     -"
                print(f"{label:34} {count:8} {len(points):6} {scatter:8.2%} {apart}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
