"""Training steps of a language model by tensor-parallel stacks: which is fastest, and whether they compute the same."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from overlap_sweep.report.numbers import as_ms
from overlap_sweep.results.estimate import Interval, gap_noise_us
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import different_environments
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep
from overlap_sweep.workloads.tp_training.rows import (
    Comparison,
    Difference,
    Grid,
    StepCommunication,
    TpTrainingRow,
    rows_of,
)

K = TypeVar("K")

_USUAL = {"learning_rate": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 42}
"""Of tp_training: what a case is not told with."""
FEW_STEPS = 5
LONG_WAIT = 0.05
"""Of a step: what is worth a sentence."""


def tolerance_of(precision: str) -> tuple[float, float]:
    """Returns the relative differences of losses and of gradients' norms that rounding explains: bf16 and fp16 keep 8
    and 11 bits, and every implementation adds in another order."""
    return (1e-4, 1e-3) if precision == "fp32" else (1e-2, 5e-2)


def compare(
    votes: Mapping[str, Mapping[K, Sequence[TpTrainingStep]]], tolerance: tuple[float, float]
) -> dict[K, Comparison]:
    """Returns by run how it compares. `votes`: by who computed, at least two, the steps of each of their runs, warm-up
    steps among them. Each is held against the median of all, so that one that is wrong among three or more tells
    itself; of two each is held against the other."""
    assert len(votes) > 1
    steps = {who: {run: {one.step: one for one in steps} for run, steps in runs.items()} for who, runs in votes.items()}
    numbers = sorted(set.intersection(*(set(of_run) for runs in steps.values() for of_run in runs.values())))
    found: dict[K, Comparison] = {}
    for who, runs in steps.items():
        others = [other for name, other in steps.items() if len(steps) > 2 or name != who]
        references = {
            (field, number): _median(_median(getattr(one[number], field) for one in other.values()) for other in others)
            for field in _WORDS
            for number in numbers
        }
        for run, own in runs.items():
            differences = [
                Difference(_WORDS[field], number, _relative(getattr(own[number], field), reference))
                for (field, number), reference in references.items()
            ]
            losses = [one for one in differences if one.what == "loss" and own[one.step].loss is not None]
            most = dict(zip(_WORDS.values(), tolerance, strict=True))
            beyond = [one for one in differences if one.relative > most[one.what]]
            largest = max(losses, key=lambda one: one.relative, default=None)
            found[run] = Comparison(largest, min(beyond, key=lambda one: one.step, default=None))
    return found


_WORDS = {"loss": "loss", "grad_norm": "gradient norm"}


def _median(values: Iterable[float | None]) -> float | None:
    """Returns the median of those that are numbers; None where most are not."""
    of_all = list(values)
    known = [value for value in of_all if value is not None]
    return statistics.median(known) if 2 * len(known) >= len(of_all) else None


def _relative(value: float | None, reference: float | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else math.inf
    return abs(value - reference) / abs(reference) if reference else math.inf if value else 0.0


class TpTrainingCase(NamedTuple):
    """What must be equal for implementations, and sizes of tensor and data parallelism, to be compared."""

    model: str
    num_layers: int
    device: str
    dtype: str
    seq_length: int
    batch_size: int
    gradient_accumulation_steps: int
    num_training_steps: int
    warmup_steps: int
    more: str
    """The other options that are not at their defaults, in words."""
    architecture: str
    """A digest of the model's whole config."""

    @classmethod
    def of(cls, point: Point) -> TpTrainingCase:
        """Returns that of a point that is ok."""
        config, options = point.config, point.config["tp_training"]
        return cls(
            model=config["model"]["name"],
            num_layers=config["language_model"]["num_hidden_layers"],
            device=point.case.device,
            more=", ".join(f"{name}={options[name]:g}" for name, usual in _USUAL.items() if options[name] != usual),
            architecture=key_of(config["language_model"])[:8],
            **{name: value for name, value in options.items() if name in cls._fields},
        )

    def __str__(self) -> str:
        micro_batches = f", {self.gradient_accumulation_steps} micro batches"
        sizes = f"batch {self.batch_size}{micro_batches if self.gradient_accumulation_steps > 1 else ''}, {self.dtype}"
        return f"{self.brief}, {sizes}{f', {self.more}' if self.more else ''} on {self.device}"

    @property
    def brief(self) -> str:
        return f"{self.model}, {self.num_layers} layers, sequences of {self.seq_length}"


