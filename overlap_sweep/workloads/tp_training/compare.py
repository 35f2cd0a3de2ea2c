"""Tensor-parallel stacks of two datasets: how long their steps take, and whether they compute the same."""

from __future__ import annotations

from collections.abc import Iterable
from math import isinf
from typing import TYPE_CHECKING

from overlap_sweep.compare.measured import Key, Measured
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.tp_training.answer import (
    TpTrainingAnalysis,
    TpTrainingCase,
    analyse_tp_training,
    compare,
    tolerance_of,
)
from overlap_sweep.workloads.tp_training.result import TpTrainingRun
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow

if TYPE_CHECKING:
    from overlap_sweep.compare.datasets import Dataset
    from overlap_sweep.compare.matching import Match

STEP = "step"
"""The pass of a training run."""
DEFAULTS = "defaults"
"""The setting of which every option is at its default."""


def measured_tp_training(points: Iterable[Point]) -> list[Measured]:
    """With those that compute something else than the others, which their own report tells: here is their time."""
    return [
        Measured(
            key=key,
            time=row.step,
            none_us=None,
            floor_us=None,
            points=tuple(point.name for point in row.points),
        )
        for key, (_, row) in _rows_by_key(points).items()
    ]


def deviations(datasets: Iterable[Dataset], matches: Iterable[Match]) -> list[str]:
    """A sentence for each match that was given the same data and whose losses or gradients are not the same."""
    rows = {dataset.label: _rows_by_key(dataset.points) for dataset in datasets}
    lines = []
    for match in matches:
        our_key, their_key = (key._replace(swept="") for key in (match.ours.key, match.theirs.key))
        ours, theirs = rows[match.dataset].get(our_key), rows[match.reference].get(their_key)
        if ours and theirs and _data(ours[0]) == _data(theirs[0]):
            lines += _deviation(match, ours[1], theirs[1])
    return lines


def _rows_by_key(points: Iterable[Point]) -> dict[Key, tuple[TpTrainingCase, TpTrainingRow]]:
    return {
        _key(of_case, row): (of_case.case, row) for of_case in analyse_tp_training(points, {}) for row in of_case.rows
    }


def _key(analysis: TpTrainingAnalysis, row: TpTrainingRow) -> Key:
    """The implementation is the backend, so that two sweeps of one each are compared with each other."""
    case = analysis.case
    micro_batches = f" x {case.gradient_accumulation_steps}" if case.gradient_accumulation_steps > 1 else ""
    return Key(
        model=case.model,
        tokens=row.run.tokens_per_step,
        precision=row.points[0].config["precision"],
        backend=row.impl,
        device=case.device,
        tp_size=row.grid.tp_size,
        operator=f"DP={row.grid.dp_size}, {case.num_layers} layers, batch {case.batch_size}{micro_batches}",
        pass_name=STEP,
        setting=row.setting.removeprefix(row.impl).strip() or DEFAULTS,
    )


def _data(case: TpTrainingCase) -> TpTrainingCase:
    """Without what losses don't depend on, up to rounding."""
    return case._replace(model="", device="", dtype="", num_training_steps=0, warmup_steps=0)


def _deviation(match: Match, ours: TpTrainingRow, theirs: TpTrainingRow) -> list[str]:
    votes = {
        label: {(label, point.directory): point.measured_as(TpTrainingRun).steps for point in row.points}
        for label, row in ((match.dataset, ours), (match.reference, theirs))
    }
    tolerance = max(tolerance_of(row.points[0].config["precision"]) for row in (ours, theirs))
    compared = compare(votes, tolerance)
    found = next((compared[run].deviates for run in votes[match.dataset] if compared[run].deviates), None)
    if found is None:
        return []
    by = "one of them is no number" if isinf(found.relative) else f"there by {found.relative:.1g}"
    name = ours.name if ours.name == theirs.name else f"{ours.name} against {theirs.name}"
    return [
        f"{match.dataset} does not compute what {match.reference} does: the {found.what} of {name} deviates from step "
        f"{found.step} on, {by}"
    ]
