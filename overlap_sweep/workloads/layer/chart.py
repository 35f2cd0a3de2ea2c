"""Charts of a whole layer: by how much each variant is faster or slower than the reference, and a timeline."""

from __future__ import annotations

from pathlib import Path

from overlap_sweep.overlap.variants import FLOOR
from overlap_sweep.report.charts import Axis, Bar, Bars, Column, Gantt, Key, Reference
from overlap_sweep.report.iterations import Side, Timeline, timeline
from overlap_sweep.report.numbers import as_ms, as_percent
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads.layer.answer import LayerAnalysis, VariantRow

RANK = 0


def layer_bars(title: str, layer: LayerAnalysis, best: str | None) -> Bars:
    """Returns the variants from fast to slow; `best` is the one to mark."""
    interval = f", {CONFIDENCE:.0%} intervals" if len(layer.rows) > 1 else ""
    return Bars(
        title=title,
        subtitle=f"change of the whole time against {layer.reference} in the same round; median of {layer.rounds} "
        f"rounds{interval}",
        axis=Axis(format="+.1~%"),
        parts=[Key("change", "accent")],
        columns=[Column("time"), Column("change [interval]", "left")],
        bars=[_bar(row, best) for row in sorted(layer.rows, key=lambda row: row.ratio)],
        references=[Reference(0.0, below=f"faster than {layer.reference}", above="slower")],
    )


def _bar(row: VariantRow, best: str | None) -> Bar:
    change, low, high = (ratio - 1 for ratio in (row.ratio, row.interval.low, row.interval.high))
    is_floor, is_best = row.name == FLOOR, row.name == best
    notes = [*(["GEMMs alone"] if is_floor else []), *(["launch-bound"] if row.launch_bound else [])]
    time_text = f"{as_ms(row.all_us)} ms"
    change_text = f"{100 * change:+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}]"
    change_text = "reference" if row.name == row.reference else change_text
    shown = f"{row.label} ({', '.join(notes)})" if notes else row.label
    return Bar(
        name=shown,
        ends=[change],
        cells=[time_text, change_text],
        low=low,
        high=high,
        colour="wait" if is_floor else "good" if is_best else "bad" if change > 0 else "accent",
        bold=is_best,
        details={
            "variant": shown,
            "time": time_text,
            "of it": f"forward {as_ms(row.fwd_us)} ms, backward {as_ms(row.bwd_us)} ms",
            f"against {row.reference}": change_text,
            "hidden": as_percent(row.hidden_fraction),
        },
    )


def fastest_timeline(layer: LayerAnalysis) -> Gantt | None:
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
