"""What changes of the reference would gain, on the page: a table, and a step as it was recorded above the same step as
it is replayed with the change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from overlap_sweep.report.charts import Gantt, Lane, Span
from overlap_sweep.report.iterations import LONGEST_NAME
from overlap_sweep.report.numbers import PASS_WORDS, as_us
from overlap_sweep.report.predictions import PREDICTIONS
from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import Listing, Row, RowText
from overlap_sweep.study import C, CaseAnalysis, R, Study
from overlap_sweep.study.predictions import in_words
from overlap_sweep.trace.kernel_classes import function_name

if TYPE_CHECKING:
    from overlap_sweep.predict.picture import Bar, Picture, Step
    from overlap_sweep.predict.predictions import Prediction

COLUMNS = {"change": 0, "predicted_us": 0, "low_us": 3, "high_us": 2, "gain_us": 0}
"""Columns of the table, and in which order a narrow page drops them; the sentences below a row say the rest."""

LEAST_NAMED = 0.04
"""Part of the passes' time from which on a pass has room for its name."""


def exhibit(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Exhibit:
    """Returns the exhibit of what changes of the reference would gain; only the page reads the traces."""
    return Exhibit(
        name="predictions",
        heading="What a change would gain",
        brief="Predictions",
        drawn="Predicted by replaying the recorded steps with something changed; the profiler slows them down, so "
        "compare shares. In charts a step of the slowest rank is above as it was recorded, below as it is replayed. "
        "Blue: GEMMs; green: other computation; orange: communication, grey until its last rank has come; exposed: "
        "communication with no concurrent computation.",
        parts=lambda: list(_parts(study, analysis)),
    )


def _parts(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Iterator[Exhibit]:
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.named import mends
    from overlap_sweep.predict.runs import drawn

    side = study.side(analysis.reference)
    asked = dict.fromkeys(row.prediction.change for row in analysis.rows if row.prediction)
    found = drawn(side.traces, list(asked)) if side and side.traces else None
    if not side or not found:
        return
    # If the profiler alone made the host late, sparing it gains nothing.
    shown = [one for one in found.predictions if not (side.host_was_ahead and mends(one.change, "host_bound"))]
    if not shown:
        return
    yield Exhibit(listing=_listing(analysis.reference.setting, shown))
    told = {one.change: one for one in shown}
    pictures = [one for one in found.pictures if one.change in told]
    for number, picture in enumerate(pictures, start=1):
        yield Exhibit(
            chart=partial(_gantt, picture, found.ranks[picture.rank]),
            name=str(number),
            folded=f"{picture.change}: {in_words(told[picture.change])}",
            drawn=_caption(told[picture.change], picture),
        )


def _listing(reference: str, predictions: list[Prediction]) -> Listing[Row]:
    heading = RowText(reference, [f"A recorded step takes {as_us(predictions[0].step_us)} us."], [])

    def text(row: Row) -> RowText:
        critical = [f"Then it consists of {row['critical']}."] if row["critical"] else []
        return replace(heading, sentences=[*critical, *filter(None, [row["reason"]])])

    columns = [
        replace(column, dropped=COLUMNS[column.name]) for column in PREDICTIONS.columns if column.name in COLUMNS
    ]
    rows = [asdict(one) for one in predictions]
    return Listing(replace(PREDICTIONS, columns=tuple(columns)), rows, text=text)


def _caption(one: Prediction, picture: Picture) -> str:
    low_us, predicted_us, high_us = (as_us(time_us or 0.0) for time_us in (one.low_us, one.predicted_us, one.high_us))
    merged = f" Kernels less than {as_us(picture.merged_us)} us apart may be one bar." if picture.merged_us else ""
    return (
        f"A step of {as_us(one.step_us)} us is predicted to take {predicted_us} us with {one.change} (from {low_us} "
        f"to {high_us}). It then consists of {one.critical}.{merged}"
    )


def _gantt(picture: Picture, rank: int | None) -> Gantt:
    recorded = f"recorded, step {picture.step}{'' if rank is None else f' of rank {rank}'}"
    sides = {recorded: picture.before, "with the change": picture.after}
    lanes = [lane for name, step in sides.items() for lane in _lanes(name, step)]
    return Gantt(f"With {picture.change}", "us", lanes)


def _lanes(title: str, step: Step) -> Iterator[Lane]:
    end_us = max(end for _, _, end in step.passes) if step.passes else 0.0
    passes = [
        Span(start, end, "faint", PASS_WORDS.get(name, "") if end - start > LEAST_NAMED * end_us else "")
        for name, start, end in step.passes
    ]
    yield Lane(title, passes, bold=True)
    for lane in step.lanes:
        yield Lane(lane.name, [_drawn(bar, lane.name) for bar in lane.bars])
    exposed = [_drawn(bar, "exposed communication") for bar in step.exposed]
    yield Lane(f"exposed, {as_us(step.exposed_us)} us", exposed)


def _drawn(bar: Bar, lane: str) -> Span:
    start, end = round(bar.start_us, 1), round(bar.end_us, 1)
    runs = (function_name(bar.name) or bar.name or lane)[:LONGEST_NAME]
    details = {
        "runs": f"{runs} and {bar.count - 1} more" if bar.count > 1 else runs,
        "takes": f"{as_us(end - start)} us",
        "from": f"{as_us(start)} to {as_us(end)} us",
    }
    return Span(start, end, bar.shown, details=details)
