"""Kernels: the fastest implementation of one GEMM with one collective at each m, over all backends."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from overlap_sweep.config import PointConfig
from overlap_sweep.overlap.models import BASELINES, COMM_ONLY, GEMM_ONLY, KERNELS, SEQUENTIAL, KernelShape
from overlap_sweep.report.numbers import as_percent, as_sentence, as_us
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, hidden_fraction, normalised, pooled_none
from overlap_sweep.results.gain import NO_GAIN, Gain, nothing_beat
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.traces import on_nodes
from overlap_sweep.study import in_brief
from overlap_sweep.workloads.kernel.config import Resolved
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes

SIMPLEST_FIRST = ("torch", "symm_mem", "transformer_engine", "flux")
"""Backends by how simple they are to use; those of other packages come last."""


class KernelCase(NamedTuple):
    """Properties that must be equal for kernels to be compared; they may differ in m."""

    kernel: str
    n: int
    k: int
    tp_size: int
    precision: str
    device: str
    nodes: int

    @property
    def brief(self) -> str:
        """Returns the case in words, without the device."""
        return f"{self.kernel} n={self.n} k={self.k} TP={self.tp_size} {self.precision}{on_nodes(self.nodes)}"


@dataclass(frozen=True)
class ImplementationRow:
    """One implementation or baseline at one m, from one point or pooled over all points. Rates are per rank. Values
    that are undefined for `gemm_only` or `comm_only`, which don't compute the kernel, are NaN."""

    backend: str | None
    """Backend of the implementation; None for a baseline, which the points of all backends measured."""
    name: str
    m: int
    points: tuple[str, ...]
    setting: Mapping[str, Scalar]
    estimate: Estimate
    """Time, normalised by the `sequential` of the same point."""
    baselines_us: Mapping[str, float]
    bound_us: float
    """The longer of `gemm_only` and `comm_only`: no overlap of these two takes less."""
    tflops: float
    link_gb_per_s: float
    """Bytes that a rank receives, over the whole time."""
    hidden_fraction: float
    speedup: float
    over_bound: float
    relative_error: float | None
    independent: bool
    launch_bound: bool
    """Whether it or the `sequential` of the same point was launch-bound in every point."""
    wrong: bool
    """Whether it computed wrong numbers in another repetition."""
    chosen: bool = False
    collective: str = ""
    """Collective alone; empty, and what follows NaN, of other kernels."""
    size_mb: float = math.nan
    beside_us: float = math.nan
    """Time of the collective while GEMMs run; `time_us` is that alone."""
    comm_slowdown: float = math.nan
    """What it takes longer beside GEMMs, as a share of its time alone; median over the rounds."""
    gemm_slowdown: float = math.nan

    @property
    def time_us(self) -> float:
        return self.estimate.time_us

    @property
    def label(self) -> str:
        """Returns `symm_mem ring`, or a baseline's name."""
        return f"{self.backend} {self.name}" if self.backend else self.name

    @property
    def usable(self) -> bool:
        """Returns whether it may be the answer: its time reflects the device, and it computes the kernel."""
        computes = self.name not in (GEMM_ONLY, COMM_ONLY) and not self.independent
        return computes and not self.launch_bound and not self.wrong

    @property
    def note(self) -> str:
        """Returns what distinguishes it from rows that are simply slower."""
        return in_brief(
            {
                "use this": self.chosen,
                "independent": self.independent,
                "launch-bound": self.launch_bound,
                "wrong numbers in another point": self.wrong,
            }
        )


@dataclass(frozen=True)
class ShapeAnalysis:
    """All measurements of a case at one m, and the implementation to use."""

    case: KernelCase
    m: int
    points: list[Point]
    rows: list[ImplementationRow]
    """The baselines, then the implementations from fast to slow."""
    chosen: ImplementationRow | None
    """Row of the implementation to use; None if `sequential` was launch-bound."""
    gain: Gain
    reason: str
    left_out: dict[str, str]

    @property
    def advice(self) -> str:
        """Returns the implementation to use, `no overlap` or `no answer`."""
        if self.chosen is None:
            return "no answer"
        return self.chosen.label if self.chosen.backend else "no overlap"

    @property
    def answer(self) -> str:
        """Returns the answer in sentences, with its numbers."""
        if not (chosen := self.chosen):
            return f"m={self.m}: {self.advice}. {as_sentence(self.reason)}."
        if not chosen.backend:
            return f"m={self.m}: {self.advice}, {as_us(chosen.time_us)} us. {as_sentence(self.reason)}."
        side = "above" if chosen.over_bound >= 0 else "below"
        return (
            f"m={self.m}: {self.advice}, {as_us(chosen.time_us)} us, {self.gain.in_words(SEQUENTIAL)}, "
            f"{as_percent(chosen.hidden_fraction)} hidden, {abs(chosen.over_bound):.0%} {side} the bound. "
            f"{as_sentence(self.reason)}."
        )


