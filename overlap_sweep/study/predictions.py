"""Gives settings their predictions: what a step was to take with each, from the traces of the reference; and says how
right they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.report.numbers import counted
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

    found = {one.change: one for one in predictions_of(side.traces, list(dict.fromkeys(filter(None, changes))))}
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


def scored(analysis: CaseAnalysis[C, R]) -> Iterator[str]:
    """Yields how right the predictions of the settings were, if there are any; bounds are none."""
    told = [(row, row.prediction) for row in analysis.rows if row.prediction and row.prediction.status == "predicted"]
    errors, within = [], 0
    for row, one in told:
        assert one.predicted_us
        assert one.high_us
        measured_us = one.step_us / row.over_reference
        errors.append(abs(one.predicted_us / measured_us - 1))
        within += (one.low_us or 0.0) <= measured_us <= one.high_us
    if told:
        yield (
            f"Of {counted(len(told), 'prediction')} from the reference's traces {within} had the measured speedup in "
            f"the interval; error {median(errors):.1%}{' in the median' if len(told) > 1 else ''}."
        )


def in_words(prediction: Prediction) -> str:
    """Returns such as `1.05x (1.01 to 1.09)`, or that it cannot be told."""
    if prediction.predicted_us is None or not prediction.low_us or not prediction.high_us:
        return prediction.status
    ratio, low, high = (
        prediction.step_us * prediction.work / time_us
        for time_us in (prediction.predicted_us, prediction.high_us, prediction.low_us)
    )
    return f"{ratio:.3f}x ({low:.2f} to {high:.2f})"
