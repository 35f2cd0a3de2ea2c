"""The tools: each calls what the command of its name calls, and puts what that found into typed answers."""

from collections.abc import Sequence
from dataclasses import dataclass
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
from overlap_sweep.commands.agents.answers import at_most, cells, figure, name, rounded, sentence
from overlap_sweep.commands.output import plain
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.diagnosis.findings import exposed_by_rank
from overlap_sweep.diagnosis.runs import Run
from overlap_sweep.errors import UserError
from overlap_sweep.predict.predictions import Prediction
from overlap_sweep.predict.runs import Mends, advice_of
from overlap_sweep.report.diagnosis import headline, lost, warnings_of
from overlap_sweep.report.predictions import PREDICTIONS
from overlap_sweep.report.section import Answer
from overlap_sweep.report.table import Column, Row
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.run_directory import find_points

TOP, MOST = 5, 1000
"""Rows of an answer, unless it is to be full."""

Paths = Annotated[list[str], Field(min_length=1, description="Traces of all ranks of runs, or directories of runs.")]
Limit = Annotated[int, Field(ge=1, le=MOST, description="Most rows; how many more there are is said.")]
Full = Annotated[bool, Field(description="All rows and columns instead of the most important ones.")]


@dataclass(frozen=True)
class Access:
    """What the server may do for its client."""

    roots: tuple[Path, ...]
    """Directories at or below which it may read and write."""
    may_run: bool = False
    """Whether it may start a training command."""

    def path(self, given: str) -> Path:
        """Returns the path. UserError if it leads out of the roots."""
        path = Path(given)
        if not any(path.resolve().is_relative_to(root.resolve()) for root in self.roots):
            roots = ", ".join(map(str, self.roots))
            raise UserError(f"{given} is outside of {roots}; start overlap-sweep mcp with --root to allow it.")
        return path


def diagnose(access: Access, paths: Paths, limit: Limit = TOP, full: Full = False) -> answers.DiagnoseAnswer:
    """Say why communication is exposed in profiler traces, and what to try. The first tool for a recorded training.

    What a cause may gain is a bound; ask predict what a change would gain.
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
    names: Annotated[list[str] | None, Field(description="Levers or their families, such as ddp; none: all.")] = None,
    applying_to: Annotated[
        str | None, Field(description="A trace, the directory of a run or sweep, or a whole training command.")
    ] = None,
    limit: Limit = 2 * TOP,
    full: Full = False,
) -> answers.LeversAnswer:
    """List what can be changed in a training without changing its script, and what to write to change it."""
    if applying_to and Path(applying_to).exists():
        access.path(applying_to)
    rows, target = listing.lever_rows(names or [], applying_to)
    rows.sort(key=lambda row: listing.order_of(row, target))
    applying = [row for row in rows if not str(row["applies"]).startswith("no")]
    is_traced = bool(target and target.training.libraries is not None and not names)
    shown = rows if full else [row for row in applying if row["mends"] or not is_traced][:limit]
    return answers.LeversAnswer(
        about=list(map(sentence, target.about if target else [])),
        gains="cannot tell",
        # They are ours, and `write` may have several lines.
        levers=[{key: str(value) for key, value in row.items() if value not in (None, "")} for row in shown],
        more_levers=0 if full else len(applying) - len(shown),
        do_not_apply=0 if full else len(rows) - len(applying),
    )


def query(
    access: Access,
    directory: Annotated[str, Field(description="Directory of a date, a sweep or a point.")],
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
    """Return measured points that match a condition, and what the analysis of the directory concludes.

    Which setting wins is said by the conclusions, which know what is a tie; never by the order of rows.
    """
    root = access.path(directory)
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

    A ratio below 1 is faster. The verdict same is a tie, and unknown says that there are too few runs.
    """
    for written in paths:
        access.path(str(comparing.label_and_path(written)[1]))
    found = comparing.comparison(paths, reference, candidate, comparing.By(by) if by else None)
    columns, most = found.table.written, MOST if full else limit
    records = found.table.records(found.rows)
    if not records and found.problems:
        raise UserError(" ".join(found.problems))
    conclusion = answers.Conclusion(about="all", sentences=list(map(sentence, found.headlines)), others=[], cautions=[])
    rows: list[dict[str, Any]] = [{key: plain(value) for key, value in row.items()} for row in records[:most]]
    return _rows(rows, columns, len(records) - len(rows), [conclusion], [*found.warnings, *found.problems])
