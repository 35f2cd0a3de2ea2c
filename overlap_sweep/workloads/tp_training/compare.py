"""The tensor-parallel stacks of a dataset: their steps, pooled over all points of the same model, ranks and setting."""

from __future__ import annotations

from collections.abc import Iterable

from overlap_sweep.compare.measured import Key, Measured
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.tp_training.answer import (
    TpTrainingAnalysis,
    TpTrainingCase,
    TpTrainingRow,
    analyse_tp_training,
)

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
        for key, (_, row) in rows_by_key(points).items()
    ]


def rows_by_key(points: Iterable[Point]) -> dict[Key, tuple[TpTrainingCase, TpTrainingRow]]:
    return {
        _key(of_case, row): (of_case.case, row) for of_case in analyse_tp_training(points, {}) for row in of_case.rows
    }


def _key(analysis: TpTrainingAnalysis, row: TpTrainingRow) -> Key:
    """The implementation is the backend, so that two sweeps of one each are compared with each other."""
    case = analysis.case
    micro_batches = f" x {case.gradient_accumulation_steps}" if case.gradient_accumulation_steps > 1 else ""
    return Key(
        model=case.model,
        tokens=row.tokens_per_step,
        precision=row.points[0].config["precision"],
        backend=row.impl,
        device=case.device,
        tp_size=row.grid.tp_size,
        operator=f"DP={row.grid.dp_size}, {case.num_layers} layers, batch {case.batch_size}{micro_batches}",
        pass_name=STEP,
        setting=row.setting.removeprefix(row.impl).strip() or DEFAULTS,
    )