@dataclass(frozen=True)
class KernelAnalysis:
    """The analysis of one case."""

    case: KernelCase
    shapes: list[ShapeAnalysis]

    @property
    def points(self) -> list[Point]:
        return [point for shape in self.shapes for point in shape.points]

    @property
    def rows(self) -> list[ImplementationRow]:
        return [row for shape in self.shapes for row in shape.rows]

    @property
    def in_words(self) -> str:
        """Returns the advice for the measured m: `m=512: torch ring; 2048 to 8192: symm_mem ring`."""
        runs = []
        for advice, same in groupby(self.shapes, key=lambda shape: shape.advice):
            ms = [shape.m for shape in same]
            runs.append(f"{ms[0]}{f' to {ms[-1]}' if len(ms) > 1 else ''}: {advice}")
        return f"m={'; '.join(runs)}"


def subjects(points: Iterable[Point]) -> list[str]:
    """Returns the operators that the points take their sizes from, `llama3_70b fc1`; empty if n and k were given."""
    named = ((point.config.model.name, point.config_as(Resolved).operator) for point in points)
    return list(dict.fromkeys(f"{model} {operator}" for model, operator in named if operator))


class _Measurement(NamedTuple):
    point: str
    times: ImplementationTimes
    sequential: ImplementationTimes
    """That of the same point."""
    clean: bool
    """Whether neither was launch-bound."""


def analyse_kernels(points: Iterable[Point]) -> list[KernelAnalysis]:
    """Returns an analysis of the `ok` kernel points for each case, by m. Points of different backends are compared
    through `sequential`, which each measured in turns with its implementations, so that drift between them cancels."""
    shapes = group_points(points, "kernel", _case_and_m)
    analyses: dict[KernelCase, list[ShapeAnalysis]] = defaultdict(list)
    for case, m in sorted(one for one in shapes if one[0].kernel in KERNELS):
        analyses[case].append(_analyse_shape(case, m, shapes[case, m]))
    return [KernelAnalysis(case, own) for case, own in analyses.items()]


def _case_and_m(point: Point) -> tuple[KernelCase, int]:
    config, case = point.config_as(Resolved), point.case
    sizes = config.n, config.k, config.tp_size
    return KernelCase(config.kernel, *sizes, config.precision, case.device, case.nodes), config.m


def _analyse_shape(case: KernelCase, m: int, points: list[Point]) -> ShapeAnalysis:
    rows = kernel_rows(points)
    best, gain, reason = _choose(rows)
    judged = [replace(row, chosen=row is best) for row in rows]
    return ShapeAnalysis(
        case=case,
        m=m,
        points=points,
        rows=sorted(judged, key=lambda row: row.time_us if row.backend else 0.0),
        chosen=next((row for row in judged if row.chosen), None),
        gain=gain,
        reason=reason,
        left_out={
            _label(point, name): reason
            for point in points
            for name, reason in point.measured_as(KernelTimes).left_out.items()
        },
    )


def kernel_rows(points: Sequence[Point]) -> list[ImplementationRow]:
    """Returns the rows of `ok` points of one shape, with repetitions pooled: the baselines, then the implementations
    from simple to complex."""
    measured, config = _measured(points), points[0].config_as(Resolved)
    wrong = {_label(point, name) for point in points if point.result for name in point.result.relative_error}
    estimates = _estimates(measured, config.runtime.device)
    baselines_us = {name: estimates[None, name].time_us for name in BASELINES}
    sequential_us, gemm_us = baselines_us[SEQUENTIAL], baselines_us[GEMM_ONLY]
    bound_us = max(gemm_us, baselines_us[COMM_ONLY])
    shape = KernelShape(config.kernel, config.m, config.n, config.k, config.tp_size)
    rows = []
    for (backend, name), same in measured.items():
        time_us = estimates[backend, name].time_us
        whole_us = math.nan if name in (GEMM_ONLY, COMM_ONLY) else time_us
        rows.append(
            ImplementationRow(
                backend=backend,
                name=name,
                m=shape.m,
                points=tuple(one.point for one in same),
                setting=same[0].times.setting,
                estimate=estimates[backend, name],
                baselines_us=baselines_us,
                bound_us=bound_us,
                tflops=math.nan if name == COMM_ONLY else shape.flops / time_us / 1e6,
                link_gb_per_s=math.nan if name == GEMM_ONLY else shape.link_bytes(config.precision) / time_us / 1e3,
                hidden_fraction=hidden_fraction(whole_us, sequential_us, gemm_us),
                speedup=sequential_us / whole_us,
                over_bound=whole_us / bound_us - 1,
                relative_error=max((e for one in same if (e := one.times.relative_error) is not None), default=None),
                independent=any(one.times.independent for one in same),
                launch_bound=not any(one.clean for one in same),
                wrong=f"{backend} {name}" in wrong,
            )
        )
    return sorted(rows, key=lambda row: BASELINES.index(row.name) if row.backend is None else len(BASELINES))


