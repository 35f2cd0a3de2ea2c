"""Tensor-parallel stacks: the fastest on each grid of ranks, and whether their losses agree."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.report.numbers import as_us
from overlap_sweep.results.estimate import gap_noise_us
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import recorded_warnings
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep
from overlap_sweep.workloads.tp_training.rows import Grid, Losses, StepCommunication, TpTrainingRow, rows_of

_USUAL = {"learning_rate": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 42}
"""Default options of tp_training, which a case does not name."""
MOST_NAMED = 3
"""Slower settings in the sentence on a grid; the table has all."""


class TpTrainingCase(NamedTuple):
    """Properties that must be equal for implementations and grids of ranks to be compared."""

    model: str
    num_layers: int
    device: str
    precision: str
    seq_length: int
    batch_size: int
    gradient_accumulation_steps: int
    num_training_steps: int
    warmup_steps: int
    more: str
    """The other options that are not at their defaults, in words."""
    architecture: str
    """Digest of the model's full config."""
    nodes: int

    @classmethod
    def of(cls, point: Point) -> TpTrainingCase:
        """Returns the case of an `ok` point."""
        config, options = point.config, point.config["tp_training"]
        return cls(
            model=config["model"]["name"],
            num_layers=config["language_model"]["num_hidden_layers"],
            device=point.case.device,
            precision=config["precision"],
            more="".join(f", {name}={options[name]:g}" for name, usual in _USUAL.items() if options[name] != usual),
            architecture=key_of(config["language_model"])[:8],
            nodes=point.case.nodes,
            **{name: value for name, value in options.items() if name in cls._fields},
        )

    def __str__(self) -> str:
        micro_batches = f" x {self.gradient_accumulation_steps}" if self.gradient_accumulation_steps > 1 else ""
        sizes = f"sequences of {self.seq_length}, batch {self.batch_size}{micro_batches}, {self.precision}"
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.model}, {self.num_layers} layers, {sizes}{self.more} on {self.device}{nodes}"


