"""The columns of operators: for every measured point, and for the best setting of each slot."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import NONE
from overlap_sweep.report.numbers import as_percent, as_us
from overlap_sweep.report.table import (
    BACKEND,
    DEVICE,
    MODEL,
    PRECISION,
    PROCESS_WIDE,
    Column,
    PointRow,
    Table,
    asked,
    attribute,
    points_table,
)
from overlap_sweep.results.estimate import estimate, hidden_fraction
from overlap_sweep.results.points import Point
from overlap_sweep.results.traces import METRICS, TraceReading, own_traces
from overlap_sweep.study.section import knob_columns
from overlap_sweep.workloads.operator.answer import SlotAnswer, config_id
from overlap_sweep.workloads.operator.config import Asked
from overlap_sweep.workloads.operator.result import OperatorTimes, PassTimes


@dataclass(frozen=True)
class PhaseTimes:
    """The measurements of an `ok` point for one phase: the times of its pass, since dgrad and wgrad can only be timed
    together."""

    point: Point
    pass_name: str
    trace: TraceReading
    is_chosen: bool
    """Whether the point ran the pass with the setting chosen for it."""

    @property
    def times(self) -> PassTimes:
        return self.point.measured_as(OperatorTimes).times[self.pass_name]

    @property
    def hidden_fraction(self) -> float:
        times = self.times
        return hidden_fraction(times.point.median_us, times.none.median_us, times.floor.median_us)

    @property
    def default_us(self) -> float | None:
        """Returns the default's time, scaled by this point's none time over the default's."""
        default = self.times.default
        return default.default.median_us * self.times.none.median_us / default.none.median_us if default else None

    @property
    def launch_bound(self) -> bool:
        return self.point.launch_bound

    @property
    def relative_error(self) -> float | None:
        """Returns the largest relative error of all tensors; infinite if one is not a number."""
        errors = self.point.result.relative_error.values() if self.point.result else ()
        return max((math.inf if error is None else error for error in errors), default=None)

    @property
    def why_not_profiled(self) -> str | None:
        """Returns why there are no metrics; None if there are some."""
        if self.trace.metrics:
            return None
        if own_traces(self.point):
            return "traces missing or unreadable"
        if self.point.result and self.point.result.reused_from:
            return "reused from the store, which keeps no traces"
        profile = self.point.config.profile
        if profile == "best":
            return "profile=best: not among the fastest when it was measured"
        return f"profile={profile}"

    @property
    def note(self) -> str:
        doubt = "the host was too slow: the time says nothing about the GPU"
        return doubt if self.launch_bound else "chosen" if self.is_chosen else ""


PhaseRow = PointRow[PhaseTimes]
"""A row per point and phase (its `part`). Points that were not measured may have `all`, as requested."""
P = Column[PhaseRow]
M = Column[PhaseTimes]
S = Column[SlotAnswer]


def _settings(point: Point) -> Mapping[str, space.Setting]:
    """Returns the settings by slot, as measured or, for points that were not measured, as requested."""
    if point.result and point.status == "ok":
        return point.result.settings
    config = point.config_as(Asked)
    requested = config.phases or {config.phase: config}
    return {
        space.slot(config.operator, phase): {
            name: wanted[name] for name in ("method", *space.KNOBS) if wanted.get(name) is not None
        }
        for phase, wanted in requested.items()
        if wanted["method"] != NONE
    }


def _setting(row: PhaseRow) -> space.Setting:
    """Returns the setting of the phase; its method is `none` without overlap."""
    operator = row.point.config_as(Asked).operator
    return _settings(row.point).get(space.slot(operator, row.part)) or {"method": NONE}


def _id(row: PhaseRow) -> str:
    config = row.point.config_as(Asked)
    return config_id(config.tp_size, config.operator, row.part, _settings(row.point))


def _slot(row: PhaseRow) -> str | None:
    return space.slot(row.point.config_as(Asked).operator, row.part) if row.part != "all" else None


def _metric(name: str) -> Column[PhaseTimes]:
    if name.startswith("num_"):
        return M(name, lambda row: round(row.trace.metrics[name]) if name in row.trace.metrics else None, kind="count")
    return M(name, lambda row: row.trace.metrics.get(name))


def _trace_note(row: PhaseTimes) -> str | None:
    missing = (f"{name} is missing" for name in row.trace.missing)
    return "; ".join([*missing, *row.trace.problems, *row.trace.warnings]) or None


