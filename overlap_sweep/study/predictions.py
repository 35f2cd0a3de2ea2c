"""Gives settings their predictions: what a step was to take with each, from the traces of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from overlap_sweep.study import C, CaseAnalysis, R, Study

if TYPE_CHECKING:
    from overlap_sweep.predict.predictions import Prediction


def with_predictions(study: Study[C, R], analyses: Sequence[CaseAnalysis[C, R]]) -> list[CaseAnalysis[C, R]]:
    """Returns the analyses with predictions for the settings whose differences from the reference are predicted, where
    the reference has traces."""
    return [_predicted(study, analysis) for analysis in analyses]


def _predicted(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> CaseAnalysis[C, R]:
    side = study.side(analysis.reference)
    if side is None or not side.traces:
        return analysis
    changes = [_change(study, analysis, row) for row in analysis.rows]
    if not any(changes):
        return analysis
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.runs import predictions_of

    found = predictions_of(side.traces, [change for change in changes if change])
    return analysis.with_rows(
        [
            replace(row, prediction=found.get(change)) if change else row
            for row, change in zip(analysis.rows, changes, strict=True)
        ]
    )


def _change(study: Study[C, R], analysis: CaseAnalysis[C, R], row: R) -> str | None:
    """Returns the setting as a change of the reference; None if it is the reference, or has a part that is not
    predicted."""
    own, others = row.options, analysis.reference.options
    differing = {name: own.get(name) for name in {*own, *others} if own.get(name) != others.get(name)}
    changes = [
        study.change(name, value) if value is not None and others.get(name) is None else None
        for name, value in sorted(differing.items())
    ]
    known = [change for change in changes if change]
    return "+".join(known) if known and len(known) == len(changes) else None


def in_words(prediction: Prediction) -> str:
    """Returns such as `1.05x (1.01 to 1.09)`, or that it cannot be told."""
    if prediction.predicted_us is None or not prediction.low_us or not prediction.high_us:
        return prediction.status
    ratio, low, high = (
        prediction.step_us * prediction.work / time_us
        for time_us in (prediction.predicted_us, prediction.high_us, prediction.low_us)
    )
    return f"{ratio:.3f}x ({low:.2f} to {high:.2f})"
