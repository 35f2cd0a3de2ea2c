"""The report on tensor-parallel stacks: columns, the fastest on each grid of ranks, and charts of steps and losses."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, cycle
from operator import attrgetter
from typing import Any

from overlap_sweep.report import causes, charts
from overlap_sweep.report.charts import SERIES
from overlap_sweep.report.diagnosis import NODES
from overlap_sweep.report.numbers import as_count, as_loss, as_percent, as_us
from overlap_sweep.report.section import Answer, Card, Exhibit, File, Section, Sources
from overlap_sweep.report.table import (
    DEVICE,
    DIRECTORY,
    ERROR,
    MODEL,
    POINT,
    PRECISION,
    STATUS,
    Column,
    Listing,
    PointRow,
    Table,
    asked,
    attribute,
    points_table,
    through,
)
from overlap_sweep.results.provenance import measured_on, recorded
from overlap_sweep.results.traces import read_traces
from overlap_sweep.study.charts import first_bars
from overlap_sweep.study.section import NOTE, case_columns
from overlap_sweep.workloads.tp_training.answer import (
    GridAnswer,
    TpTrainingAnalysis,
    analyse_tp_training,
    cautions,
    headline,
    in_words,
)
from overlap_sweep.workloads.tp_training.config import Asked
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow, results_json, setting_of, step_communication

C = Column[TpTrainingRow]
P = Column[PointRow[TpTrainingRow]]
A = Column[GridAnswer]


def _share(name: str, part: str, **more: Any) -> C:
    """Returns the column of the share of the step that a part of it takes."""
    return C(f"{name}_fraction", lambda row: row.shares[part], show=as_percent, **more)


def _communication(name: str, what: str, about: str = "", **more: Any) -> C:
    """Returns a column of the communication in a step, empty without traces."""
    return C(name, lambda row: getattr(row.communication, what) if row.communication else None, about, **more)


SIZES = ("seq_length", "batch_size", "gradient_accumulation_steps")
GRID = (
    C("tp_size", attrgetter("grid.tp_size"), kind="count", header="TP"),
    C("dp_size", attrgetter("grid.dp_size"), kind="count", header="DP"),
)
IMPL = attribute("impl", kind="text")
SETTING = attribute("setting", kind="text", header="setting", style="setting")
ASKED = (
    P(
        "num_layers",
        lambda row: row.point.recorded.get("language_model", {}).get("num_hidden_layers"),
        kind="count",
    ),
    DEVICE,
    PRECISION,
    *(asked(name, "tp_training", name, kind="count") for name in SIZES),
    asked("impl", kind="text"),
    P(
        "setting",
        lambda row: setting_of(row.point.config_as(Asked)),
        "Training stack, with its options that are not at their defaults.",
        "text",
        header="setting",
        style="setting",
    ),
    asked("tp_size", kind="count", header="TP"),
    asked("dp_size", kind="count", header="DP"),
    NODES,
)
MEASURED = (
    attribute(
        "time_us",
        "Time of one training step: median of the steps after warm-up, of the slowest rank.",
        header="time us",
        show=as_us,
    ),
    C("noise_us", attrgetter("step.noise_us"), header="noise us", show=as_us, page_only=True, queried=True),
    C("repeats", attrgetter("step.repeats"), "Number of timed steps.", "count"),
    _share("fwd", "forward", header="fwd", dropped=7),
    _share("bwd", "backward", header="bwd", dropped=8),
    _share("optimizer", "optimizer", header="opt", dropped=4),
    attribute("tokens_per_s_per_gpu", header="tokens/s/GPU", show="{:,.0f}".format, high_first=True),
    attribute("tflops_per_gpu", header="TFLOP/s/GPU", show="{:,.3g}".format, high_first=True, page_only=True),
    attribute(
        *("mfu", "Model FLOP utilisation: tflops_per_gpu over the GPU's dense peak; empty if that is unknown."),
        header="MFU",
        show="{:.1%}".format,
        dropped=9,
        high_first=True,
    ),
    attribute("peak_memory_gb", header="peak GB", show="{:.1f}".format, dropped=3),
    _communication(
        *(
            "comm_us",
            "total_us",
            "Communication time in one profiled step, on the rank that waits least for the others.",
        ),
        header="comm us",
        show=as_us,
        dropped=2,
    ),
    _communication(
        "exposed_comm_us",
        "exposed_us",
        "Part of comm_us with no concurrent computation.",
        header="exposed us",
        show=as_us,
        dropped=6,
    ),
    _communication("hidden_fraction", "hidden_fraction", header="hidden", show=as_percent, dropped=5, high_first=True),
    _communication(
        "comm_wait_us",
        "waiting_us",
        "Additional communication time of the rank that waits most for the others.",
    ),
    attribute(
        *("loss", "Loss of the last step; empty if it is NaN or infinite."),
        header="loss",
        words=lambda row: "-" if row.loss is None else as_loss(row.loss),
        dropped=1,
    ),
    C(
        "losses_agree",
        lambda row: None if row.losses is None else not row.deviates,
        "Losses agree with those of the other stacks on the same data; empty if there are none.",
        "flag",
        queried=True,
    ),
    C(
        "loss_difference",
        lambda row: row.losses.largest if row.losses else None,
        "Largest relative difference between its loss and the other stacks' at the same step.",
    ),
    attribute("launch_bound", "The CPU is hardly ahead of the GPU, so the step time is the CPU's.", "flag"),
)
CHOSEN = attribute("chosen", "The fastest setting for its tp_size and dp_size.", "flag", queried=True)

TABLE = points_table(
    *("tp_training", "one row per point", (POINT, DIRECTORY, MODEL, *ASKED, STATUS, ERROR)),
    (*MEASURED, CHOSEN, NOTE),
)
COMPARED = Table("tp_training", "one row per setting", (*GRID, IMPL, SETTING, *MEASURED, NOTE))
ANSWERS = Table(
    "tp_training",
    "one row per model, device, sizes, nodes and grid of ranks: the fastest implementation",
    (
        *case_columns(("model", "device", "precision"), ("num_layers", *SIZES, "nodes")),
        *(through(column, lambda answer: answer.rows[0]) for column in GRID),
        *(through(column, lambda answer: answer.best) for column in (IMPL, SETTING, *MEASURED)),
        A(
            "tied",
            lambda answer: ", ".join(row.setting for row in answer.ties[1:]) or None,
            "Other settings within its noise.",
            "text",
        ),
    ),
)

LEGEND = (
    "time: median of the steps after warm-up, slowest rank. comm: communication in a profiled step, on the rank that "
    "waits least; hidden: its share with concurrent computation. tie: a difference within the noise."
)


def section(sources: Sources) -> Section | None:
    """Returns the section on stacks, with an answer for each model and sizes; None if there are no such points."""
    points = sources.points("tp_training")
    if not points:
        return None
    traces = read_traces(point for point in points if point.status == "ok")
    communication = {directory: step_communication(reading) for directory, reading in traces.items()}
    analyses = analyse_tp_training(
        points, {directory: one for directory, one in communication.items() if one}, sources.records.knobs
    )
    measured = {row.points[0].directory: row for analysis in analyses for row in analysis.of_points}
    rows = [PointRow(point, sources.reading.root, measured.get(point.directory)) for point in points]
    return Section(
        name="tp_training",
        what="tensor-parallel stacks",
        title="Tensor-parallel training",
        topic="tensor-parallel training",
        explained=f"{LEGEND} All implementations start with the same weights and read the same data; those with "
        "deviating losses are never chosen.",
        answers=[_answer(analysis) for analysis in analyses],
        points=Listing(
            *(TABLE, rows, "Every point of the tensor-parallel stacks, as measured."),
            chosen=lambda row: bool(row.measured and row.measured.chosen),
        ),
        report={
            "tp_training": [_report(analysis) for analysis in analyses],
            "tp_training_points": TABLE.records(rows),
        },
        decided=Listing(ANSWERS, [answer for analysis in analyses for answer in analysis.answers]),
        files=[
            File(
                directory=row.points[0].directory,
                name=f"results_{row.impl}_tp{row.grid.tp_size}_dp{row.grid.dp_size}.json",
                kind="results_*.json",
                content=partial(results_json, row, COMPARED),
                of_run=True,
            )
            for analysis in analyses
            for row in sorted(analysis.of_points, key=lambda row: row.time_us)
        ],
        launch_bound=sum(row.launch_bound for row in measured.values()),
        problems=[problem for reading in traces.values() for problem in reading.problems],
        warnings=[warning for reading in traces.values() for warning in reading.warnings],
    )


def _answer(analysis: TpTrainingAnalysis) -> Answer:
    return Answer(
        title=f"Tensor-parallel training of {analysis.case}, {as_count(analysis.rows[0].run.parameters)} parameters",
        sentences=in_words(analysis),
        card=Card(str(analysis.case), headline(analysis), in_words(analysis)),
        cautions=cautions(analysis),
        compared=Listing(
            *(COMPARED, analysis.rows, "Every setting, by grid of ranks, from fast to slow."),
            chosen=lambda row: row.chosen,
            group=lambda row: row.grid,
        ),
        points=analysis.points,
        legend=LEGEND,
        charts=[
            Exhibit(chart=partial(stacks_bars, analysis)),
            Exhibit(chart=partial(loss_lines, analysis), name="losses", heading="Losses"),
            causes.exhibit(_sides(analysis)),
        ],
        details=[measured_on(analysis.points)],
        later=lambda: causes.in_a_sentence(next(iter(_sides(analysis).values()), None)),
    )


def _sides(analysis: TpTrainingAnalysis) -> dict[str, causes.Side | None]:
    """Returns the traces of the best setting, then of the fastest others on its grid of ranks."""
    best = analysis.best
    rows = [row for row in analysis.rows if best and row.grid == best.grid]
    return {
        row.name: causes.first_traced(row.points, time_us=row.time_us)
        for row in sorted(rows, key=lambda row: row is not best)[:MOST_DIAGNOSED]
    }


def _report(analysis: TpTrainingAnalysis) -> dict[str, Any]:
    """Returns a case's entry in tuning_report.json, with the fastest on each of its `grids` and all `settings`."""
    settings = zip(COMPARED.records(analysis.rows), analysis.rows, strict=True)
    return {
        **analysis.case._asdict(),
        **recorded(analysis.points),
        "answers": in_words(analysis),
        "warnings": cautions(analysis),
        "grids": ANSWERS.records(analysis.answers),
        "settings": [{**cells, "points": [point.name for point in row.points]} for cells, row in settings],
    }