@dataclass(frozen=True)
class GridAnswer:
    """The implementations on one grid of ranks, at least one."""

    case: TpTrainingCase
    rows: list[TpTrainingRow]
    """Rows from fast to slow."""

    @property
    def grid(self) -> Grid:
        return self.rows[0].grid

    @property
    def comparable(self) -> list[TpTrainingRow]:
        """Returns the rows that neither deviate nor diverge; the first is the answer."""
        return [row for row in self.rows if row.may_win]

    @property
    def best(self) -> TpTrainingRow | None:
        """Returns the fastest row; None if all deviate or diverge."""
        return next(iter(self.comparable), None)

    @property
    def ties(self) -> list[TpTrainingRow]:
        """Returns the best row and those not slower beyond the noise. The noise counts all pairs, since any row might
        have come out best by chance."""
        rows = self.comparable
        pairs = max(len(rows) * (len(rows) - 1) // 2, 1)
        return [row for row in rows if row is rows[0] or not row.step.differs_from(rows[0].step, pairs)]


@dataclass(frozen=True)
class TpTrainingAnalysis:
    """The analysis of one case."""

    case: TpTrainingCase
    answers: list[GridAnswer]
    """Answers by number of ranks and grid."""
    of_points: list[TpTrainingRow]
    """One row for each point."""

    @property
    def rows(self) -> list[TpTrainingRow]:
        return [row for answer in self.answers for row in answer.rows]

    @property
    def points(self) -> list[Point]:
        return [point for row in self.rows for point in row.points]

    @property
    def best(self) -> TpTrainingRow | None:
        """Returns the row with the highest throughput per GPU; None if all deviate or diverge."""
        return max((row for row in self.rows if row.may_win), key=lambda row: row.tokens_per_s_per_gpu, default=None)


def analyse_tp_training(
    points: Iterable[Point], communication: Mapping[Path, StepCommunication]
) -> list[TpTrainingAnalysis]:
    """Returns an analysis of the `ok` points for each case. `communication`: by run directory."""
    cases: dict[TpTrainingCase, list[Point]] = defaultdict(list)
    for point in points:
        if point.workload == "tp_training" and point.status == "ok":
            cases[TpTrainingCase.of(point)].append(point)
    return [_analysis(case, *rows_of(cases[case], communication)) for case in sorted(cases)]


def _analysis(
    case: TpTrainingCase, rows: Sequence[TpTrainingRow], of_points: list[TpTrainingRow]
) -> TpTrainingAnalysis:
    losses = _losses(rows)
    for row in (*rows, *of_points):
        compared = [losses[point.directory] for point in row.points if point.directory in losses]
        row.losses = max(compared, key=lambda one: bool(one.deviates), default=None)
    grids: dict[Grid, list[TpTrainingRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.grid.ranks, row.grid, row.time_us)):
        grids[row.grid].append(row)
    analysis = TpTrainingAnalysis(case, [GridAnswer(case, of_grid) for of_grid in grids.values()], of_points)
    several = [answer.ties for answer in analysis.answers if len(answer.rows) > 1]
    places = {row.name: "tie" if len(ties) > 1 else "fastest" for ties in several for row in ties}
    chosen = {answer.best.name for answer in analysis.answers if answer.best}
    for row in (*rows, *of_points):
        row.chosen, row.place = row.name in chosen, places.get(row.name, "")
    return analysis


def tolerance_of(precision: str) -> dict[str, float]:
    """Returns the relative differences of losses and gradient norms that rounding explains: bf16 and fp16 keep 8 and 11
    bits, and every implementation adds in another order."""
    return {"loss": 1e-4, "grad_norm": 1e-3} if precision == "fp32" else {"loss": 1e-2, "grad_norm": 5e-2}


def _losses(rows: Iterable[TpTrainingRow]) -> dict[Path, Losses]:
    """Returns how losses compare by run directory, for runs with the same data as others. Implementations are compared
    with each other, or settings if there is only one implementation. The reference is the median of all, which shows a
    single wrong one among three or more; two are compared with each other."""
    of_sizes: dict[int, list[TpTrainingRow]] = defaultdict(list)
    for row in rows:
        of_sizes[row.grid.dp_size].append(row)
    found: dict[Path, Losses] = {}
    for of_size in of_sizes.values():
        several = len({row.impl for row in of_size}) > 1
        votes: dict[str, dict[Path, list[TpTrainingStep]]] = defaultdict(dict)
        for row in of_size:
            steps = {point.directory: point.measured_as(TpTrainingRun).steps for point in row.points}
            votes[row.impl if several else row.name] |= steps
        tolerance = tolerance_of(of_size[0].points[0].config["precision"])
        for who, runs in votes.items():
            others = [list(other.values()) for name, other in votes.items() if len(votes) > 2 or name != who]
            if others:
                found |= {directory: _compared(steps, others, tolerance) for directory, steps in runs.items()}
    return found


def _compared(
    own: Sequence[TpTrainingStep], others: Sequence[Sequence[Sequence[TpTrainingStep]]], tolerance: Mapping[str, float]
) -> Losses:
    """Returns how the losses of `own` compare. `others`: by implementation, the steps of each of its runs."""
    largest, deviates = 0.0, ""
    for number, step in enumerate(own):
        for name, most in tolerance.items():
            value: float | None = getattr(step, name)
            reference = _median(_median(getattr(run[number], name) for run in runs) for runs in others)
            difference = _relative(value, reference)
            if difference > most and not deviates:
                deviates = f"{name} is {_number(value)} instead of {_number(reference)} at step {number}"
            if name == "loss":
                largest = max(largest, difference)
    return Losses(largest, deviates)


def _median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not None; None if most are."""
    of_all = list(values)
    known = [value for value in of_all if value is not None]
    return statistics.median(known) if 2 * len(known) >= len(of_all) else None


def _relative(value: float | None, reference: float | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else math.inf
    return abs(value - reference) / abs(reference) if reference else math.inf if value else 0.0


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.6g}"


def headline(analysis: TpTrainingAnalysis) -> str:
    """Returns the implementation to train with, in a few words."""
    best = analysis.best
    if best is None:
        return "No answer: all settings deviate or diverge"
    (answer,) = (answer for answer in analysis.answers if best in answer.rows)
    if best in answer.ties and len(answer.ties) > 1:
        return f"Tie on {answer.grid}: {', '.join(row.setting for row in answer.ties)}"
    return f"Use {best.setting} on {answer.grid}"


def in_words(analysis: TpTrainingAnalysis) -> list[str]:
    """Returns a sentence for each grid, the best of all, and whether the losses agree."""
    lines = [_grid_in_words(answer) for answer in analysis.answers]
    if analysis.best and len(lines) > 1:
        lines.append(f"Most tokens/s per GPU: {analysis.best.name}, {analysis.best.tokens_per_s_per_gpu:,.0f}.")
    compared = [(row.name, row.losses) for row in analysis.rows if row.losses]
    deviating = [f"{name} deviates: {losses.deviates}." for name, losses in compared if losses.deviates]
    if compared and not deviating:
        largest = max(losses.largest for _, losses in compared)
        lines.append(f"The losses agree (largest relative difference {largest:.1g}).")
    return [*lines, *deviating]


def _grid_in_words(answer: GridAnswer) -> str:
    best, ties = answer.best, answer.ties
    if best is None:
        return f"{answer.grid}: no answer, all settings deviate or diverge."
    parts = [f"{best.setting} takes {as_us(best.time_us)} us per step, {best.tokens_per_s:,.0f} tokens/s"]
    for row in answer.comparable[1 : MOST_NAMED + 1]:
        parts.append(f"{row.setting} {_over(row, best)} as long{' (tie)' if row in ties else ''}")
    return f"{answer.grid}: {'; '.join(parts)}."


def _over(slower: TpTrainingRow, faster: TpTrainingRow) -> str:
    """Returns the ratio of the slower's step time to the faster's, with its interval from the noise of both: a factor
    on either side, so that it stays positive. A single timed step has no noise."""
    ratio = slower.time_us / faster.time_us
    factor = 1 + gap_noise_us(slower.step.relative_to(slower.time_us), faster.step.relative_to(faster.time_us))
    return f"{ratio:.2f}x" if math.isnan(factor) else f"{ratio:.2f}x [{ratio / factor:.2f}, {ratio * factor:.2f}]"


def cautions(analysis: TpTrainingAnalysis) -> list[str]:
    """Returns the caveats of the answers, a sentence each."""
    bound = ", ".join(row.name for row in analysis.rows if row.launch_bound)
    launch_bound = [f"Launch-bound, so the times are the host's, not the GPU's: {bound}."] if bound else []
    return [*launch_bound, *recorded_warnings(analysis.points)]
