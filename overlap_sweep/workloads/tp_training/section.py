"""Tensor-parallel stacks for people and programs: which is fastest on which ranks, and what that comes from. Columns,
section, and the charts of a step's parts and of losses, whose curves lie on each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle
from operator import attrgetter
from typing import Any

from overlap_sweep.report import charts
from overlap_sweep.report.charts.palette import SERIES
from overlap_sweep.report.numbers import as_count, as_loss, as_ms, as_percent
from overlap_sweep.report.section import Answer, Exhibit, File, Section, Sources
from overlap_sweep.report.table import (
    DEVICE,
    DIRECTORY,
    ERROR,
    MODEL,
    POINT,
    STATUS,
    Column,
    Kind,
    Listing,
    PointRow,
    Table,
    asked,
    attribute,
    points_table,
    through,
)
from overlap_sweep.results.provenance import gpus_in_words, measured_on, recorded
from overlap_sweep.results.traces import read_traces
from overlap_sweep.workloads.tp_training.answer import (
    GridAnswer,
    TpTrainingAnalysis,
    analyse_tp_training,
    cautions,
    in_words,
    losses_in_words,
    ratio_interval,
)
from overlap_sweep.workloads.tp_training.config import IMPLEMENTATIONS
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow, results_json, setting_of, step_communication

C = Column[TpTrainingRow]
P = Column[PointRow[TpTrainingRow]]
A = Column[GridAnswer]


def _share(part: str, about: str = "", **more: Any) -> C:
    """Returns the column of the share of the step that a part of it takes, in percent."""
    return C(f"{part}_pct", lambda row: 100 * row.shares[part], about, show="{:.0f}%".format, **more)


def _communication(name: str, what: str, about: str = "", **more: Any) -> C:
    """Returns a column of the communication in a step, empty without traces."""
    return C(name, lambda row: getattr(row.communication, what) if row.communication else None, about, **more)


def _most(name: str, **more: Any) -> C:
    """Returns the column of the most memory that any timed step took; empty on a CPU."""

    def most(row: TpTrainingRow) -> float | None:
        found = (getattr(step, name) for step in row.steps)
        return max((gb for gb in found if gb is not None), default=None)

    return C(name, most, **more)


def _asked(name: str, kind: Kind = "count", **more: Any) -> P:
    return asked(name, "tp_training", name, kind=kind, **more)


def _of_case(name: str, kind: Kind = "count") -> A:
    return A(name, attrgetter(f"analysis.case.{name}"), kind=kind)


def _slower(name: str, value: Callable[[TpTrainingRow, TpTrainingRow], Any], which: int, about: str = "") -> A:
    """Returns a column of the first (0) or last (-1) that is slower than the best, and of the best."""

    def found(answer: GridAnswer) -> Any:
        return value(answer.slower[which], answer.best) if answer.slower and answer.best else None

    return A(name, found, about)


SIZES = ("seq_length", "batch_size", "gradient_accumulation_steps")
GRID = (
    C("tp_size", attrgetter("grid.tp_size"), kind="count", header="TP"),
    C("dp_size", attrgetter("grid.dp_size"), kind="count", header="DP"),
)
RANKS = C("ranks", attrgetter("grid.ranks"), kind="count")
IMPL = attribute("impl", kind="text")
SETTING = attribute("setting", kind="text", header="setting", style="setting")
ASKED = (
    P("num_layers", lambda row: (row.point.config.get("language_model") or {}).get("num_hidden_layers"), kind="count"),
    DEVICE,
    _asked("dtype", "text", header="dtype"),
    *map(_asked, SIZES),
    asked("impl", kind="text"),
    P(
        "setting",
        lambda row: setting_of(row.point.config),
        "The implementation with every option that is not at its default.",
        "text",
        header="setting",
        style="setting",
    ),
    asked("tp_size", kind="count", header="TP"),
    asked("dp_size", kind="count", header="DP"),
    P("ranks", lambda row: row.point.config["tp_size"] * row.point.config["dp_size"], kind="count"),
)
RATE: Mapping[str, Any] = {"show": "{:,.0f}".format, "high_first": True}
SMALL_RATE: Mapping[str, Any] = {"show": "{:,.3g}".format, "high_first": True, "page_only": True}
MEASURED = (
    C("step_us", attrgetter("time_us"), "Median of the steps after the warm-up.", header="step ms", show=as_ms),
    C("noise_us", attrgetter("step.noise_us"), header="noise ms", show=as_ms, page_only=True, queried=True),
    C("q1_us", lambda row: row.quartiles_us[0]),
    C("q3_us", lambda row: row.quartiles_us[1]),
    C("repeats", attrgetter("step.repeats"), "Timed steps.", "count"),
    _share("forward", "This and the next three add up to 100.", header="fwd", dropped=7),
    _share("backward", header="bwd", dropped=8),
    _share("optimizer", header="opt", dropped=4),
    _share("other", header="other", page_only=True),
    attribute("tokens_per_s", "Of all ranks.", header="tokens/s", page_only=True, **RATE),
    attribute("tokens_per_s_per_gpu", header="tokens/s/GPU", **RATE),
    C("samples_per_s", lambda r: r.run.samples_per_step / r.time_us * 1e6, header="samples/s", **SMALL_RATE),
    attribute("tflops_per_gpu", header="TFLOP/s/GPU", **SMALL_RATE),
    C(
        "mfu_pct",
        lambda row: None if row.mfu is None else 100 * row.mfu,
        "Model FLOP utilisation; empty where the GPU's peak is not known.",
        header="MFU",
        show="{:.1f}%".format,
        dropped=9,
        high_first=True,
    ),
    _most("memory_allocated_gb", header="alloc GB", show="{:.1f}".format, page_only=True),
    _most("memory_peak_gb", header="peak GB", show="{:.1f}".format, dropped=3),
    C(
        "host_ahead_us",
        lambda row: min((us for us in (run.host_ahead_us for run in row.runs) if us is not None), default=None),
        "How far the host was ahead at the end of the backward.",
    ),
    _communication(
        *("comm_us", "total_us", "In a step, from the traces, of the rank that waits least in it."),
        header="comm ms",
        show=as_ms,
        dropped=2,
    ),
    _communication("hidden_comm_us", "hidden_us"),
    _communication("exposed_comm_us", "exposed_us", header="exposed ms", show=as_ms, dropped=6),
    _communication(
        "hidden_comm_fraction", "hidden_fraction", header="hidden", show=as_percent, dropped=5, high_first=True
    ),
    _communication("comm_wait_us", "waiting_us", "How much longer it takes on another rank, which waits for this one."),
    attribute(
        *("loss", "Of the last step; empty where it is no number."),
        header="loss",
        words=lambda row: "-" if row.loss is None else as_loss(row.loss),
        dropped=1,
    ),
    C(
        "losses_agree",
        lambda row: None if row.losses is None else not row.deviates,
        "With the implementations that were given the same data; empty where there are none.",
        "flag",
        queried=True,
    ),
    C(
        "loss_difference",
        lambda row: row.losses.largest.relative if row.losses and row.losses.largest else None,
        "The largest, relative.",
    ),
    *(
        C(name, attrgetter(f"run.{name}"), kind="count")
        for name in ("parameters", "tokens_per_step", "samples_per_step")
    ),
    attribute("launch_bound", "The host decides how long a step takes.", "flag"),
)
CHOSEN = attribute("chosen", "The fastest on its ranks.", "flag", queried=True)
NOTE = C("", attrgetter("note"), kind="text", header="note", style="reason")

TABLE = points_table(
    *("tp_training", "one row per point", (POINT, DIRECTORY, MODEL, *ASKED, STATUS, ERROR)),
    (*MEASURED, CHOSEN, NOTE),
)
COMPARED = Table("tp_training", "one row per setting", (*GRID, SETTING, *MEASURED, NOTE))
SETTINGS = Table("tp_training", "one row per setting", (IMPL, SETTING, *GRID, RANKS, *MEASURED))
ANSWERS = Table(
    "tp_training",
    "one row per model, device, sizes and grid of ranks: the fastest implementation",
    (
        *(_of_case("model", "text"), _of_case("num_layers"), _of_case("device", "text"), _of_case("dtype", "text")),
        *map(_of_case, SIZES),
        *(through(column, lambda answer: answer.rows[0]) for column in (*GRID, RANKS)),
        *(through(column, lambda answer: answer.best) for column in (IMPL, SETTING, *MEASURED)),
        A(
            "tied",
            lambda answer: ", ".join(row.setting for row in answer.ties[1:]) or None,
            "What cannot be told from it.",
            "text",
        ),
        replace(_slower("next", lambda slower, _: slower.setting, 0, "The fastest of the others."), kind="text"),
        _slower("over_next", lambda *rows: ratio_interval(*rows)[0], 0, "How many times as long that takes."),
        _slower("over_next_low", lambda *rows: ratio_interval(*rows)[1].low, 0),
        _slower("over_next_high", lambda *rows: ratio_interval(*rows)[1].high, 0),
        _slower("over_slowest", lambda *rows: ratio_interval(*rows)[0], -1),
        A("deviating", lambda answer: answer.deviating or None, "What computes something else.", "text"),
        A(
            "best_of_all",
            lambda answer: answer.best is answer.analysis.best if answer.best else None,
            "Whether it has the most tokens/s per GPU of all grids.",
            "flag",
        ),
    ),
)

LEGEND = (
    "step: median of the steps after the warm-up, of the slowest rank. fwd, bwd, opt: their shares of it. MFU: model "
    "FLOP utilisation, of the GPU's dense peak. comm: communication in a profiled step, of the rank that waits least "
    "for the others; hidden: the share with computation beside it; exposed: the rest. tie: a difference inside the "
    "noise, in which what equal points are apart is included."
)


def section(sources: Sources) -> Section | None:
    """Returns an answer for each model and its sizes; None where no stack is among the points."""
    points = sources.points("tp_training")
    if not points:
        return None
    traces = read_traces(point for point in points if point.status == "ok")
    communication = {directory: step_communication(reading) for directory, reading in traces.items()}
    analyses = analyse_tp_training(points, {directory: one for directory, one in communication.items() if one})
    measured = {row.points[0].directory: row for analysis in analyses for row in analysis.of_points}
    rows = [PointRow(point, sources.reading.root, measured.get(point.directory)) for point in points]
    return Section(
        name="tp_training",
        what="tensor-parallel stacks",
        title="Tensor-parallel training",
        explained=f"{LEGEND} All implementations begin with the same weights and read the same data: whose losses "
        "deviate computes something else, and is never the fastest.",
        answers=[_answer(analysis) for analysis in analyses],
        points=Listing(
            *(TABLE, rows, "Every point of the tensor-parallel stacks, as measured in that point."),
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
                content=partial(results_json, row, SETTINGS),
            )
            for analysis in analyses
            for row in analysis.of_points
        ],
        launch_bound=sum(row.launch_bound for row in measured.values()),
        problems=[problem for reading in traces.values() for problem in reading.problems],
        warnings=[warning for reading in traces.values() for warning in reading.warnings],
    )


def _answer(analysis: TpTrainingAnalysis) -> Answer:
    return Answer(
        title=f"Tensor-parallel training of {analysis.case}, {as_count(analysis.rows[0].run.parameters)} parameters",
        sentences=in_words(analysis),
        cautions=cautions(analysis),
        compared=Listing(
            *(COMPARED, analysis.rows, "Every setting, by ranks and from fast to slow."),
            chosen=lambda row: row.chosen,
            group=lambda row: row.grid,
        ),
        points=analysis.points,
        legend=LEGEND,
        charts=[
            Exhibit(chart=partial(stacks_bars, analysis)),
            Exhibit(chart=partial(loss_lines, analysis), name="losses", heading="Losses"),
        ],
        details=[measured_on(analysis.points), *gpus_in_words(analysis.points)],
    )


def _report(analysis: TpTrainingAnalysis) -> dict[str, Any]:
    """Returns one case for tuning_report.json, with the fastest on each of its `grids` and all `settings`."""
    settings = zip(SETTINGS.records(analysis.rows), analysis.rows, strict=True)
    return {
        **analysis.case._asdict(),
        **recorded(analysis.points),
        "answers": in_words(analysis),
        "warnings": cautions(analysis),
        "grids": ANSWERS.records(analysis.answers),
        "settings": [{**cells, "points": [point.name for point in row.points]} for cells, row in settings],
    }


MOST_BARS = 30
"""As many as are looked at; the table has all."""
BESIDE_BARS = ("step_us", "tokens_per_s_per_gpu", "mfu_pct")
PARTS = [
    charts.Key("forward", "gemm"),
    charts.Key("backward", "series3"),
    charts.Key("optimizer", "series4"),
    charts.Key("other", "wait", 0.6),
]

MOST_CURVES = 10
"""As many as can be told apart; who deviates is among them."""
MOST_POINTS = 400
"""Of a curve: more than a chart has pixels for."""
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_WIDEST_PX = 8.0
_NARROWEST_PX = 1.6


def stacks_bars(analysis: TpTrainingAnalysis) -> charts.Bars:
    """Returns the settings by grid of ranks, from fast to slow in each."""
    rows = analysis.rows[:MOST_BARS]
    more = f"; the first {len(rows)} of {len(analysis.rows)}" if len(rows) < len(analysis.rows) else ""
    beside = [column for column in Listing(COMPARED, rows).columns if column.name in BESIDE_BARS]
    return charts.Bars(
        title=f"{analysis.case.brief} on {analysis.case.device}",
        subtitle="median of the steps, slowest rank, with its noise",
        axis=charts.Axis(f"ms a step{more}"),
        parts=PARTS,
        columns=[charts.Column(column.header) for column in beside],
        bars=[_bar(row, beside) for row in rows],
    )


def _bar(row: TpTrainingRow, beside: Sequence[C]) -> charts.Bar:
    # A single step has no noise that is known.
    noise_us = row.step.noise_us if row.step.repeats > 1 else 0.0
    return charts.Bar(
        name=row.name,
        ends=[end * row.time_us / 1e3 for end in accumulate(row.shares.values())],
        low=max(0.0, row.time_us - noise_us) / 1e3,
        high=(row.time_us + noise_us) / 1e3,
        cells=[column.text(row) for column in beside],
        bold=row.chosen,
        details=COMPARED.details(row),
    )


def loss_lines(analysis: TpTrainingAnalysis) -> charts.Lines:
    """Returns the losses of all that trained one model, over the steps."""
    drawn = sorted(analysis.rows, key=lambda row: not row.deviates)[:MOST_CURVES]
    rows = [row for row in analysis.rows if row in drawn]
    left_out = f"; {len(rows)} of {len(analysis.rows)} are drawn" if len(rows) < len(analysis.rows) else ""
    said = losses_in_words(analysis)
    return charts.Lines(
        title=f"Losses, {analysis.case.brief}",
        subtitle=f"{'; '.join(said) or 'mean over all tokens'}{left_out}",
        x=charts.Axis("step"),
        y=charts.Axis("loss", format=".4~g", logarithmic=False),
        lines=_curves(rows),
        legend=True,
    )


def _points(row: TpTrainingRow) -> list[charts.LinePoint]:
    steps = [(step.step, step.loss) for step in row.run.steps if step.loss is not None]
    every = -(-len(steps) // MOST_POINTS)
    return [
        charts.LinePoint(number, loss, details={"setting": row.name, "at": f"step {number}", "loss": f"{loss:.6g}"})
        for i, (number, loss) in enumerate(steps)
        if i % every == 0 or i == len(steps) - 1
    ]


def _curves(rows: Sequence[TpTrainingRow]) -> list[charts.Line]:
    """Returns curves in the implementation's colour, another for more settings of it, and a dash for each of several
    data; those of the same data from wide to narrow, so that all are seen."""
    curves: list[charts.Line] = []
    dp_sizes = sorted({row.grid.dp_size for row in rows})
    for dp_size, dash in zip(dp_sizes, cycle(_DASHES), strict=False):
        of_size = [row for row in rows if row.grid.dp_size == dp_size]
        colours, more = dict(zip(IMPLEMENTATIONS, SERIES, strict=False)), cycle(SERIES[len(IMPLEMENTATIONS) :])
        for i, row in enumerate(of_size):
            shown = colours.pop(row.impl, "") or next(more)
            width_px = round(_NARROWEST_PX + (_WIDEST_PX - _NARROWEST_PX) * (1 - (i + 1) / len(of_size)), 2)
            curves.append(charts.Line(row.name, _points(row), shown, shape="", dash=dash, width_px=width_px))
    return curves
