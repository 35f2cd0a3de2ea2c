"""The tidy table of operators: one row per point and phase, every column always there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.overlap import space
from overlap_sweep.report.frame import INTEGERS, Row, column_types, common_cells
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point, Reading
from overlap_sweep.results.traces import METRICS, TraceReading, own_traces
from overlap_sweep.workloads.operator.result import OperatorTimes, PassTimes

if TYPE_CHECKING:
    pass


COLUMNS = column_types(
    *("point", "directory", "config_id", "model", "backend", "device", "precision", "tokens"),
    *("tp_size", "operator", "phase", "slot", "pass", "method", *space.KNOBS, "status", "error"),
    *("time_us", "q1_us", "q3_us", "repeats", "none_us", "floor_us", "default_us", "tp1_us"),
    *("hidden_fraction", "speedup", "launch_bound", "relative_error"),
    *("profiled", "not_profiled_because"),
    *METRICS,
    "note",
)
"""Every column in its order, and its pandas type. Times are in microseconds, fractions and ratios plain numbers.
METRICS have values where `profiled`; where a measured point is not, `not_profiled_because` says why.

time_us and its kin are those of the phase's pass, `fwd` or `bwd`: dgrad and wgrad can only be timed together.
"""


def config_id(tp_size: int, operator: str, phase: str, setting: Mapping[str, Any] | None) -> str:
    """A row's name, with every knob that is not as the method has it by default: `tp2_fc1_fprop_ring_agg0`."""
    return f"tp{tp_size}_{operator}_{phase}_{space.brief_name(setting)}"


def table_rows(reading: Reading, traces: Mapping[Path, TraceReading]) -> list[Row]:
    """One dictionary per point and phase, with exactly the keys of COLUMNS; what does not apply is None."""
    rows = []
    for point in reading.points:
        if point.workload != "operator":
            continue
        common = {**common_cells(point, reading.root), "operator": point.config["operator"]}
        if point.result and point.status == "ok":
            common |= _seen_in_traces(traces[point.directory], point)
            rows += [_measured(point, phase, common) for phase in _phases(point)]
        else:
            rows += _unmeasured(point, common)
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def _phases(point: Point) -> list[str]:
    """The phases that the point overlaps; of `none`, every phase that it was asked for."""
    assert point.result
    if point.result.settings:
        return [phase for phase in space.PHASES if space.slot(point.config["operator"], phase) in point.result.settings]
    return _asked_phases(point)


def _asked_phases(point: Point) -> list[str]:
    asked = point.config.get("phases") or {}
    named = [phase for phase in space.PHASES if phase in asked]
    return named or (list(space.PHASES) if point.config["phase"] == "all" else [point.config["phase"]])


def _seen_in_traces(reading: TraceReading, point: Point) -> Row:
    why = None if reading.metrics else _why_no_metrics(point)
    notes = [*(f"{name} is missing" for name in reading.missing), *reading.problems, *reading.warnings]
    counts = {column: round(value) for column, value in reading.metrics.items() if column in INTEGERS}
    profiled = {"profiled": not why, "not_profiled_because": why}
    return {**reading.metrics, **counts, **profiled, "note": "; ".join(notes) or None}


def _why_no_metrics(point: Point) -> str:
    """In words, of a point that was measured."""
    if own_traces(point):
        return "its traces are missing or cannot be read"
    if point.result and point.result.reused_from:
        return "its times are from the store: traces stay where they were recorded"
    profile = point.config.get("profile", "all")
    if profile == "best":
        return "profile=best: it was not among the fastest when it was measured"
    return f"profile={profile}"


def _measured(point: Point, phase: str, common: Row) -> Row:
    assert point.result
    operator, pass_name = point.config["operator"], space.PASS_OF_PHASE[phase]
    slot = space.slot(operator, phase)
    setting = point.result.settings.get(slot)
    errors = [math.inf if error is None else error for error in point.result.relative_error.values()]
    return {
        **common,
        "config_id": config_id(point.config["tp_size"], operator, phase, setting),
        "phase": phase,
        "slot": slot,
        "pass": pass_name,
        "method": "none",
        **(setting or {}),
        **_times(point.measured_as(OperatorTimes).times[pass_name]),
        "launch_bound": point.result.launch_bound,
        "relative_error": max(errors, default=None),
    }


def _times(times: PassTimes) -> Row:
    point, none_us, floor_us = times.point, times.none.median_us, times.floor.median_us
    return {
        "time_us": point.median_us,
        "q1_us": point.q1_us,
        "q3_us": point.q3_us,
        "repeats": len(point.samples_us),
        "none_us": none_us,
        "floor_us": floor_us,
        "default_us": _default_us(times),
        "tp1_us": times.tp1.median_us if times.tp1 else None,
        "hidden_fraction": hidden_fraction(point.median_us, none_us, floor_us),
        "speedup": none_us / point.median_us,
    }


def _default_us(times: PassTimes) -> float | None:
    """Scaled from the none that was measured beside the default to the one beside this point."""
    measured = times.default
    return measured.default.median_us * times.none.median_us / measured.none.median_us if measured else None


def _unmeasured(point: Point, common: Row) -> list[Row]:
    """What the point was asked for: one row, or where each phase was given its own, one for each."""
    config = point.config
    of_phase = config.get("phases") or {config["phase"]: config}
    return [{**common, **_asked_cells(config, phase, asked)} for phase, asked in of_phase.items()]


def _asked_cells(config: Mapping[str, Any], phase: str, given: Mapping[str, Any]) -> Row:
    knobs = {knob: given[knob] for knob in space.KNOBS if given.get(knob) is not None}
    asked = {"method": given["method"], **(knobs if given["method"] != "none" else {})}
    return {
        "config_id": config_id(config["tp_size"], config["operator"], phase, asked),
        "phase": phase,
        "slot": space.slot(config["operator"], phase) if phase != "all" else None,
        "pass": space.PASS_OF_PHASE.get(phase, "all"),
        **asked,
    }
