"""The tools: each calls what the command of its name calls, and puts what that found into typed answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from overlap_sweep import workloads
from overlap_sweep.commands import compare as comparing
from overlap_sweep.commands import frames
from overlap_sweep.commands import levers as listing
from overlap_sweep.commands import predict as predicting
from overlap_sweep.commands import query as querying
from overlap_sweep.commands.agents import answers
from overlap_sweep.commands.agents.access import HELD, Access, held
from overlap_sweep.commands.agents.answers import at_most, cells, figure, name, rounded, sentence
from overlap_sweep.commands.output import plain
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.diagnosis.findings import exposed_by_rank
from overlap_sweep.diagnosis.runs import Run
from overlap_sweep.errors import UserError
from overlap_sweep.levers import levers as known_levers
from overlap_sweep.predict.predictions import Prediction
from overlap_sweep.predict.runs import Mends, advice_of
from overlap_sweep.report.diagnosis import headline, lost, warnings_of
from overlap_sweep.report.predictions import PREDICTIONS
from overlap_sweep.report.section import Answer
from overlap_sweep.report.table import Column, Row
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.run_directory import find_points

_KNOWN: tuple[answers.Status, ...] = ("predicted", "bound")
_LEVER_TEXTS = [one.name for one in listing.TABLE.written if one.kind == "text" and one.name != "status"]

LONG = 80
"""Characters of a note from which on it is said once."""

TOP, LISTED, MOST = 5, 100, 1000
"""Rows of an answer, of a list of what there is, and of an answer that is to be full."""

DERIVED = {"difference", "difference_us", "by"}
"""Columns of comparisons that follow from others, or from the call."""

Paths = Annotated[list[str], Field(min_length=1, description="Traces of all ranks of runs, or directories of runs.")]
Limit = Annotated[int, Field(ge=1, le=MOST, description="Most rows; how many more there are is said.")]
Full = Annotated[bool, Field(description="All rows and columns instead of the most important ones.")]


def diagnose(access: Access, paths: Paths, limit: Limit = TOP, full: Full = False) -> answers.DiagnoseAnswer:
    """Say why communication is exposed in profiler traces, and what to try. The first tool for a recorded training.

    What a cause may gain is a bound; ask predict what a change would gain. step_us and exposed_comm_us are of the rank
    that loses most, mean_exposed_share is the mean of all ranks.
    """
    runs, problems, warnings = frames.read_runs_of_nodes([access.path(path) for path in paths], None)
    found = [run for run in runs if run.found]
    if not found:
        raise UserError(" ".join(problems) or frames.NOTHING_GIVEN)
    _, _, mends = frames.diagnosed_rows(runs, "finding")
    most = MOST if full else limit
    return answers.DiagnoseAnswer(
        runs=[_diagnosed(run, mends[run.name], most) for run in found[:most]],
        more_runs=max(len(found) - most, 0),
        notes=[sentence(note) for note in (*problems, *warnings, *warnings_of(runs))],
    )


def _diagnosed(run: Run, mends: Mends, most: int) -> answers.DiagnosedRun:
    assert run.found
    diagnosis, worst = run.found.diagnosis, lost(run.found.diagnosis)
    steps = [step for step in diagnosis.steps if worst and step.rank == worst.rank and not step.startup]
    findings: list[answers.CauseAnswer] = []
    causes = [one.cause for one in diagnosis.findings]
    # Of every cause the first, then others: what the summary names is there.
    chosen = sorted(range(len(causes)), key=lambda place: causes[place] in causes[:place])[:most]
    for place in sorted(chosen):
        one, mend = diagnosis.findings[place], mends.of_findings[place]
        is_first = mend is not None and mend.change not in [found.change for found in findings]
        where = ", ".join(filter(None, map(name, (one.collective, one.process_group, one.pass_, one.where))))
        findings.append(
            answers.CauseAnswer(
                cause=one.cause,
                status="cannot tell" if one.cannot_tell else "measured",
                may_gain_us=at_most(one.lost_us),
                share_of_step=round(one.share, 4),
                rank=one.rank,
                where=where,
                evidence=sentence(one.evidence),
                advice=sentence(advice_of(one, mend)),
                change=mend.change if mend else "",
                predicted_gain_us=_gain(mend) if mend and is_first else None,
            )
        )
    return answers.DiagnosedRun(
        run=name(run.name),
        ranks_recorded=diagnosis.ranks,
        ranks_of_run=diagnosis.world_size,
        device=name(diagnosis.device),
        step_us=_median([step.step_us for step in steps]),
        exposed_comm_us=_median([step.exposed_comm_us for step in steps]),
        mean_exposed_share=rounded(exposed_by_rank(diagnosis.steps)[1]),
        summary=sentence(headline(diagnosis)),
        best_change=mends.best.change if mends.best else "",
        best_gain_us=_gain(mends.best) if mends.best else None,
        findings=findings,
        more_findings=max(len(diagnosis.findings) - most, 0),
    )


def _median(samples_us: Sequence[float]) -> answers.Figure:
    if not samples_us:
        return figure(None, status="cannot tell")
    return _around(estimate(samples_us).time_us, samples_us)


def _around(time_us: float, samples_us: Sequence[float]) -> answers.Figure:
    """Returns a median or mean of the samples with their noise."""
    noise_us = estimate(samples_us).noise_us
    return figure(time_us, max(time_us - noise_us, 0.0), time_us + noise_us)


def _gain(one: Prediction) -> answers.Figure:
    return figure(one.gain_us, one.gain_low_us, one.gain_high_us, one.status)


def predict(
    access: Access,
    paths: Paths,
    changes: Annotated[
        list[str] | None,
        Field(description="NAME=VALUE each, several joined by + are one; none: all that apply."),
    ] = None,
    against: Annotated[str | None, Field(description="A recording with the change made, to compare with.")] = None,
    limit: Limit = TOP,
    full: Full = False,
) -> answers.PredictAnswer:
    """Predict what changes would gain, from one recording. A gain whose interval includes 0 may be none.

    Without changes, those none of whose values gains or costs 0.1 % of the step are left out.
    """
    if against is not None and not changes:
        raise UserError("against is a recording with a change made; name that in changes.")
    other = None if against is None else access.path(against)
    rows, names, problems = predicting.predicted_rows([access.path(path) for path in paths], changes or [], other)
    if not names:
        raise UserError(" ".join(problems) or frames.NOTHING_GIVEN)
    most = MOST if full or changes else limit
    return answers.PredictAnswer(
        changes=[_change(row, is_compared=other is not None) for row in rows[:most]],
        more_changes=max(len(rows) - most, 0),
        notes=list(map(sentence, problems)),
    )


def _change(row: Row, *, is_compared: bool) -> answers.ChangeAnswer:
    own = Prediction(**{field: row[field] for field in Prediction.__struct_fields__})
    compared = [one for one in PREDICTIONS.columns if one.name in ("measured_us", "error_share", "within", "wrong")]
    return answers.ChangeAnswer(
        run=name(row["run"]),
        change=own.change,
        status=own.status,
        step_us=_around(own.step_us, own.steps_us),
        predicted_us=figure(own.predicted_us, own.low_us, own.high_us, own.status),
        gain_us=_gain(own),
        then_critical=sentence(own.critical),
        note=sentence(own.reason),
        compared=cells(row, compared) if is_compared else None,
    )


def levers(
    access: Access,
    names: Annotated[
        list[str] | None,
        Field(description="Levers, families such as ddp, or changes as diagnose and predict name them; none: all."),
    ] = None,
    applying_to: Annotated[
        str | None, Field(description="A trace, the directory of a run or sweep, or a whole training command.")
    ] = None,
    limit: Limit = 2 * TOP,
    full: Full = False,
) -> answers.LeversAnswer:
    """List what can be changed in a training without changing its script, and what to write to change it.

    Give the recording in applying_to: what is written then has the value that is predicted to gain most.
    """
    if applying_to and access.is_there(applying_to):
        applying_to = str(access.path(applying_to))
    rows, target, meant = listing.lever_rows(names or [], applying_to)
    if meant.unknown and not (rows or meant.notes):
        raise UserError(" ".join(meant.unknown))
    rows.sort(key=lambda row: listing.order_of(row, target))
    apply = {row["lever"] for row in rows if not str(row["applies"]).startswith("no")}
    is_traced = bool(target and target.training.libraries is not None and not names)
    fitting = {row["lever"] for row in rows if row["mends"] or (row["gain_us"] and row["write"]) or not is_traced}
    first = [row for row in rows if row["lever"] in (apply & fitting) - meant.whole][:limit]
    shown = rows if full else [row for row in rows if row["lever"] in meant.whole] + first
    left = {row["lever"] for row in rows} - {row["lever"] for row in shown}
    statuses = {row["status"] for row in shown}
    return answers.LeversAnswer(
        about=list(map(sentence, (*meant.unknown, *meant.notes, *(target.about if target else [])))),
        gains=next((status for status in _KNOWN if status in statuses), "cannot tell"),
        levers=_lever_cells(shown),
        more_levers=len(left & apply),
        do_not_apply=len(left - apply),
    )


def _lever_cells(rows: Sequence[Row]) -> list[dict[str, answers.Cell]]:
    """Returns the rows' cells that have something to say; of equal long notes the first."""
    found: list[dict[str, answers.Cell]] = []
    known = known_levers()
    lever_of: dict[str, str] = {}
    for row in rows:
        # Texts are ours, and `write` may have several lines.
        cells: dict[str, answers.Cell] = {key: str(row[key]) for key in _LEVER_TEXTS if row[key] not in (None, "")}
        own = known[str(row["lever"])].note
        if len(own) >= LONG and (first := lever_of.setdefault(own, row["lever"])) != row["lever"]:
            cells["note"] = f"{row['note'].removesuffix(own)}As of {first}."
        if row["gain_us"] is not None:
            cells["gain_us"] = figure(row["gain_us"], row["gain_low_us"], row["gain_high_us"], row["status"])
        found.append(cells)
    return found


