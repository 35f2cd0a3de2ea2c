"""The report on training steps: columns, the best setting, the effect of each knob, and charts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS
from overlap_sweep.report import causes
from overlap_sweep.report.charts import LOST, Axis, Gantt, Key, Row, Rows, cut
from overlap_sweep.report.iterations import stream_timeline
from overlap_sweep.report.nodes import NODES
from overlap_sweep.report.numbers import as_count, as_loss, as_sentence, as_us
from overlap_sweep.report.section import Answer, Card, Exhibit, Section, Sources
from overlap_sweep.report.table import (
    DEVICE,
    DIRECTORY,
    ERROR,
    MODEL,
    ORIGIN,
    POINT,
    PRECISION,
    STATUS,
    Column,
    Listing,
    PointRow,
    Table,
    attribute,
    of_measured,
    through,
)
from overlap_sweep.results.gain import gain_over, nothing_beat
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import cpu_only, environments, measured_on, measured_when
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.results.traces import listed_trace
from overlap_sweep.workloads.fsdp import node_traffic
from overlap_sweep.workloads.fsdp.answer import (
    TrainingAnalysis,
    TrainingRow,
    analyse_training,
    point_row,
    training_case,
)
from overlap_sweep.workloads.fsdp.cautions import cautions
from overlap_sweep.workloads.fsdp.knob_effects import EFFECTS, KNOBS, STRATEGY, TURNED, knob_changes, knobs_exhibit
from overlap_sweep.workloads.fsdp.knobs import frozen, knobs_of, setting_in_words

MOST_ROWS = 40
"""Rows on a terminal."""
RANK = 0
"""Rank whose trace the timeline shows."""
MOST_BARS = 30
"""Bars in the chart; the table has all settings."""
PARTS = [
    Key("floor", "gemm"),
    Key("exposed communication", "comm"),
    Key("hidden communication", "saved"),
    LOST,
]

A = Column[TrainingAnalysis]
C = Column[TrainingRow]
P = Column[PointRow[TrainingRow]]


def _us(name: str, explained: str, read: str = "", **more: Any) -> C:
    header = "exposed us" if name == "exposed_comm_us" else f"{name.removesuffix('_us')} us"
    return attribute(name, explained, read=read, header=header, show=as_us, **more)


MEASURED = (
    _us("time_us", "Time of one training step: median of the steps, of the slowest rank."),
    _us("noise_us", "", "step.noise_us", dropped=5, queried=True),
    attribute("q1_us", read="timing.q1_us"),
    attribute("q3_us", read="timing.q3_us"),
    C("repeats", lambda row: len(row.timing.samples_us), kind="count"),
    _us("none_us", "Time of the same step with no overlap: each collective runs alone on the GPU."),
    _us("floor_us", "Time of the same step without communication."),
    _us("host_us", "", dropped=3),
    attribute("speedup", header="speedup", show="{:.2f}x".format, high_first=True),
    C(
        "hidden_fraction",
        lambda row: row.hidden.fraction if row.hidden.known else None,
        "(none_us - time_us) / (none_us - floor_us), from pairs of the same round; empty if its noise is 0.5 or more.",
        header="hidden",
        words=lambda row: row.hidden.in_words,
        high_first=True,
    ),
    C("hidden_noise", lambda row: row.hidden.noise if row.hidden.known else None),
    _us("exposed_comm_us", "Time that communication adds to the step: time_us - floor_us.", "exposed_us", dropped=6),
    attribute("us_per_sample", read="of_sample.time_us"),
    attribute("samples_per_step", kind="count"),
    attribute("samples_per_s", header="samples/s", show="{:,.0f}".format, high_first=True),
    attribute("tokens_per_s", header="tokens/s", show="{:,.0f}".format, dropped=2, high_first=True),
    attribute("peak_memory_gb", header="peak GB", show="{:.1f}".format, dropped=4, queried=True),
    *(through(column, lambda row: row.traffic) for column in node_traffic.COLUMNS),
    attribute("parameters", kind="count"),
    attribute(
        *("loss", "Loss after the last step of the recorded run; empty if it is NaN or infinite."),
        header="loss",
        show=as_loss,
        dropped=1,
        queried=True,
    ),
    attribute("compiled", "Compiler of the layers, or the reason why they were not compiled.", "text"),
    attribute("launch_bound", "The CPU takes as long to enqueue the step as the GPU to run it.", "flag"),
    attribute(
        *(
            "baseline_launch_bound",
            "none_us or floor_us is launch-bound, so hidden_fraction is unreliable.",
            "flag",
        )
    ),
    C(
        "chosen",
        lambda row: bool(row.standing),
        "The best setting of its model, ranks and device.",
        "flag",
        queried=True,
    ),
    C("", lambda row: row.note, kind="text", header="note", style="reason"),
)
_OF_POINTS = ("q1_us", "q3_us", "repeats", "chosen")
"""Columns of single points only."""
TOGETHER = tuple(column for column in MEASURED if column.name not in _OF_POINTS)

TABLE = Table(
    *("training", "one row per point"),
    (
        *(POINT, DIRECTORY, replace(MODEL, dropped=1)),
        P("ranks", lambda row: row.point.config["distributed"].get("dp_size"), kind="count", header="ranks"),
        *(NODES, DEVICE, through(STRATEGY, lambda row: knobs_of(row.point.config)), replace(PRECISION, dropped=1)),
        P(
            *(
                "setting",
                lambda row: setting_in_words(knobs_of(row.point.config)),
                "Options that are not at their defaults.",
                "text",
            ),
            header="setting",
            style="setting",
        ),
        *(through(column, lambda row: knobs_of(row.point.config)) for column in (TURNED, *KNOBS)),
        *(STATUS, ERROR, *ORIGIN),
        *map(of_measured, MEASURED),
    ),
)
COMPARED = Table(
    *("training", "one row per setting"),
    (
        C("setting", lambda row: row.setting, kind="text", header="setting", style="setting"),
        C("precision", lambda row: row.precision, kind="text"),
        *(replace(through(column, lambda row: row.knobs), header="") for column in (STRATEGY, TURNED, *KNOBS)),
        *TOGETHER,
    ),
)
ANSWERS = Table(
    *("training", "one row per model, ranks, nodes and device: the best setting"),
    (
        *(attribute(name, kind="text", read=f"case.{name}") for name in ("model", "device")),
        *(attribute(name, kind="count", read=f"case.{name}") for name in ("ranks", "nodes")),
        through(STRATEGY, lambda analysis: analysis.best.knobs),
        A("precision", lambda analysis: analysis.best.precision, kind="text"),
        A("setting", lambda analysis: analysis.best.setting, kind="text"),
        A("overrides", lambda analysis: analysis.overrides, "Command-line overrides that select this setting.", "text"),
        *(through(column, lambda analysis: analysis.best.knobs) for column in (TURNED, *KNOBS)),
        *(through(column, lambda analysis: analysis.best) for column in TOGETHER),
        A(
            "reference",
            lambda analysis: analysis.reference.setting,
            "Setting with the fewest changed options, which gain is relative to.",
            "text",
        ),
        A("gain", lambda analysis: analysis.gain, "samples_per_s over that of the reference, minus 1."),
        A(
            "proven",
            lambda analysis: analysis.settled,
            "A search measured the setting again after choosing it.",
            "flag",
        ),
        A("reason", lambda analysis: analysis.reason, kind="text"),
    ),
)
LEGEND = (
    "none: the same step with no overlap (each collective alone on the GPU); floor: without communication; exposed: "
    "time - floor; hidden: (none - time) / (none - floor), - if within the noise."
)


def section(sources: Sources) -> Section | None:
    """Returns the section on training, with the best setting of each case; None if there are no training points."""
    points = sources.points("fsdp")
    if not points:
        return None
    analyses = analyse_training(points, sources.records.knobs)
    best = {(analysis.case, frozen(analysis.best.knobs)): analysis.best.standing for analysis in analyses}

    def measured(point: Point) -> TrainingRow | None:
        if point.status != "ok":
            return None
        return point_row(point, best.get((training_case(point), frozen(knobs_of(point.config))), ""))

    rows = [PointRow(point, sources.reading.root, measured(point)) for point in points]
    return Section(
        name="training",
        what="training runs",
        title="Training steps",
        topic="FSDP training",
        explained=f"{LEGEND} Settings within the noise of the fastest are ties; the one with the fewest changed knobs "
        "wins.",
        answers=list(map(_answer, analyses)),
        points=Listing(TABLE, rows, "Every training point, as measured."),
        report={"training": list(map(_report, analyses)), "training_points": TABLE.records(rows)},
        decided=Listing(ANSWERS, analyses),
        launch_bound=sum(row.is_launch_bound for row in rows),
    )


def title(analysis: TrainingAnalysis) -> str:
    """Returns what was measured, and on what."""
    return f"Training {analysis.case}, {as_count(analysis.parameters)} parameters"


def _answer(analysis: TrainingAnalysis) -> Answer:
    return Answer(
        title=title(analysis),
        sentences=_sentences(analysis),
        card=_card(analysis),
        cautions=cautions(analysis),
        compared=Listing(
            *(COMPARED, analysis.rows, "Every setting, from fast to slow by time per sample."),
            chosen=lambda row: row is analysis.best,
            reference=lambda row: row is analysis.reference,
            most_rows=MOST_ROWS,
        ),
        points=analysis.points,
        legend=f"{LEGEND} {analysis.how_timed}",
        charts=[
            Exhibit(chart=partial(settings_bars, analysis), drawn=analysis.how_timed),
            _timeline(analysis),
            _causes(analysis),
        ],
        more=knobs_exhibit(analysis),
        details=[measured_on(analysis.points)],
        later=lambda: causes.in_a_sentence(_side(analysis, analysis.best)),
    )


def _causes(analysis: TrainingAnalysis) -> Exhibit:
    """Returns why communication is exposed with the best setting and with the reference."""
    rows = {row.setting: row for row in (analysis.best, analysis.reference)}
    return causes.exhibit({name: _side(analysis, row) for name, row in rows.items()})


def _side(analysis: TrainingAnalysis, row: TrainingRow) -> causes.Side | None:
    """Returns the traces of a setting's first point that has some; None if none has."""
    own = (causes.Side(point, time_us=row.time_us) for point in analysis.points if point.name in row.points)
    return next((side for side in own if side.traces), None)


