"""Measures how often the decisions of every workload separate equal settings, and find real differences.

    python -m benchmarks.equal_settings [TRIALS]

Points are simulated with normal noise of 1 % between samples (correlated or not) and between points, and go through the
functions that analyse sweeps. `apart` is the share of trials with equal settings in which one is preferred; `found` the
share in which a setting that is faster by three times its reported noise is preferred.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.measured import Measured, Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER, Scatter, verdict
from overlap_sweep.study.analysis import analyse
from overlap_sweep.workloads.copy_engine.result import CopyTimes
from overlap_sweep.workloads.copy_engine.section import copy_row
from overlap_sweep.workloads.fsdp.study import STUDY as TRAINING
from overlap_sweep.workloads.kernel import answer as kernels
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes
from overlap_sweep.workloads.layer import answer as layers
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes
from overlap_sweep.workloads.operator.choice import Observation, choose
from overlap_sweep.workloads.operator.result import PassTimes
from overlap_sweep.workloads.tp_training.study import STUDY as STACKS
from tests.make_point import (
    copy_config,
    kernel_config,
    layer_config,
    resolved,
    stack_config,
    timing_of,
    tp_training_run,
    training_run,
)

NOISE = 0.01
"""Standard deviation of a sample, as a share of the time."""


class Noise(NamedTuple):
    """Noise of simulated samples and points."""

    correlation: float
    between: float
    """Standard deviation of a setting's time between points, as a share."""
    samples: int = 21
    repetitions: int = 1

    def __str__(self) -> str:
        between = f", {self.between:.1%} between points" if self.between else ""
        points = f", {self.repetitions} points each" if self.repetitions > 1 else ""
        return f"correlation {self.correlation:g}{between}{points}"


def samples_us(time_us: float, noise: Noise, between: bool = True) -> Timing:
    """Returns the samples of one point."""
    level = time_us * (1 + (random.gauss(0, noise.between) if between else 0))
    error, found = random.gauss(0, 1), []
    for _ in range(noise.samples):
        found.append(level * (1 + NOISE * error))
        error = noise.correlation * error + (1 - noise.correlation**2) ** 0.5 * random.gauss(0, 1)
    return timing_of(found)


def operators(faster: Sequence[float], noise: Noise) -> tuple[int | None, float]:
    """Returns the number of the setting that is preferred to none, or None, and the noise of such a difference as a
    share."""
    observations = []
    for number, by in enumerate(faster):
        for _ in range(noise.repetitions):
            none, floor = samples_us(100, noise, between=False), samples_us(80, noise)
            times = PassTimes(point=samples_us(100 * (1 - by), noise), none=none, floor=floor)
            setting = {"fc1_fprop": {"method": "ring_exchange", "num_sm": number + 1}}
            observations.append(Observation(f"{number}", setting, times, None))
    chosen = choose(2, "fc1", "fwd", observations, "cuda")
    number = chosen.chosen.settings.get("fc1_fprop", {}).get("num_sm")
    return (None if number is None else number - 1), _noise(chosen.candidates[1].estimate, chosen.none.estimate)


def of_kernels(faster: Sequence[float], noise: Noise) -> tuple[int | None, float]:
    points = []
    for repetition in range(noise.repetitions):
        for number, by in enumerate(faster):
            names = ("sequential", "gemm_only", "comm_only")
            times = {
                name: samples_us(t, noise, name != "sequential") for name, t in zip(names, (100, 80, 30), strict=True)
            }
            times[f"ring_{number}"] = samples_us(100 * (1 - by), noise)
            implementations = {name: ImplementationTimes(time=time) for name, time in times.items()}
            result = KernelTimes(implementations=implementations)
            points.append(_point(f"{number}_{repetition}", kernel_config(backend="symm_mem"), result))
    (analysis,) = kernels.analyse_kernels(points)
    (shape,) = analysis.shapes
    assert shape.chosen
    one = shape.rows[-1].estimate
    sequential = shape.rows[0].estimate
    name = shape.chosen.name
    return (int(name.rpartition("_")[2]) if name.startswith("ring") else None), _noise(one, sequential)


def of_layers(faster: Sequence[float], noise: Noise) -> tuple[int | None, float]:
    times = {"none": samples_us(100, noise, False)}
    times |= {f"file:{number}": samples_us(100 * (1 - by), noise) for number, by in enumerate(faster)}
    parts = ("fwd", "bwd", "all")
    result = LayerTimes(variants={name: VariantTimes(times=dict.fromkeys(parts, time)) for name, time in times.items()})
    analysis = layers.analyse_layer(_point("layer", layer_config(), result))
    winner, one = analysis.winner, analysis.rows[1]
    return (int(winner.name.partition(":")[2]) if winner else None), one.interval.high - one.ratio


