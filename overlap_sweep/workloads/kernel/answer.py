"""Kernels: which implementation of one GEMM with one collective is the fastest at which m, whoever's it is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from overlap_sweep.overlap.kernel_shape import BASELINES, COMM_ONLY, GEMM_ONLY, SEQUENTIAL, KernelShape
from overlap_sweep.report.numbers import as_percent, as_us
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, hidden_fraction, normalised, pooled_none
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes

SIMPLEST_FIRST = ("torch", "symm_mem", "transformer_engine", "flux")
"""Backends by what it takes to use them; those from elsewhere come last."""
DONT_OVERLAP = "don't overlap"


class KernelCase(NamedTuple):
    """What must be equal for kernels to be compared at all; they may differ in m."""

    kernel: str
    n: int
    k: int
    tp_size: int
    precision: str
    device: str

    @property
    def brief(self) -> str:
        """Without the device."""
        return f"{self.kernel} n={self.n} k={self.k} TP={self.tp_size} {self.precision}"

    def __str__(self) -> str:
        return f"{self.brief} on {self.device}"


class Beside(NamedTuple):
    """One measurement of an implementation."""

    point: str
    times: ImplementationTimes
    sequential: ImplementationTimes

    @property
    def clean(self) -> bool:
        return not (self.times.launch_bound or self.sequential.launch_bound)


@dataclass(frozen=True)
class ImplementationRow:
    """One implementation, or a baseline, at one m: of a point, or of all points there, comparable with the others."""

    backend: str | None
    """None of a baseline, which the points of all backends measured."""
    name: str
    config: Mapping[str, Any]
    """Of one of its points."""
    measured: Sequence[Beside]
    estimate: Estimate
    """Relative to the `sequential` beside it; its noise is NaN in a single point."""
    baselines_us: Mapping[str, float]
    """The times that it is compared with."""
    chosen: bool = False
    """Whether it is the answer for its shape."""
    note: str = ""
    """What tells it from those that are simply slower."""

    @property
    def time_us(self) -> float:
        return self.estimate.time_us

    @property
    def shape(self) -> KernelShape:
        return KernelShape.of(self.config)

    @property
    def relative_error(self) -> float | None:
        """The largest."""
        errors = (one.times.relative_error for one in self.measured)
        return max((error for error in errors if error is not None), default=None)

    @property
    def independent(self) -> bool:
        return any(one.times.independent for one in self.measured)

    @property
    def launch_bound(self) -> bool:
        return all(one.times.launch_bound for one in self.measured)

    @property
    def comparable(self) -> bool:
        """Whether some point measured it when neither it nor the `sequential` beside it was launch-bound."""
        return any(one.clean for one in self.measured)

    @property
    def setting(self) -> dict[str, Any]:
        return self.measured[0].times.setting

    @property
    def points(self) -> tuple[str, ...]:
        return tuple(one.point for one in self.measured)

    @property
    def bound_us(self) -> float:
        """The longer of the GEMM and the communication: no overlap of these two takes less."""
        return max(self.baselines_us[GEMM_ONLY], self.baselines_us[COMM_ONLY])

    @property
    def tflops(self) -> float:
        """Returns the rate of one GPU, by its own part of the GEMM; NaN for `comm_only`."""
        return math.nan if self._is(COMM_ONLY) else self.shape.flops / self.time_us / 1e6

    @property
    def link_gb_per_s(self) -> float:
        """Returns what a GPU receives over the whole time; NaN for `gemm_only`."""
        return math.nan if self._is(GEMM_ONLY) else self.shape.link_bytes(self.config["precision"]) / self.time_us / 1e3

    @property
    def hidden_fraction(self) -> float:
        """NaN, like the two that follow, of `gemm_only` and `comm_only`, which are no ways to compute the kernel."""
        none_us, floor_us = self.baselines_us[SEQUENTIAL], self.baselines_us[GEMM_ONLY]
        return math.nan if self._is(GEMM_ONLY, COMM_ONLY) else hidden_fraction(self.time_us, none_us, floor_us)

    @property
    def speedup(self) -> float:
        """Over `sequential`."""
        return math.nan if self._is(GEMM_ONLY, COMM_ONLY) else self.baselines_us[SEQUENTIAL] / self.time_us

    @property
    def over_bound(self) -> float:
        """Time over the bound, minus 1."""
        return math.nan if self._is(GEMM_ONLY, COMM_ONLY) else self.time_us / self.bound_us - 1

    def _is(self, *baselines: str) -> bool:
        return self.backend is None and self.name in baselines

    @property
    def label(self) -> str:
        """`symm_mem ring`, or a baseline's name."""
        return f"{self.backend} {self.name}" if self.backend else self.name

    @property
    def advice(self) -> str:
        """Returns what to do where this is the answer."""
        return DONT_OVERLAP if self.name == SEQUENTIAL else self.label