def _timeline(analysis: TrainingAnalysis) -> Exhibit:
    """Returns the timeline of the streams in a step of the best setting, below the same step with no overlap."""
    of_best = [point for point in analysis.points if frozen(knobs_of(point.config)) == frozen(analysis.best.knobs)]
    found = [(point, path) for point in of_best if (path := listed_trace(point, trace_file(RANK)))]

    def drawn() -> Gantt | None:
        point, best = found[0]
        sides = {"no overlap": listed_trace(point, trace_file(RANK, "none")), analysis.best.setting: best}
        shown = stream_timeline(f"Streams of a step, {analysis.case.brief}", sides)
        return shown.chart if shown else None

    return Exhibit(
        chart=drawn if found else None,
        name="timeline",
        heading="Streams of a step",
        brief="Timeline",
        drawn="A typical profiled step: see what runs concurrently, but take times from the table, as profiling slows "
        "the step down. Blue: GEMMs; green: other computation; orange: communication; exposed: communication with no "
        "concurrent computation.",
    )


def settings_bars(analysis: TrainingAnalysis) -> Rows:
    """Returns the settings from fast to slow, by the time per sample."""
    # The best and the reference are shown, however slow they are.
    kept = (analysis.best, analysis.reference)
    rows = [row for i, row in enumerate(analysis.rows) if i < MOST_BARS or row in kept]
    left_out = len(analysis.rows) - len(rows)
    more = f"; the fastest {len(rows)} of {len(analysis.rows)} settings" if left_out else ""
    return Rows(
        title=f"{analysis.case.brief} on {analysis.case.device}",
        subtitle="median of the steps, slowest rank, with its noise",
        axis=Axis(f"time per sample, us{more}"),
        parts=PARTS,
        columns=["time us", "hidden", "vs none", "samples/s"],
        rows=[_setting_bar(row, row is analysis.best) for row in rows],
    )