def _measured(points: Iterable[Point]) -> dict[tuple[str | None, str], list[_Measurement]]:
    """Returns the measurements by backend, which is None for baselines, and name, simplest first."""
    place = {backend: number for number, backend in enumerate(SIMPLEST_FIRST)}
    found: dict[tuple[str | None, str], list[_Measurement]] = defaultdict(list)
    for point in sorted(points, key=lambda point: (place.get(point.config.backend, math.inf), point.config.backend)):
        implementations = point.measured_as(KernelTimes).implementations
        for name, times in implementations.items():
            key = (None, name) if name in BASELINES else (point.config.backend, name_in_tables(name, point.config))
            sequential = implementations[SEQUENTIAL]
            clean = not (times.launch_bound or sequential.launch_bound)
            found[key].append(_Measurement(point.name, times, sequential, clean))
    return found


def name_in_tables(name: str, config: PointConfig) -> str:
    """Returns an implementation's name, with the CUDA connections if they were set, since they may matter more than any
    knob: `ring_conn8`."""
    connections = config.runtime.max_connections
    return name if connections is None or name in BASELINES else f"{name}_conn{connections}"


def _label(point: Point, name: str) -> str:
    return f"{point.config.backend} {name_in_tables(name, point.config)}"


def _estimates(
    measured: Mapping[tuple[str | None, str], Sequence[_Measurement]], device_kind: str
) -> dict[tuple[str | None, str], Estimate]:
    # Launch-bound measurements count only if there are no others.
    trusted = {key: [one for one in same if one.clean] or same for key, same in measured.items()}
    anchor = pooled_none([one.times.time for one in trusted.pop((None, SEQUENTIAL))])
    pairs = {key: [(one.times.time, one.sequential.time) for one in same] for key, same in trusted.items()}
    repeated, baselines = (
        [[normalised([pair], anchor) for pair in same] for (backend, _), same in pairs.items() if bool(backend) is own]
        for own in (True, False)
    )
    between = verdict.scatter(repeated, verdict.TYPICAL_SCATTER[device_kind], baselines)
    found = {key: between.added_to(normalised(same, anchor), len(same)) for key, same in pairs.items()}
    return {**found, (None, SEQUENTIAL): anchor}


def _choose(rows: Sequence[ImplementationRow]) -> tuple[ImplementationRow | None, Gain, str]:
    """Returns the row to use, its gain over `sequential`, and why."""
    sequential, *usable = (row for row in rows if row.usable or row.name == SEQUENTIAL)
    if sequential.launch_bound:
        return None, NO_GAIN, f"{SEQUENTIAL} was launch-bound: its time says nothing about the GPU"
    if not usable:
        return sequential, NO_GAIN, "none of the measured implementations is usable"
    choice = verdict.choose([sequential, *usable], lambda row: row.estimate)
    chosen, fastest = choice.chosen, choice.fastest
    if not choice.won:
        gain = choice.gain_of_fastest.in_words(SEQUENTIAL)
        reason = f"{nothing_beat(SEQUENTIAL)}; the fastest overlap, {fastest.label}, is {gain}"
    elif chosen is not fastest:
        reason = f"simplest within the noise of the fastest, {fastest.label} (noise {choice.tie_noise:.1%})"
    else:
        reason = f"fastest of {len(usable) + 1}, including {SEQUENTIAL}"
    return chosen, choice.gain, reason if len(chosen.points) > 1 else f"{reason}; not repeated"
