"""Tensor-parallel stacks: the fastest on each grid of ranks, and whether their losses agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from overlap_sweep.report.numbers import as_us
from overlap_sweep.results.gain import gain_over
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.provenance import different_environments, recorded_warnings
from overlap_sweep.results.records import KnobFinal, KnobRecord
from overlap_sweep.results.verdict import TYPICAL_SCATTER_OF_HOST, TYPICAL_SCATTER_OF_STEPS, pairs_among, ties
from overlap_sweep.study.words import launch_bound_caution
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.losses import losses_by_point
from overlap_sweep.workloads.tp_training.rows import Grid, StepCommunication, TpTrainingRow, rows_of

_USUAL = {"learning_rate": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 42}
"""Default options of tp_training, which a case does not name."""
MOST_NAMED = 3
"""Slower settings, or ties, in a sentence; the table has all."""


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
        config = point.config_as(Resolved)
        options = asdict(config.tp_training)
        return cls(
            model=config.model.name,
            num_layers=config.language_model["num_hidden_layers"],
            device=point.case.device,
            precision=config.precision,
            more="".join(f", {name}={options[name]:g}" for name, usual in _USUAL.items() if options[name] != usual),
            architecture=key_of(config.language_model)[:8],
            nodes=point.case.nodes,
            **{name: value for name, value in options.items() if name in cls._fields},
        )

    def __str__(self) -> str:
        micro_batches = f" x {self.gradient_accumulation_steps}" if self.gradient_accumulation_steps > 1 else ""
        sizes = f"sequences of {self.seq_length}, batch {self.batch_size}{micro_batches}, {self.precision}"
        where = f"on {self.device}{on_nodes(self.nodes)}"
        return f"{self.model}, {self.num_layers} layers, {sizes}{self.more} {where}"


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
        """Returns the rows that neither deviate nor diverge, after a search those of its final; the first is the
        answer."""
        may_win = [row for row in self.rows if row.may_win]
        of_final = [row for row in may_win if row.final]
        return sorted(of_final or may_win, key=lambda row: row.decisive.time_us)

    @property
    def best(self) -> TpTrainingRow | None:
        """Returns the fastest row; None if all deviate or diverge."""
        return next(iter(self.comparable), None)

    @property
    def ties(self) -> list[TpTrainingRow]:
        """Returns the best row and those not slower beyond the noise."""
        return ties(self.comparable, lambda row: row.decisive)


@dataclass(frozen=True)
class TpTrainingAnalysis:
    """The analysis of one case."""

    case: TpTrainingCase
    answers: list[GridAnswer]
    """Answers by number of ranks and grid."""
    of_points: list[TpTrainingRow]
    """One row for each point."""
    finals: list[KnobFinal]
    """The ends of searches over these points."""

    @property
    def rows(self) -> list[TpTrainingRow]:
        return [row for answer in self.answers for row in answer.rows]

    @property
    def points(self) -> list[Point]:
        return [point for row in self.rows for point in row.points]

    @property
    def best(self) -> TpTrainingRow | None:
        """Returns the row that won a search's final, else that with the highest throughput per GPU; None if all deviate
        or diverge."""
        won = [row for row in self.rows if row.may_win and row.final and row.final.place]
        if won and len(self.finals) == 1:
            return min(won, key=lambda row: row.decisive.time_us)
        return max((row for row in self.rows if row.may_win), key=lambda row: row.tokens_per_s_per_gpu, default=None)


def analyse_tp_training(
    points: Iterable[Point],
    communication: Mapping[Path, StepCommunication],
    searches: Mapping[Path, KnobRecord] = MappingProxyType({}),
) -> list[TpTrainingAnalysis]:
    """Returns an analysis of the `ok` points for each case. `communication`: by run directory; `searches`: by that of
    their points."""
    cases = group_points(points, "tp_training", TpTrainingCase.of)
    return [_analysis(case, *rows_of(cases[case], communication), searches) for case in sorted(cases)]


def _finals(rows: Iterable[TpTrainingRow], searches: Mapping[Path, KnobRecord]) -> list[KnobFinal]:
    """Returns the finals of these rows, which are given their times there."""
    row_of = {point.directory: row for row in rows for point in row.points}
    found = []
    for directory, record in searches.items():
        for final in record.finals:
            placed = [(row_of.get(directory / name), one) for one in final.finalists for name in one.points[:1]]
            for row, finalist in placed:
                if row is not None:
                    row.final = finalist
            found += [final] if any(row is not None for row, _ in placed) else []
    return found


def _analysis(
    case: TpTrainingCase,
    rows: Sequence[TpTrainingRow],
    of_points: list[TpTrainingRow],
    searches: Mapping[Path, KnobRecord],
) -> TpTrainingAnalysis:
    finals = _finals(rows, searches)
    losses = losses_by_point(rows)
    for row in (*rows, *of_points):
        compared = [losses[point.directory] for point in row.points if point.directory in losses]
        row.losses = max(compared, key=lambda one: bool(one.deviates), default=None)
    grids: dict[Grid, list[TpTrainingRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.grid.ranks, row.grid, row.time_us)):
        grids[row.grid].append(row)
    analysis = TpTrainingAnalysis(case, [GridAnswer(case, of_grid) for of_grid in grids.values()], of_points, finals)
    tied = [answer.ties for answer in analysis.answers if len(answer.rows) > 1]
    places = {row.name: "tie" if len(rows) > 1 else "fastest" for rows in tied for row in rows}
    chosen = {answer.best.name for answer in analysis.answers if answer.best}
    for row in (*rows, *of_points):
        row.chosen, row.place = row.name in chosen, places.get(row.name, "")
    return analysis


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
    lines = [*(_final_in_words(final, analysis) for final in analysis.finals), *map(_grid_in_words, analysis.answers)]
    if not analysis.finals and analysis.best and len(lines) > 1:
        lines.append(_best_of_grids(analysis.best, analysis))
    compared = [(row.name, row.losses) for row in analysis.rows if row.losses]
    deviating = [f"{name} deviates: {losses.deviates}." for name, losses in compared if losses.deviates]
    if compared and not deviating:
        largest = max(losses.largest for _, losses in compared)
        lines.append(f"The losses agree (largest relative difference {largest:.1g}).")
    return [*lines, *deviating]


def _best_of_grids(best: TpTrainingRow, analysis: TpTrainingAnalysis) -> str:
    """Returns the row with the highest throughput per GPU, compared with the best one of the other grids."""
    most = f"Most tokens/s per GPU: {best.name}, {best.tokens_per_s_per_gpu:,.0f}"
    others = [answer.best for answer in analysis.answers if answer.best and best not in answer.rows]
    if not others:
        return f"{most}."
    second = max(others, key=lambda row: row.tokens_per_s_per_gpu)
    # Times per token and GPU.
    ours, theirs = (row.decisive.relative_to(row.decisive.time_us * row.tokens_per_s_per_gpu) for row in (best, second))
    return f"{most}, {gain_over(theirs, ours, pairs_among([best, *others])).in_words(second.name)}."


def _final_in_words(final: KnobFinal, analysis: TpTrainingAnalysis) -> str:
    """Returns how the best settings of the searches compare, side by side."""
    rows = [row for row in analysis.rows if row.final in final.finalists and row.may_win]
    rows.sort(key=lambda row: row.decisive.time_us)
    first = [row for row in rows if row.final and row.final.place]
    placed = {(row.grid, row.impl) for row in first}
    slower = [row for row in rows if (row.grid, row.impl) not in placed]
    who = "no winner" if not first else f"{first[0].name} is the fastest"
    if len(first) > 1:
        more = len(first) - MOST_NAMED
        named = ", ".join(row.name for row in first[:MOST_NAMED])
        who = f"a tie of {named}{f' and {more} more' if more > 0 else ''}"
    pairs = pairs_among(rows)
    others = "".join(f"; {row.name} is {_compared_with(first[0], row, pairs)}" for row in slower[:MOST_NAMED] if first)
    return f"The best settings side by side, {final.rounds} rounds: {who}{others}."


def _grid_in_words(answer: GridAnswer) -> str:
    best, ties = answer.best, answer.ties
    if best is None:
        return f"{answer.grid}: no answer, all settings deviate or diverge."
    parts = [f"{best.setting} takes {as_us(best.time_us)} us per step, {best.tokens_per_s:,.0f} tokens/s"]
    pairs = pairs_among(answer.comparable)
    for row in answer.comparable[1 : MOST_NAMED + 1]:
        compared = _compared_with(best, row, pairs, best.setting)
        parts.append(f"{row.setting} is {compared}{' (tie)' if row in ties else ''}")
    return f"{answer.grid}: {'; '.join(parts)}."


def _compared_with(faster: TpTrainingRow, row: TpTrainingRow, pairs: int, name: str = "") -> str:
    return gain_over(faster.decisive, row.decisive, pairs).in_words(name or faster.name)


def cautions(analysis: TpTrainingAnalysis) -> list[str]:
    """Returns the caveats of the answers, a sentence each."""
    return [
        *launch_bound_caution([(row.name, row.launch_bound) for row in analysis.rows]),
        *_not_repeated(analysis),
        *recorded_warnings(analysis.points),
        *different_environments(analysis.points),
    ]


def _not_repeated(analysis: TpTrainingAnalysis) -> list[str]:
    """Returns that the noise between runs is only the typical one, which may be wrong for this machine."""
    if len(analysis.rows) == 1 or analysis.finals or any(len(row.points) > 1 for row in analysis.rows):
        return []
    limited, device = analysis.rows[0].launch_bound, analysis.points[0].config.runtime.device
    typical = TYPICAL_SCATTER_OF_HOST if limited else TYPICAL_SCATTER_OF_STEPS[device]
    return [
        f"Not repeated: the decision assumes that runs of one setting differ by {typical:.0%}, which is typical; sweep "
        "repetition=0,1,2 to measure it."
    ]