def _setting_bar(row: TrainingRow, best: bool) -> Row:
    samples, noise_us = row.samples_per_step, row.step.noise_us
    return Row(
        name=row.setting,
        ends=[end_us / samples for end_us in cut(row.floor_us, row.time_us, row.none_us)],
        low=max(0.0, row.time_us - noise_us) / samples,
        high=(row.time_us + noise_us) / samples,
        cells=[as_us(row.time_us), row.hidden.in_words, f"{row.speedup:.2f}x", f"{row.samples_per_s:,.0f}"],
        bold=best,
        details=COMPARED.details(row),
    )


def _card(analysis: TrainingAnalysis) -> Card:
    """Returns the setting to use, at a glance."""
    best, reference = analysis.best, analysis.reference
    times = f"{_times(best)}, {best.samples_per_s:,.0f} samples/s."
    if best is not reference and analysis.advantage.faster:
        headline = f"Use {best.setting}: {_advantage(analysis)}"
    elif len(analysis.rows) == 1:
        headline = f"{best.setting}: nothing to compare with"
    else:
        headline = nothing_beat(best.setting, "keep it")
    sentences = [times, f"{as_sentence(analysis.reason)}."]
    if analysis.shared:
        sentences.append(f"All settings have {analysis.shared}.")
    use = [analysis.overrides] if analysis.overrides else []
    return Card(title(analysis), headline, sentences, use=use, limits=cpu_only(analysis.points))