@dataclass(frozen=True)
class GridAnswer:
    """The implementations on one grid of ranks, at least one."""

    analysis: TpTrainingAnalysis
    """The case that it belongs to."""
    rows: list[TpTrainingRow]
    """From fast to slow."""

    @property
    def grid(self) -> Grid:
        return self.rows[0].grid

    @property
    def comparable(self) -> list[TpTrainingRow]:
        return [row for row in self.rows if row.may_win]

    @property
    def deviating(self) -> str:
        """The settings that compute something else."""
        return ", ".join(row.setting for row in self.rows if row.deviates)

    @property
    def best(self) -> TpTrainingRow | None:
        """None where none computes what it should."""
        return next(iter(self.comparable), None)

    @property
    def ties(self) -> list[TpTrainingRow]:
        """The best, and what cannot be told from it."""
        slower = self.slower
        return [row for row in self.comparable if row not in slower]

    @property
    def slower(self) -> list[TpTrainingRow]:
        """What is slower than the best beyond the noise: any of them might have come out best by chance, so that all
        pairs count."""
        best, rows = self.best, self.comparable
        pairs = max(len(rows) * (len(rows) - 1) // 2, 1)
        return [row for row in rows if best and row.time_us > best.time_us and row.step.differs_from(best.step, pairs)]


@dataclass(frozen=True)
class TpTrainingAnalysis:
    """One case."""

    case: TpTrainingCase
    rows: list[TpTrainingRow]
    """By number of ranks and grid, then from fast to slow."""
    of_points: list[TpTrainingRow]
    """The same of every point by itself."""

    @property
    def points(self) -> list[Point]:
        return [point for row in self.rows for point in row.points]

    @property
    def answers(self) -> list[GridAnswer]:
        grids = dict.fromkeys(row.grid for row in self.rows)
        return [GridAnswer(self, [row for row in self.rows if row.grid == grid]) for grid in grids]

    @property
    def best(self) -> TpTrainingRow | None:
        """Returns the best of all by what one GPU does; None where none computes what it should."""
        return max((row for row in self.rows if row.may_win), key=lambda row: row.tokens_per_s_per_gpu, default=None)


def ratio_interval(slower: TpTrainingRow, faster: TpTrainingRow) -> tuple[float, Interval]:
    """Returns how many times as long a step of the slower takes, and between what that lies: by the noise of both,
    relative to them and in quadrature. A factor to both sides: a ratio is positive, however large the noise. NaN where
    there is a single timed step."""
    ratio = slower.time_us / faster.time_us
    factor = 1 + gap_noise_us(slower.step.relative_to(slower.time_us), faster.step.relative_to(faster.time_us))
    return ratio, Interval(ratio / factor, ratio * factor)


def analyse_tp_training(
    points: Iterable[Point], communication: Mapping[Path, StepCommunication]
) -> list[TpTrainingAnalysis]:
    """Returns the `ok` points by case; `communication` by run directory."""
    cases: dict[TpTrainingCase, list[Point]] = defaultdict(list)
    for point in points:
        if point.workload == "tp_training" and point.status == "ok":
            cases[TpTrainingCase.of(point)].append(point)
    return [_analysis(case, *rows_of(cases[case], communication)) for case in sorted(cases)]


def _analysis(
    case: TpTrainingCase, rows: Sequence[TpTrainingRow], of_points: Sequence[TpTrainingRow]
) -> TpTrainingAnalysis:
    losses = _losses(rows)
    for row in (*rows, *of_points):
        compared = [losses[point.directory] for point in row.points if point.directory in losses]
        row.losses = next((one for one in compared if one.deviates), compared[0] if compared else None)
    analysis = TpTrainingAnalysis(case, *map(_in_order, (rows, of_points)))
    answers, best = analysis.answers, analysis.best
    chosen = {answer.best.name for answer in answers if answer.best}
    places: dict[str, tuple[str, ...]] = defaultdict(tuple)
    if best and len(answers) > 1:
        places[best.name] = ("best of all",)
    for answer in answers:
        for row in answer.ties if len(answer.rows) > 1 else ():
            places[row.name] += ("fastest" if len(answer.ties) == 1 else "tie",)
    for row in (*rows, *of_points):
        row.chosen, row.place = row.name in chosen, places[row.name]
    return analysis


def _losses(rows: Iterable[TpTrainingRow]) -> dict[Path, Comparison]:
    """Returns by run directory how losses compare, of those that others were given the same data as. Implementations
    are held against each other; where there is one only, its settings are."""
    of_sizes: dict[int, list[TpTrainingRow]] = defaultdict(list)
    for row in rows:
        of_sizes[row.grid.dp_size].append(row)
    found: dict[Path, Comparison] = {}
    for of_size in of_sizes.values():
        several = len({row.impl for row in of_size}) > 1
        votes: dict[str, dict[Path, list[TpTrainingStep]]] = defaultdict(dict)
        for row in of_size:
            steps = {point.directory: point.measured_as(TpTrainingRun).steps for point in row.points}
            votes[row.impl if several else row.name] |= steps
        if len(votes) > 1:
            found |= compare(votes, tolerance_of(of_size[0].points[0].config["precision"]))
    return found


def _in_order(rows: Iterable[TpTrainingRow]) -> list[TpTrainingRow]:
    return sorted(rows, key=lambda row: (row.grid.ranks, row.grid, row.time_us))


def in_words(analysis: TpTrainingAnalysis) -> list[str]:
    """Returns the answers, a sentence each: of each grid, of all, and whether losses agree."""
    lines = [_grid_in_words(answer) for answer in analysis.answers]
    if len(lines) > 1:
        lines.append(_best_in_words(analysis))
    return [*lines, *losses_in_words(analysis)]


def _grid_in_words(answer: GridAnswer) -> str:
    best, others, ties = answer.best, answer.comparable[1:], answer.ties
    if best is None:
        why = "computes what the others do" if answer.deviating else "has a loss that is a number"
        return f"{answer.grid}: no answer, as none {why}"
    time = f"takes {as_ms(best.time_us)} ms a step, {best.tokens_per_s:,.0f} tokens/s"
    left_out = f"; not compared, as it computes something else: {answer.deviating}" if answer.deviating else ""
    if not others:
        nothing = "" if left_out else ", nothing to compare it with"
        return f"{answer.grid}: {best.setting} {time}{nothing}{left_out}"
    ending = f"; not repeated{left_out}" if len(best.points) == 1 else left_out
    if len(ties) > 1:
        names = " and ".join([", ".join(row.setting for row in ties[:-1]), ties[-1].setting])
        said = f"{names} differ by less than the noise ({_over(ties[-1], best)} between them)"
        if answer.slower:
            said += f"; {answer.slower[0].setting} takes {_over(answer.slower[0], best)} as long"
        return f"{answer.grid}: {said}; {best.setting} {time}{ending}"
    said = f"{best.setting} is fastest, {_over(others[0], best)} as fast as {others[0].setting}"
    if len(others) > 1:
        said += f", {_over(others[-1], best)} as fast as {others[-1].setting}, the slowest"
    return f"{answer.grid}: {said}; it {time}{ending}"


def _best_in_words(analysis: TpTrainingAnalysis) -> str:
    best = analysis.best
    if best is None:
        return "most tokens/s per GPU: no answer"
    of_mfu = f", {best.mfu:.1%} of its peak" if best.mfu is not None else ""
    return f"most tokens/s per GPU: {best.name}, {best.tokens_per_s_per_gpu:,.0f}{of_mfu}"


def losses_in_words(analysis: TpTrainingAnalysis) -> list[str]:
    """Returns whether losses agree, a sentence for each data-parallel size on which there is something to compare."""
    sizes = sorted({row.grid.dp_size for row in analysis.rows if row.losses})
    several = len({row.grid.dp_size for row in analysis.rows}) > 1
    return [
        f"DP={size}: {line}" if several else line
        for size in sizes
        for line in _size_in_words([row for row in analysis.rows if row.grid.dp_size == size])
    ]


def _size_in_words(rows: Sequence[TpTrainingRow]) -> Iterator[str]:
    """Yields that the losses of the same data agree, or who deviates where first."""
    compared = [(row, row.losses) for row in rows if row.losses]
    deviating = [(row, losses.deviates) for row, losses in compared if losses.deviates]
    if not deviating:
        differences = [losses.largest for _, losses in compared if losses.largest]
        largest = max(differences, key=lambda one: one.relative, default=None)
        said = ""
        if largest:
            at = f"largest difference {largest.relative:.1g} at step {largest.step}"
            said = f" ({at})" if largest.relative else " (to the last digit)"
        yield f"the losses agree{said}"
        return
    if len(deviating) == len(rows):
        names, first = ", ".join(row.name for row in rows), min(found.step for _, found in deviating)
        yield f"losses or gradients differ from step {first} on, and it cannot be told who is right: {names}"
        return
    for row, found in deviating:
        if math.isinf(found.relative):
            said = f"at step {found.step} either its {found.what} or that of the others is no number"
        else:
            said = f"its {found.what} deviates from step {found.step} on, there by {found.relative:.1g}"
        yield f"{row.name} computes something else: {said}"


def _over(slower: TpTrainingRow, faster: TpTrainingRow) -> str:
    ratio, interval = ratio_interval(slower, faster)
    between = "" if math.isnan(interval.low) else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{ratio:.2f}x{between}"


def cautions(analysis: TpTrainingAnalysis) -> list[str]:
    """Returns what to know before believing the answers, a sentence each."""
    rows = analysis.rows

    def waits(row: TpTrainingRow) -> bool:
        found = row.communication
        return found is not None and found.waiting_us > max(found.total_us, LONG_WAIT * row.time_us)

    said = {
        "The last loss is no number, so it cannot be the fastest": [row for row in rows if row.diverges],
        "Launch-bound: the GPU waits for the host there, so the time is that of the host": [
            row for row in rows if row.launch_bound
        ],
        f"Fewer than {FEW_STEPS} timed steps, so the noise is hardly known": [
            row for row in rows if row.step.repeats < FEW_STEPS
        ],
        "In the profiled steps one rank waits for another, longer than it takes to communicate (comm_wait_us), and "
        "comm and exposed are without that": [row for row in rows if waits(row)],
    }
    lines = [f"{what}: {', '.join(row.name for row in which)}." for what, which in said.items() if which]
    told: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for warning in dict.fromkeys(w for point in row.points if point.result for w in point.result.warnings):
            told[warning].append(row.name)
    lines += (f"{', '.join(names)}: {warning}" for warning, names in told.items())
    return [*lines, *different_environments(analysis.points)]