MOST_DIAGNOSED = 3
"""Settings whose exposed communication is explained."""
BESIDE_BARS = ("time_us", "tokens_per_s_per_gpu", "mfu")
PARTS = [
    charts.Key("forward", "gemm"),
    charts.Key("backward", "series3"),
    charts.Key("optimizer", "series4"),
    charts.Key("other", "wait"),
]

MOST_CURVES = 10
"""Curves in the chart, deviating ones first; more would be hard to distinguish."""
MOST_POINTS = 400
"""Points of a curve; a chart has fewer pixels."""


def stacks_bars(analysis: TpTrainingAnalysis) -> charts.Rows:
    """Returns the settings by grid of ranks, from fast to slow in each."""
    rows, more = first_bars(analysis.rows)
    beside = [column for column in Listing(COMPARED, rows).columns if column.name in BESIDE_BARS]
    return charts.Rows(
        title=str(analysis.case),
        subtitle="median of the steps, slowest rank",
        axis=charts.Axis(f"time per step, us{more}"),
        parts=PARTS,
        columns=[column.header for column in beside],
        rows=[
            charts.Row(
                name=row.name,
                ends=[end * row.time_us for end in accumulate(row.shares.values())],
                cells=[column.text(row) for column in beside],
                bold=row.chosen,
                details=COMPARED.details(row),
            )
            for row in rows
        ],
    )


def loss_lines(analysis: TpTrainingAnalysis) -> charts.Lines:
    """Returns the losses over the steps, from wide to narrow lines, since curves that agree overlap."""
    rows = sorted(analysis.rows, key=lambda row: not row.deviates)[:MOST_CURVES]
    drawn = f"{len(rows)} of {len(analysis.rows)} settings" if len(rows) < len(analysis.rows) else "all settings"
    return charts.Lines(
        title=f"Losses, {analysis.case}",
        subtitle=f"mean over all tokens; {drawn}",
        x=charts.Axis("step"),
        y=charts.Axis("loss, nats per token", format=".4~g"),
        lines=[
            charts.Line(row.name, _points(row), series, shape="", width_px=float(len(rows) - i))
            for i, (row, series) in enumerate(zip(rows, cycle(SERIES), strict=False))
        ],
    )


def _points(row: TpTrainingRow) -> list[charts.LinePoint]:
    steps = [(step.step, step.loss) for step in row.run.steps if step.loss is not None]
    every = -(-len(steps) // MOST_POINTS) or 1
    return [
        charts.LinePoint(number, loss, details={"setting": row.name, "at": f"step {number}", "loss": f"{loss:.6g}"})
        for number, loss in steps[::every]
    ]