def query(
    access: Access,
    directory: Annotated[
        str | None, Field(description="Directory of a date, a sweep or a point; none: lists what there is.")
    ] = None,
    expression: Annotated[
        str | None, Field(description="Condition over columns, such as: num_sm > 8 and tp_size == 8")
    ] = None,
    table: Annotated[
        str | None, Field(description="points, layers, kernels, training, copies, tp_training, jobs or predictions.")
    ] = None,
    columns: Annotated[list[str] | None, Field(description="Columns to return; none: the main ones.")] = None,
    sort: Annotated[str | None, Field(description="Columns with commas between; - for descending.")] = None,
    limit: Limit = TOP,
    full: Full = False,
) -> answers.RowsAnswer:
    """Return measured points that match a condition, and what the analysis of the directory concludes. Without a
    directory, or of one without points: the recordings and sweeps that are there.

    Which setting wins is said by the conclusions, which know what is a tie; never by the order of rows.
    """
    if directory is None:
        return _listed([row for root in access.roots for row in held(root)], [])
    root = access.path(directory)
    if root.is_dir() and not find_points(root) and (there := [*held(root)]):
        return _listed(there, [f"{root} holds no results, but what is listed, which other tools read."])
    found = querying.select(root, table, expression, ",".join(columns or []) or None, sort)
    rows = found.matching.head(MOST if full else limit)
    names = found.names if full or columns else found.main_columns(rows) or found.names
    known = [*found.found.table.written, *(column for each in querying.headed().values() for column in each.written)]
    records: list[Row] = [
        {str(key): plain(value) for key, value in row.items()}
        for row in found.matching.loc[rows.index].to_dict("records")
    ]
    return _rows(
        records,
        [next(column for column in known if column.name == each) for each in names],
        more=len(found.matching) - len(rows),
        conclusions=_conclusions(root, limit) if find_points(root) else [],
        notes=[*found.found.problems, *found.found.warnings],
    )