_CONFIG_ID = "TP size, operator, phase and setting in one word; also the pass's other slot where it overlaps too."
POINT_COLUMNS = (
    P("config_id", _id, _CONFIG_ID, "text", queried=True),
    replace(MODEL, differing=True),
    replace(BACKEND, differing=True),
    DEVICE,
    replace(PRECISION, differing=True),
    P("tokens", lambda row: row.point.case.tokens, kind="count", header="tokens", differing=True),
    PROCESS_WIDE,
    asked("tp_size", kind="count", header="TP", page_only=True),
    asked("operator", kind="text", header="operator", page_only=True),
    P("phase", lambda row: row.part, kind="text", header="phase", page_only=True),
    P("slot", _slot, kind="text"),
    P("pass", lambda row: space.PASS_OF_PHASE.get(row.part, "all"), kind="text"),
    P("method", lambda row: _setting(row)["method"], kind="text"),
    *knob_columns(_setting),
    P("", lambda row: space.brief_name(_setting(row)), kind="text", header="setting", style="setting"),
)
PHASE_COLUMNS = (
    attribute("time_us", read="times.point.median_us", header="time us"),
    M("noise_us", lambda row: estimate(row.times.point.samples_us).noise_us),
    attribute("q1_us", read="times.point.q1_us"),
    attribute("q3_us", read="times.point.q3_us"),
    M(
        "",
        lambda row: row.times.point.q3_us - row.times.point.q1_us,
        header="quartiles us",
        words=lambda row: f"{as_us(row.times.point.q1_us)} to {as_us(row.times.point.q3_us)}",
        page_only=True,
    ),
    M("repeats", lambda row: len(row.times.point.samples_us), kind="count"),
    attribute("none_us", read="times.none.median_us", header="none us"),
    attribute("floor_us", read="times.floor.median_us", header="floor us"),
    attribute("default_us", queried=True),
    M("tp1_us", lambda row: row.times.tp1.median_us if row.times.tp1 else None),
    attribute("hidden_fraction", header="hidden", show=as_percent, high_first=True),
    M(
        "speedup",
        lambda row: row.times.none.median_us / row.times.point.median_us,
        header="speedup",
        show="{:.3f}".format,
        high_first=True,
    ),
    M(
        "overlap_ratio",
        lambda row: row.trace.metrics.get(f"{row.pass_name}_overlap_ratio"),
        header="overlap ratio",
        show="{:.2f}".format,
        page_only=True,
        high_first=True,
    ),
    attribute("launch_bound", kind="flag"),
    attribute("relative_error"),
    M(
        "profiled",
        lambda row: row.why_not_profiled is None,
        "Whether the point was profiled; if not, the trace columns are empty.",
        "flag",
    ),
    attribute("not_profiled_because", "Why the trace columns are empty.", "text", "why_not_profiled"),
    *map(_metric, METRICS),
    M("note", _trace_note, "Problems with the point's traces, if any.", "text"),
    attribute("", kind="text", read="note", header="note"),
)
TABLE = points_table("points", "one row per point and phase that it overlaps", POINT_COLUMNS, PHASE_COLUMNS)


def _layer_ratio(row: SlotAnswer, end: str = "ratio") -> float | None:
    """Returns the recommended layer's time over that with no overlap, or an end of its interval."""
    proof = row.proof
    if proof is None or proof.layer.reference != NONE:
        return None
    return getattr(proof.trial.rows[proof.recommended].gain, end)


ANSWERS = Table(
    "answers",
    "one row per case, TP size and slot for which an overlap was tried",
    (
        attribute("model", kind="text", read="case.case.model"),
        attribute("backend", kind="text", read="case.case.backend"),
        attribute("device", kind="text", read="case.case.device"),
        attribute("precision", kind="text", read="case.case.precision"),
        attribute("tokens", kind="count", read="case.case.tokens"),
        S("process_wide", lambda row: row.case.case.process_wide or None, kind="text"),
        attribute("tp_size", kind="count", header="TP"),
        attribute("slot", kind="text", header="slot"),
        attribute("operator", kind="text", read="choice.operator"),
        attribute("phase", kind="text"),
        attribute("pass", kind="text", read="choice.pass_name"),
        S(
            "setting",
            lambda row: space.brief_name(row.setting),
            "Fastest setting of the slot, measured alone; among ties the simplest.",
            "text",
            header="setting",
            words=lambda row: space.brief_name(row.setting) + (" *" if row.setting != row.final_setting else ""),
            style="setting",
        ),
        S("method", lambda row: space.method_of(row.setting or {}), kind="text"),
        *knob_columns(attrgetter("setting")),
        attribute(
            "time_us",
            "Time of the slot's pass with this setting; dgrad and wgrad are timed together.",
            read="choice.chosen.time_us",
            header="time us",
        ),
        attribute("noise_us", read="choice.chosen.estimate.noise_us", header="noise us"),
        attribute("none_us", read="choice.none.time_us", header="none us"),
        S("default_us", lambda row: row.choice.default.time_us if row.choice.default else None, header="default us"),
        attribute("floor_us", read="choice.floor_us", header="floor us"),
        attribute("hidden_fraction", read="choice.hidden_fraction", header="hidden", show=as_percent),
        attribute("speedup", read="choice.speedup", header="speedup", show="{:.2f}x".format),
        attribute("overlap_ratio", read="choice.chosen.overlap_ratio", header="overlap ratio", show="{:.2f}".format),
        attribute("reason", kind="text", read="choice.reason"),
        attribute("final_setting", "Setting of the slot in the written file, under its switches.", "text", "in_file"),
        S(
            "proven",
            lambda row: row.proof is not None and row.proof.proven,
            "Whether whole layers show beyond the noise that the written file is better than the alternative.",
            "flag",
        ),
        S(
            "recommended",
            lambda row: row.proof.recommended if row.proof else None,
            "Overlap configuration of the fastest whole layer.",
            "text",
        ),
        S(
            "layer_ratio",
            _layer_ratio,
            "Time of the recommended whole layer over that with no overlap; below 1 is faster.",
        ),
        S("layer_ratio_low", partial(_layer_ratio, end="low"), "Lower end of layer_ratio's 95 % confidence interval."),
        S(
            "layer_ratio_high",
            partial(_layer_ratio, end="high"),
            "Upper end of layer_ratio's 95 % confidence interval.",
        ),
    ),
)
USUAL_NAMES = {
    "overlap_method": "method",
    **{
        f"{usual}_{key}": f"{ours}_{column}"
        for usual, ours in (("forward", "fwd"), ("backward", "bwd"))
        for key, column in {
            "gemm_time_us": "gemm_us",
            "comm_time_us": "comm_us",
            "overlap_time_us": "overlap_us",
            "overlap_ratio": "overlap_ratio",
            "e2e_time_us": "span_us",
        }.items()
    },
    "operator_e2e_time_us": "total_span_us",
}
"""Our columns by the keys of other tuners' tuning_report.json, for scripts that read those."""