@dataclass(frozen=True)
class ShapeAnalysis:
    """One m of a case: all implementations that were measured, and which to use."""

    case: KernelCase
    m: int
    points: list[Point]
    baselines: dict[str, ImplementationRow]
    implementations: list[ImplementationRow]
    """From simple to complex."""
    reason: str
    left_out: dict[str, str]
    """By label, why it was not timed."""
    wrong: frozenset[str]
    """The labels of those left out that computed wrong numbers."""

    @property
    def contenders(self) -> list[ImplementationRow]:
        """What can be used instead of `sequential`, from simple to complex: whose time says something about the device,
        that computes the kernel, and never computed it wrong."""
        fit = (row for row in self.implementations if row.comparable and not row.independent)
        return [row for row in fit if row.label not in self.wrong]

    @property
    def chosen(self) -> ImplementationRow | None:
        """None where `sequential` was launch-bound: then nothing can be said."""
        return next((row for row in self.rows if row.chosen), None)

    @property
    def rows(self) -> list[ImplementationRow]:
        """The baselines, and then what was measured from fast to slow."""
        return [*self.baselines.values(), *sorted(self.implementations, key=lambda row: row.time_us)]

    @property
    def sequential(self) -> ImplementationRow:
        return self.baselines[SEQUENTIAL]

    @property
    def binding(self) -> ImplementationRow:
        """The longer of the GEMM and the communication."""
        return max(self.baselines[GEMM_ONLY], self.baselines[COMM_ONLY], key=lambda row: row.time_us)

    @property
    def bound_us(self) -> float:
        return self.binding.time_us

    @property
    def answer(self) -> str:
        """A sentence, with what it comes from."""
        chosen = self.chosen
        if chosen is None:
            return f"m={self.m}: no answer, {self.reason}"
        if chosen.name == SEQUENTIAL:
            return f"m={self.m}: {DONT_OVERLAP}, {as_us(chosen.time_us)} us; {self.reason}"
        return (
            f"m={self.m}: {chosen.label}, {as_us(chosen.time_us)} us, {chosen.speedup:.2f}x {SEQUENTIAL}, "
            f"hidden {as_percent(chosen.hidden_fraction)}, {as_over(chosen.over_bound)} the bound; {self.reason}"
        )


@dataclass(frozen=True)
class KernelAnalysis:
    """One case."""

    case: KernelCase
    shapes: list[ShapeAnalysis]
    """By m."""

    @property
    def points(self) -> list[Point]:
        return [point for shape in self.shapes for point in shape.points]

    @property
    def subjects(self) -> list[str]:
        return subjects(self.points)


def subjects(points: Iterable[Point]) -> list[str]:
    """Returns the operators whose sizes the points have, `llama3_70b fc1`; none where sizes were given."""
    named = ((point.config["model"]["name"], point.config.get("operator")) for point in points)
    return list(dict.fromkeys(f"{model} {operator}" for model, operator in named if operator))


_Key = tuple[str | None, str]
"""Backend and name; no backend of baselines."""