def _sentences(analysis: TrainingAnalysis) -> list[str]:
    """Returns sentences on the best setting, its gain, and the overrides that select it."""
    best, reference = analysis.best, analysis.reference
    gains = f"{best.samples_per_s:,.0f} samples/s"
    if best is not reference and analysis.advantage.faster:
        # A search's gain is over its baseline, which may be another setting.
        instead = "" if analysis.settled else f" instead of {reference.samples_per_s:,.0f} with {reference.setting}"
        gains = f"{_advantage(analysis)}: {best.samples_per_s:,.0f} samples/s{instead}"
    only = len(analysis.rows) == 1
    reason = "" if only else f" {as_sentence(analysis.reason)}."
    lines = [f"{'Measured' if only else 'Best'}: {best.setting}, {gains}; {_times(best)}.{reason}"]
    if analysis.overrides:
        lines.append(f"To set: {analysis.overrides}")
    if analysis.shared:
        lines.append(f"All settings have {analysis.shared}.")
    return lines


def _advantage(analysis: TrainingAnalysis) -> str:
    return analysis.advantage.in_words(analysis.against, "per sample")


def _times(row: TrainingRow) -> str:
    hidden = f"{row.hidden.in_words} hidden" if row.hidden.known else "hidden fraction unknown"
    return f"{as_us(row.time_us)} us per step, {gain_over(row.none, row.step).in_words(NONE_IN_WORDS)}, {hidden}"


def _report(analysis: TrainingAnalysis) -> dict[str, Any]:
    """Returns a case's entry in tuning_report.json: the best setting, all `settings`, and the effects of `knobs`."""
    environment, *others = environments(analysis.points)
    (best,) = ANSWERS.records([analysis])
    return {
        **analysis.case._asdict(),
        "parameters": analysis.parameters,
        "measured": measured_when(analysis.points),
        "environment": environment,
        "other_environments": others,
        "best": {**best, "knobs": analysis.best.knobs},
        "shared": analysis.shared,
        "warnings": cautions(analysis),
        "settings": [
            {**cells, "knobs": row.knobs, "points": list(row.points)}
            for row, cells in zip(analysis.rows, COMPARED.records(analysis.rows), strict=True)
        ],
        "how_timed": analysis.how_timed,
        "knobs": EFFECTS.records(knob_changes(analysis)),
    }
