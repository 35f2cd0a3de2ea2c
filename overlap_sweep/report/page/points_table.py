"""Every point of the directory, one row for each pass that it is about; of what is not ok the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.overlap import space
from overlap_sweep.report.frame import Row
from overlap_sweep.report.numbers import as_percent, as_us
from overlap_sweep.report.page.tables import BEYOND, Cell, PageTable, number
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Case, Point
from overlap_sweep.workloads.operator.charts import short_name
from overlap_sweep.workloads.operator.failures import frozen, of_pass
from overlap_sweep.workloads.operator.result import PassTimes

TOLD_FIRST = ("time us", "no overlap us", "speedup", "hidden", "overlap ratio")
TOLD_LAST = ("quartiles us", "GEMMs us")
HIGH_FIRST = frozenset({"speedup", "hidden", "overlap ratio"})


def points_table(analysis: Analysis) -> PageTable:
    """Of operators. The case is a column where there is more than one."""
    chosen = _chosen(analysis)
    ratios = {(row["directory"], row["pass"]): _ratio(row) for row in analysis.operators.rows}
    points = [point for point in analysis.reading.points if point.workload == "operator"]
    several = len(analysis.operators.cases) > 1 or len({_known_case(point) for point in points}) > 1
    columns = ["TP", "operator", "pass", "setting", "status", *TOLD_FIRST, "note", *TOLD_LAST, "point"]
    rows = []
    for point in sorted(points, key=_place):
        directory = point.directory.relative_to(analysis.reading.root).as_posix()
        head = [Cell(str(point.case))] if several else []
        for cells in _rows(point, directory, chosen, ratios):
            rows.append([*head, *cells, Cell(directory if directory != "." else point.name)])
    return PageTable(
        [*(["case"] if several else []), *columns], rows, frozenset({"TP", *TOLD_FIRST, *TOLD_LAST}), HIGH_FIRST
    )


Chosen = dict[tuple[Any, ...], Any]


def _chosen(analysis: Analysis) -> Chosen:
    """What was chosen, by case, TP size, operator and pass, where there was a choice."""
    return {
        (case.case, choice.tp_size, choice.operator, choice.pass_name): frozen(choice.chosen.settings)
        for case in analysis.operators.cases
        for plan in case.plans.values()
        for choice in plan.choices
        if choice.tried_slots
    }


def _ratio(row: Row) -> float | None:
    ratio: float | None = row["forward_overlap_ratio" if row["pass"] == "fwd" else "backward_overlap_ratio"]
    return ratio


def _known_case(point: Point) -> Case:
    """Without the device, which points that died never recorded."""
    return point.case._replace(device="")


def _place(point: Point) -> tuple[Any, ...]:
    """From simple to complex, as people look for it."""
    config = point.config
    knobs = [int(config.get(knob) or 0) for knob in space.KNOBS]
    operator, method = list(space.OPERATORS).index(config["operator"]), space.METHODS.index(config["method"])
    return str(_known_case(point)), config["tp_size"], operator, method, config["phase"], knobs, point.name


def _rows(
    point: Point, directory: str, chosen: Chosen, ratios: Mapping[tuple[str, str], float | None]
) -> list[list[Cell]]:
    config, result = point.config, point.result
    begin = [Cell(str(config["tp_size"]), config["tp_size"], "number"), Cell(config["operator"])]
    if not result or point.status != "ok":
        asked = [Cell(_passes(config)), Cell(_asked(config), kind="setting"), Cell(point.status, kind=point.status)]
        reason = Cell(point.why_not_ok, kind="reason")
        return [[*begin, *asked, *map(_nothing, TOLD_FIRST), reason, *map(_nothing, TOLD_LAST)]]
    rows = []
    for name in space.passes(config):
        settings, times = of_pass(result.settings, name), result.measured.times[name]
        is_chosen = chosen.get((point.case, config["tp_size"], config["operator"], name)) == frozen(settings)
        status, note = _judged(result.launch_bound, is_chosen)
        measured = [Cell(name), Cell(short_name(settings), kind="setting"), status]
        rows.append([*begin, *measured, *_told_first(times, ratios.get((directory, name))), note, *_told_last(times)])
    return rows


def _judged(launch_bound: bool, is_chosen: bool) -> tuple[Cell, Cell]:
    """Status and note of what was measured."""
    if launch_bound:
        why = "the host was too slow: this says nothing about the device"
        return Cell("ok, launch-bound", kind="doubtful"), Cell(why, kind="reason")
    return Cell("ok", kind="ok"), Cell("chosen", kind="chosen") if is_chosen else Cell("", kind="reason")


def _told_first(times: PassTimes, ratio: float | None) -> list[Cell]:
    time_us, none_us, floor_us = times.point.median_us, times.none.median_us, times.floor.median_us
    return [
        number(time_us, as_us),
        number(none_us, as_us),
        number(none_us / time_us, lambda value: f"{value:.3f}", -BEYOND),
        number(hidden_fraction(time_us, none_us, floor_us), as_percent, -BEYOND),
        number(ratio, lambda value: f"{value:.2f}", -BEYOND),
    ]


def _told_last(times: PassTimes) -> list[Cell]:
    q1_us, q3_us = times.point.q1_us, times.point.q3_us
    return [Cell(f"{as_us(q1_us)} to {as_us(q3_us)}", q3_us - q1_us, "number"), number(times.floor.median_us, as_us)]


def _nothing(column: str) -> Cell:
    return Cell("", -BEYOND if column in HIGH_FIRST else BEYOND, "number")


def _passes(config: Mapping[str, Any]) -> str:
    passes = space.passes(config)
    return passes[0] if len(passes) == 1 else "both"


def _asked(config: Mapping[str, Any]) -> str:
    if config.get("phases"):
        return " + ".join(f"{phase} {space.setting_name(asked)}" for phase, asked in config["phases"].items())
    phase = "" if config["phase"] == "all" else f"{config['phase']} "
    return phase + space.setting_name({knob: config.get(knob) for knob in ("method", *space.KNOBS)})