def _listed(rows: Sequence[tuple[str, ...]], notes: list[str]) -> answers.RowsAnswer:
    return answers.RowsAnswer(
        conclusions=[],
        notes=list(map(sentence, notes)),
        columns=HELD,
        # A path is to be given back as it is.
        rows=[{"path": path, **dict(zip([*HELD][1:], map(name, rest), strict=True))} for path, *rest in rows[:LISTED]],
        more_rows=max(len(rows) - LISTED, 0),
    )


def _rows(
    rows: Sequence[Row],
    columns: Sequence[Column],
    more: int,
    conclusions: list[answers.Conclusion],
    notes: Sequence[str],
) -> answers.RowsAnswer:
    shown = [
        column
        for column in columns
        if not answers.is_noise(column.name) and any(row[column.name] is not None for row in rows)
    ]
    return answers.RowsAnswer(
        columns={column.name: f"{column.unit}: {column.about}" for column in shown},
        rows=[cells(row, shown) for row in rows],
        more_rows=more,
        conclusions=conclusions,
        notes=list(map(sentence, notes)),
    )


def _conclusions(root: Path, most: int) -> list[answers.Conclusion]:
    found = workloads.analyse(root, AnalysisConfig()).answers
    return [_conclusion(answer) for answer in found[:most]]