def analyse_kernels(points: Iterable[Point]) -> list[KernelAnalysis]:
    """Returns the `ok` points of kernels by case and m. The points of different backends are compared through
    `sequential`, which each of them measured in turns with its implementations, so that drift between them cancels."""
    cases: dict[KernelCase, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.workload == "kernel" and point.status == "ok":
            named = {name: point.config[name] for name in KernelCase._fields if name != "device"}
            cases[KernelCase(**named, device=point.case.device)][point.config["m"]].append(point)
    return [
        KernelAnalysis(case, [_analyse_shape(case, m, of_shape) for m, of_shape in sorted(cases[case].items())])
        for case in sorted(cases)
    ]


def answers_in_words(analysis: KernelAnalysis) -> str:
    """`m=512: torch ring; 2048 to 8192: symm_mem ring`: nothing of what lies beyond the m that were measured."""
    runs = groupby(analysis.shapes, key=lambda shape: shape.chosen.advice if shape.chosen else "no answer")
    return "m=" + "; ".join(f"{_span([shape.m for shape in same])}: {advice}" for advice, same in runs)


def as_over(over_bound: float) -> str:
    """`8% above`, `3% below`."""
    return f"{abs(over_bound):.0%} {'above' if over_bound >= 0 else 'below'}"


def _span(ms: Sequence[int]) -> str:
    return f"{ms[0]}" if len(ms) == 1 else f"{ms[0]} to {ms[-1]}"


def _analyse_shape(case: KernelCase, m: int, points: Sequence[Point]) -> ShapeAnalysis:
    measured = _measured(points)
    estimates = _estimates(measured, points[0].config["runtime"]["device"])
    baselines_us = {name: estimates[None, name].time_us for name in BASELINES}
    rows = {
        key: ImplementationRow(*key, points[0].config, same, estimates[key], baselines_us)
        for key, same in measured.items()
    }
    left_out, wrong = _left_out(points, {row.label for row in rows.values()})
    shape = ShapeAnalysis(
        case=case,
        m=m,
        points=list(points),
        baselines={name: rows[None, name] for name in BASELINES},
        implementations=[row for row in rows.values() if row.backend],
        reason="",
        left_out=left_out,
        wrong=frozenset(wrong),
    )
    chosen, reason = _choose(shape)

    def judged(row: ImplementationRow) -> ImplementationRow:
        said = {
            "use this": row is chosen,
            "the bound": row is shape.binding,
            "independent": row.independent,
            "launch-bound": row.launch_bound,
            "wrong numbers in another point": row.label in wrong,
        }
        return replace(row, chosen=row is chosen, note=", ".join(words for words, holds in said.items() if holds))

    return replace(
        shape,
        baselines={name: judged(row) for name, row in shape.baselines.items()},
        implementations=[judged(row) for row in shape.implementations],
        reason=reason,
    )


def _measured(points: Iterable[Point]) -> dict[_Key, list[Beside]]:
    """Returns what was measured by backend and name, simplest first; the repetitions of one backend's points
    together."""

    def simplicity(point: Point) -> tuple[int, str]:
        backend = point.config["backend"]
        return SIMPLEST_FIRST.index(backend) if backend in SIMPLEST_FIRST else len(SIMPLEST_FIRST), backend

    found: dict[_Key, list[Beside]] = defaultdict(list)
    for point in sorted(points, key=simplicity):
        implementations = point.measured_as(KernelTimes).implementations
        for name, times in implementations.items():
            key = (None, name) if name in BASELINES else (point.config["backend"], name_in_tables(name, point.config))
            found[key].append(Beside(point.name, times, implementations[SEQUENTIAL]))
    return found


def name_in_tables(name: str, config: Mapping[str, Any]) -> str:
    """Returns an implementation's name, with the CUDA connections where they were given, on which its time may depend
    more than on anything else: `ring_conn8`."""
    connections = config["runtime"].get("max_connections")
    return name if connections is None or name in BASELINES else f"{name}_conn{connections}"


def _estimates(measured: Mapping[_Key, Sequence[Beside]], device_kind: str) -> dict[_Key, Estimate]:
    # Without those that say nothing about the device, if there are others.
    trusted = {key: [one for one in same if one.clean] or same for key, same in measured.items()}
    anchor = pooled_none([one.times.time for one in trusted.pop((None, SEQUENTIAL))])
    pairs = {key: [(one.times.time, one.sequential.time) for one in same] for key, same in trusted.items()}
    baselines: list[list[Estimate]] = []
    repeated: list[list[Estimate]] = []
    for (backend, _), same in pairs.items():
        (repeated if backend else baselines).append([normalised([pair], anchor) for pair in same])
    between = verdict.scatter(repeated, verdict.TYPICAL_SCATTER[device_kind], baselines)
    found = {key: between.added_to(normalised(same, anchor), len(same)) for key, same in pairs.items()}
    return {**found, (None, SEQUENTIAL): anchor}


def _choose(shape: ShapeAnalysis) -> tuple[ImplementationRow | None, str]:
    sequential, usable = shape.sequential, shape.contenders
    if not sequential.comparable:
        return None, f"{SEQUENTIAL} was launch-bound: its time says nothing about the device"
    if not usable:
        unfit = (
            f"{row.label} is independent of its communication"
            if row.independent
            else f"{row.label} {'computed wrong numbers' if row.comparable else 'was launch-bound'}"
            for row in shape.implementations
        )
        return sequential, f"nothing else can be used: {', '.join(unfit)}"
    choice = verdict.choose([sequential, *usable], lambda row: row.estimate)
    chosen, fastest = choice.chosen, choice.fastest
    if not choice.won:
        if choice.all_slower:
            slower = fastest.time_us / sequential.time_us - 1
            return sequential, f"the best overlap, {fastest.label}, is {slower:.1%} slower"
        return sequential, f"the best overlap, {fastest.label}, is no faster beyond the noise ({choice.gap})"
    if chosen is not fastest:
        reason = f"simplest of those within the noise of the fastest, {fastest.label} ({choice.gap})"
    else:
        reason = f"fastest of {len(usable) + 1}, {SEQUENTIAL} included"
    return chosen, reason if len(chosen.points) > 1 else f"{reason}; not repeated"


def _left_out(points: Iterable[Point], measured: set[str]) -> tuple[dict[str, str], set[str]]:
    """Returns by label why it was not timed, and the labels of what computed wrong numbers: these also where another
    repetition was right."""
    left_out, wrong = {}, set()
    for point in points:
        assert point.result
        for name, reason in point.measured_as(KernelTimes).left_out.items():
            label = f"{point.config['backend']} {name_in_tables(name, point.config)}"
            is_wrong = name in point.result.relative_error
            if is_wrong or label not in measured:
                left_out[label] = reason
            wrong |= {label} if is_wrong else set()
    return left_out, wrong
