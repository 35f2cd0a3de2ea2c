"""Whole layers for people and programs: the variants of each side by side, which of them is fastest, and charts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from overlap_sweep.overlap.overlap_cfg import FLOOR
from overlap_sweep.report import charts
from overlap_sweep.report.iterations import Side, Timeline, timeline
from overlap_sweep.report.numbers import as_ms, as_percent
from overlap_sweep.report.section import Answer, Exhibit, Section, Sources
from overlap_sweep.report.table import (
    BACKEND,
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
)
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.points import Point, group_cases
from overlap_sweep.results.provenance import measured_on, recorded
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads.layer.answer import LayerAnalysis, VariantRow, analyse_layer
from overlap_sweep.workloads.layer.result import LayerTimes, attention_backend

RANK = 0
"""Whose trace a timeline is made of."""

C = Column[VariantRow]
OfPoint = Column[PointRow[VariantRow]]

OF_POINT = (
    *(replace(POINT, queried=True), DIRECTORY, replace(MODEL, differing=True, dropped=1), replace(BACKEND, header="")),
    *(DEVICE, replace(PRECISION, header="")),
    OfPoint("tokens", lambda row: row.point.case.tokens, kind="count"),
    asked("kind", "layer", "kind", kind="text", header="layer"),
    asked("tp_size", kind="count", header="TP"),
    asked("num_replicas", "layer", "num_replicas", kind="count"),
    asked("training", "layer", "training", kind="flag", about="Whether an optimizer follows."),
    OfPoint("attention_backend", lambda row: attention_backend(row.point.result), kind="text"),
    OfPoint("", lambda row: row.measured and row.measured.label, kind="text", header="variant", style="setting"),
    *(STATUS, ERROR),
)
TIMES = (
    attribute("fwd_us", header="fwd ms", show=as_ms),
    attribute("bwd_us", header="bwd ms", show=as_ms),
    attribute("step_us", "The optimizer's.", header="step ms", show=as_ms, dropped=1),
    attribute("all_us", header="all ms", show=as_ms),
    attribute("rounds", kind="count"),
    attribute("reference", "The variant that ratio is to.", "text"),
    attribute(
        "ratio",
        "Of all_us to that of reference in the same round, median of the rounds.",
        header="ratio",
        show="{:.3f}".format,
    ),
    C(
        *("", lambda row: None if row.name == row.reference else row.interval, "", "text"),
        header="interval",
        show=lambda interval: f"{interval.low:.3f} to {interval.high:.3f}",
        dropped=2,
    ),
    attribute("ratio_low", "The interval's lower end.", read="interval.low", queried=True),
    attribute("ratio_high", "The interval's upper end.", read="interval.high", queried=True),
    C("coverage", lambda row: CONFIDENCE, "The interval's confidence."),
    attribute("differs", "Whether the interval excludes 1.", "flag", "to_reference.differs"),
    attribute(
        "hidden_fraction", "(none - all_us) / (none - floor).", header="hidden", show=as_percent, high_first=True
    ),
    attribute("launch_bound", "The times say nothing about the device.", "flag"),
    attribute("relative_error", "The largest of any tensor, against none."),
    C("", lambda row: "launch-bound" if row.launch_bound else "", kind="text", header="note", style="reason"),
)
VARIANT = attribute("variant", kind="text", read="name")
TABLE = points_table("layers", "one row per point and variant", OF_POINT, (replace(VARIANT, queried=True), *TIMES))
LABEL = C("", lambda row: row.label, kind="text", header="variant", style="setting")
COMPARED = Table("layers", "one row per variant", (LABEL, VARIANT, *TIMES))


def section(sources: Sources) -> Section | None:
    """Returns how the variants of each layer compare, an answer for each but those that a tuner measured for operators,
    which are told with them; None where no layer is among the points."""
    points = sources.points("layer")
    if not points:
        return None
    layers = {point.directory: analyse_layer(point) for point in points if point.status == "ok"}
    tuned = sources.records.layer_trials
    cases = group_cases(sources.reading.points, "operator") if tuned else {}
    root = sources.reading.root
    rows = [
        PointRow(point, root, row)
        for point in points
        for row in (layers[point.directory].rows if point.directory in layers else [None])
    ]
    return Section(
        name="layers",
        what="layers",
        title="Whole layers",
        explained="Times in milliseconds: medians of the rounds, in each of which all variants ran side by side.",
        answers=[
            _answer(layer)
            for directory, layer in layers.items()
            if directory not in tuned or layer.point.case not in cases
        ],
        points=Listing(TABLE, rows, "Every variant of the whole layers."),
        report={"layers": [report(point, layers.get(point.directory), root) for point in points]},
        launch_bound=sum(any(row.launch_bound for row in layer.rows) for layer in layers.values()),
    )


def _answer(layer: LayerAnalysis) -> Answer:
    point = layer.point
    assert point.result
    return Answer(
        title=_title(point),
        brief=f"{point.case.model} {point.config['layer']['kind']} TP={point.config['tp_size']}",
        sentences=[layer.verdict],
        cautions=[*layer.cautions, *point.result.warnings],
        compared=compared(layer, layer.winner),
        points=[point],
        legend=legend(layer),
        charts=[
            Exhibit(
                chart=partial(layer_bars, heading(layer), layer, layer.winner.name if layer.winner else None),
                explained=f"Change of the whole time against {layer.reference} in the same round; median of "
                f"{layer.rounds} rounds, with its {CONFIDENCE:.0%} interval.",
            ),
            Exhibit(chart=partial(fastest_timeline, layer), name="timeline", heading="Timeline"),
        ],
        details=[measured_on([point]), f"in {point.directory}"],
    )


def _title(point: Point) -> str:
    case, layer = point.case, point.config["layer"]
    attention = attention_backend(point.result)
    parts = [
        f"{case.model} {layer['kind']}",
        f"TP={point.config['tp_size']}",
        *([f"{layer['num_replicas']} replicas"] if layer["num_replicas"] > 1 else []),
        f"{case.tokens} tokens",
        f"{case.precision}",
        f"backend {case.backend} on {case.device}",
        *([f"attention {attention}"] if attention else []),
    ]
    return ", ".join(parts)


def compared(layer: LayerAnalysis, best: VariantRow | None) -> Listing[VariantRow]:
    """Returns the table of the variants, in the order of measuring; `best` is marked."""
    return Listing(COMPARED, layer.rows, "Every variant, in the order of measuring.", chosen=lambda row: row is best)


def legend(layer: LayerAnalysis) -> str:
    """Returns what the ratios of its table are."""
    return (
        f"ratio: to {layer.reference} in the same round, median of {layer.rounds} rounds, with its {CONFIDENCE:.0%} "
        "interval; below 1 is faster"
    )


def report(point: Point, layer: LayerAnalysis | None, root: Path) -> dict[str, Any]:
    """Returns what tuning_report.json says of a layer."""
    result, row = point.result, PointRow[VariantRow](point, root, None)
    measured = layer.point.measured_as(LayerTimes).variants if layer else {}
    variants = [
        {**cells, "settings": measured[cells["variant"]].settings, "switches": measured[cells["variant"]].switches}
        for cells in COMPARED.records(layer.rows if layer else ())
    ]
    return {
        **{column.name: column.value(row) for column in OF_POINT if column.name},
        **recorded([point]),
        "warnings": result.warnings if result else [],
        "verdict": layer.verdict if layer else None,
        "variants": variants,
    }


def layer_bars(title: str, layer: LayerAnalysis, best: str | None) -> charts.Bars:
    """Returns the variants from fast to slow; `best` is the one to mark."""
    interval = f", {CONFIDENCE:.0%} intervals" if len(layer.rows) > 1 else ""
    return charts.Bars(
        title=title,
        subtitle=f"change of the whole time against {layer.reference} in the same round; median of {layer.rounds} "
        f"rounds{interval}",
        axis=charts.Axis(format="+.1~%"),
        parts=[charts.Key("change", "accent")],
        columns=[charts.Column("time"), charts.Column("change [interval]", "left")],
        bars=[_bar(row, best) for row in sorted(layer.rows, key=lambda row: row.ratio)],
        references=[charts.Reference(0.0, below=f"faster than {layer.reference}", above="slower")],
    )


def _bar(row: VariantRow, best: str | None) -> charts.Bar:
    change, low, high = (ratio - 1 for ratio in (row.ratio, row.interval.low, row.interval.high))
    is_floor, is_best = row.name == FLOOR, row.name == best
    notes = [*(["GEMMs alone"] if is_floor else []), *(["launch-bound"] if row.launch_bound else [])]
    time_text = f"{as_ms(row.all_us)} ms"
    change_text = f"{100 * change:+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}]"
    change_text = "reference" if row.name == row.reference else change_text
    shown = f"{row.label} ({', '.join(notes)})" if notes else row.label
    return charts.Bar(
        name=shown,
        ends=[change],
        cells=[time_text, change_text],
        low=low,
        high=high,
        colour="wait" if is_floor else "good" if is_best else "bad" if change > 0 else "accent",
        bold=is_best,
        details=COMPARED.details(row),
    )


def fastest_timeline(layer: LayerAnalysis) -> charts.Gantt | None:
    """Returns the timeline of the fastest variant below that of the reference; None where it was not traced."""
    best = layer.winner or next(iter(layer.contenders), None)
    if best is None:
        return None
    shown = layer_timeline(heading(layer), layer.point, (layer.reference, layer.reference), (best.label, best.name))
    return shown.chart if shown else None


def heading(layer: LayerAnalysis) -> str:
    """Returns what a chart of the layer is called."""
    return f"{layer.point.config['layer']['kind']}, TP={layer.point.config['tp_size']}"


def layer_timeline(title: str, point: Point, none: tuple[str, str], best: tuple[str, str]) -> Timeline | None:
    """Returns the variant without overlap above the best, each given as what it is called and its name in the point;
    None where the latter has no trace."""
    upper, lower = (Side(name, listed_trace(point, trace_file(RANK, variant))) for name, variant in (none, best))
    return timeline(title, upper, lower) if lower.trace else None


def listed_trace(point: Point, name: str) -> Path | None:
    """Returns where a trace of the point is, None where it has none of this name."""
    path = point.directory / name
    return path if point.result and name in point.result.traces and path.is_file() else None