def _conclusion(answer: Answer) -> answers.Conclusion:
    cards = [f"{card.title}: {part}" for card in answer.cards for part in (card.headline, *card.sentences)]
    return answers.Conclusion(
        about=name(answer.title),
        sentences=list(map(sentence, (*answer.sentences, *cards))),
        others=list(map(sentence, answer.others)),
        cautions=list(map(sentence, answer.cautions)),
    )


def compare(
    access: Access,
    paths: Annotated[
        list[str], Field(min_length=1, description="[LABEL=]PATH each: results, telemetry or traces; two or more.")
    ],
    reference: Annotated[str | None, Field(description="Label or path of the reference; none: the first.")] = None,
    candidate: Annotated[str | None, Field(description="Label or path of the only other; none: all others.")] = None,
    by: Literal["point", "slot", "phase", "rank", "class", "kernel", "stream"] | None = None,
    limit: Limit = 2 * TOP,
    full: Full = False,
) -> answers.RowsAnswer:
    """Compare sweeps, training runs or traces: what is faster or slower beyond the noise.

    A ratio of times below 1 is faster. The verdict same is a tie, and unknown says that there are too few runs. Two
    ranks of one run wait for each other: the conclusion compares what they compute, and by="kernel" says which kernels
    only one of them runs. What differs beyond the noise comes first; full also has what is nothing on both sides.
    """
    compared = list(map(access.operand, paths))
    found = comparing.comparison(compared, reference, candidate, comparing.By(by) if by else None)
    columns, most = list(found.table.written), MOST if full else limit
    records = found.table.records(found.rows)
    if not records and found.problems:
        raise UserError(" ".join(found.problems))
    if not full:
        columns = [column for column in columns if column.name not in DERIVED]
        # Whole iterations before their passes, of what differs.
        records = sorted(filter(_is_something, records), key=lambda row: (_ties(row), row.get("phase", "all") != "all"))
    said = ([*map(sentence, each)] for each in (found.headlines, found.cautions))
    conclusion = answers.Conclusion(about="all", sentences=next(said), others=[], cautions=next(said))
    rows: list[dict[str, Any]] = [{key: plain(value) for key, value in row.items()} for row in records[:most]]
    return _rows(rows, columns, len(records) - len(rows), [conclusion], [*found.warnings, *found.problems])


def _is_something(row: Row) -> bool:
    """Returns whether either side of a row of traces has a value that is not 0."""
    sides = [row.get(one) for one in ("value", "reference_value", "busy_us", "reference_busy_us") if one in row]
    return not sides or any(sides)


def _ties(row: Row) -> bool:
    return not answers.DECIDED & {row.get("verdict"), row.get("change")}