def of_fsdp(faster: Sequence[float], noise: Noise) -> tuple[int | None, float]:
    points = []
    for number, by in enumerate([0.0, *faster]):
        for repetition in range(noise.repetitions):
            config = resolved(
                "fsdp", distributed={"bucket_cap_mb": 25, "env": {"NCCL_MAX_CTAS": str(number)} if number else {}}
            )
            times = {name: samples_us(1e5 * (1 - by), noise) for name in ("point",)}
            times |= {name: samples_us(t, noise, False) for name, t in (("none", 1.1e5), ("floor", 8e4))}
            run = training_run(config, 1e5)
            run.step = times
            points.append(_point(f"{number}_{repetition}", config, run))
    (analysis,) = analyse(TRAINING, points)
    by_number = {int(row.points[0].name.partition("_")[0]): row for row in analysis.rows}
    number = next(number for number, row in by_number.items() if row is analysis.best)
    return (number - 1 if number else None), _noise(by_number[1].step, by_number[0].step)


def of_stacks(faster: Sequence[float], noise: Noise) -> tuple[int | None, float]:
    points = []
    for number, by in enumerate([0.0, *faster]):
        for repetition in range(noise.repetitions):
            config = stack_config("autotp")
            config = {**config, "runtime": {**config["runtime"], "max_connections": number + 1}}
            run = tp_training_run(config)
            steps = samples_us(1e5 * (1 - by), noise).samples_us
            warmup, timed = [s for s in run.steps if s.warmup], next(s for s in run.steps if not s.warmup)
            run.steps = warmup + [_at(timed, step_us) for step_us in steps]
            points.append(_point(f"{number}_{repetition}", config, run))
    (analysis,) = analyse(STACKS, points)
    best, reference = analysis.best, analysis.reference
    number = int(best.points[0].name.partition("_")[0]) - 1
    return (number if best is not reference else None), _noise(analysis.rows[0].step, analysis.rows[-1].step)


def of_copies(faster: Sequence[float], noise: Noise) -> tuple[int | None, float]:
    names = ("gemm", "copy", "sequential", "overlapped")
    found, told = None, 0.0
    for number, by in enumerate(faster):
        times = {name: samples_us(t, noise, False) for name, t in zip(names[:3], (60, 60, 100), strict=True)}
        times["overlapped"] = samples_us(100 * (1 - by), noise)
        bound = dict.fromkeys(names, False)
        copies = CopyTimes(times=times, launch_bound=bound, bytes_copied=1, flops=1)
        row = copy_row(_point("copies", copy_config(), copies))
        told = row.saved.noise_us / 100
        if row.saved.time_us > row.saved.noise_us:
            found = number
    return found, told


def of_compare(faster: Sequence[float], noise: Noise) -> tuple[int | None, float]:
    between = Scatter(TYPICAL_SCATTER["cuda"])
    times = (samples_us(time_us, noise) for time_us in (100 * (1 - faster[0]), 100))
    ours, theirs = (between.added_to(estimate(timing.samples_us), 1) for timing in times)
    return (0 if verdict(ours, theirs) == "faster" else None), _noise(ours, theirs)


def _noise(one: Estimate, other: Estimate) -> float:
    return (one.noise_us**2 + other.noise_us**2) ** 0.5 / other.time_us


def _at(step: Any, step_us: float) -> Any:
    return msgspec.structs.replace(
        step, step_us=step_us, forward_us=0.3 * step_us, backward_us=0.6 * step_us, optimizer_us=0.1 * step_us
    )


def _point(name: str, config: dict[str, Any], measured: Measured) -> Point:
    result = Result(name=name, recorded=config, status="ok", environment={"gpu": "NVIDIA H200"}, measured=measured)
    return Point(Path(name), "ok", result.point, config, result)


DECISIONS: dict[str, tuple[Callable[[Sequence[float], Noise], tuple[int | None, float]], Sequence[int]]] = {
    "operator": (operators, (1, 4, 12, 40)),
    "kernel": (of_kernels, (1, 4, 12)),
    "layer": (of_layers, (1, 4)),
    "fsdp": (of_fsdp, (1, 4, 12)),
    "tp_training": (of_stacks, (1, 3)),
    "copy_engine": (of_copies, (1,)),
    "compare": (of_compare, (1,)),
}
NOISES = (Noise(0.0, 0.0), Noise(0.5, 0.0), Noise(0.5, 0.003), Noise(0.5, 0.01), Noise(0.5, 0.01, repetitions=4))


def main(trials: int) -> None:
    random.seed(1)
    print(f"{'decision':12} {'settings':>8}  {'noise':50} {'apart':>6} {'found':>6}")
    for name, (decide, counts) in DECISIONS.items():
        for count in counts:
            for noise in NOISES:
                if noise.repetitions > 1 and name in ("layer", "copy_engine", "compare"):
                    continue
                apart = [decide([0.0] * count, noise) for _ in range(trials)]
                by = 3 * sorted(told for _, told in apart)[trials // 2]
                found = sum(decide([by] + [0.0] * (count - 1), noise)[0] == 0 for _ in range(trials))
                told = sum(number is not None for number, _ in apart)
                print(f"{name:12} {count:8}  {noise!s:50} {told / trials:6.1%} {found / trials:6.1%}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
