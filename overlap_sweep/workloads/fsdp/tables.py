"""Tables of training steps: points, settings, and the best of each case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from overlap_sweep.report.nodes import NODES
from overlap_sweep.report.numbers import as_loss, as_us
from overlap_sweep.report.table import (
    DEVICE,
    DIRECTORY,
    ERROR,
    MODEL,
    POINT,
    PRECISION,
    STATUS,
    Column,
    Kind,
    PointRow,
    Table,
    attribute,
    points_table,
    through,
)
from overlap_sweep.study import CaseAnalysis
from overlap_sweep.study.section import (
    CHOSEN,
    NOTE,
    RUNS,
    case_columns,
    decision_columns,
    setting,
    setting_of_point,
)
from overlap_sweep.study.settings import Options, value_in_words
from overlap_sweep.workloads.fsdp.node_traffic import COLUMNS, traffic_of
from overlap_sweep.workloads.fsdp.rows import NAMING, FsdpRow, knobs_of, overrides

A = Column[CaseAnalysis[Any, FsdpRow]]
C = Column[FsdpRow]
K = Column[Options]
P = Column[PointRow[FsdpRow]]


def _knob(name: str, kind: Kind, path: str, read: Callable[[Any], Any] = lambda value: value, **more: Any) -> K:
    return K(name, lambda options: read(options[path]), f"Value of the option {path}.", kind, **more)


STRATEGY = _knob("strategy", "text", "distributed.strategy")
KNOBS = (
    K(
        "turned",
        lambda options: len(NAMING.changed(options)),
        "Number of options that are not at their defaults.",
        "count",
    ),
    _knob("batch_size", "count", "training.batch_size", header="batch", show=str, dropped=1),
    _knob("gradient_accumulation", "count", "training.gradient_accumulation"),
    _knob("forward_prefetch", "count", "fsdp.forward_prefetch", lambda value: None if value is None else int(value)),
    _knob("backward_prefetch", "text", "fsdp.backward_prefetch", value_in_words),
    _knob("limit_all_gathers", "flag", "fsdp.limit_all_gathers"),
    _knob("reshard_after_forward", "text", "fsdp.reshard_after_forward", value_in_words),
    _knob("replicas", "count", "fsdp.replicas"),
    _knob("reduce_dtype", "text", "fsdp.reduce_dtype"),
    _knob("layers_per_unit", "count", "fsdp.layers_per_unit"),
    _knob("separate_reduce_scatter_group", "flag", "fsdp.separate_reduce_scatter_group"),
    _knob("symmetric_memory", "text", "fsdp.symmetric_memory"),
    _knob("enable_overlap", "flag", "distributed.enable_overlap"),
    _knob("bucket_cap_mb", "number", "distributed.bucket_cap_mb"),
    _knob("compile", "flag", "compile.enabled"),
)
"""Options with their own columns; the others are in `setting`."""


def _us(name: str, about: str, header: str, read: str = "", **more: Any) -> C:
    return attribute(name, about, read=read, header=header, show=as_us, **more)


TIMES = (
    _us("time_us", "Time of one training step: median of the steps, of the slowest rank.", "time us"),
    _us("noise_us", "", "noise us", "step.noise_us", dropped=5, queried=True),
)
OF_POINTS = (
    C("q1_us", lambda row: row.run.step["point"].q1_us),
    C("q3_us", lambda row: row.run.step["point"].q3_us),
    C("repeats", lambda row: len(row.run.step["point"].samples_us), kind="count"),
)
MEASURED = (
    _us("none_us", "Time of the same step with no overlap: each collective runs alone on the GPU.", "none us"),
    _us("floor_us", "Time of the same step without communication.", "floor us"),
    _us("host_us", "", "host us", dropped=3),
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
    C(
        "exposed_comm_us",
        lambda row: row.time_us - row.floor_us,
        "Time that communication adds to the step: time_us - floor_us.",
        header="exposed us",
        dropped=6,
    ),
    C("us_per_sample", lambda row: row.per("sample").time_us),
    attribute("samples_per_step", kind="count", read="run.samples_per_step"),
    attribute("samples_per_s", header="samples/s", show="{:,.0f}".format, high_first=True),
    C(
        "tokens_per_s",
        lambda row: row.config.workload.tokens / row.time_us * 1e6,
        header="tokens/s",
        show="{:,.0f}".format,
        dropped=2,
        high_first=True,
    ),
    attribute("peak_memory_gb", header="peak GB", show="{:.1f}".format, dropped=4, queried=True),
    *(through(column, lambda row: traffic_of(row.config, row.run.parameters)) for column in COLUMNS),
    attribute("parameters", kind="count", read="run.parameters"),
    attribute(
        "loss",
        "Loss after the last step of the recorded run; empty if it is NaN or infinite.",
        header="loss",
        show=as_loss,
        dropped=1,
        queried=True,
    ),
    attribute("compiled", "Compiler of the layers, or the reason why they were not compiled.", "text", "run.compiled"),
    attribute("launch_bound", "The CPU takes as long to enqueue the step as the GPU to run it.", "flag"),
    attribute(
        "baseline_launch_bound",
        "none_us or floor_us is launch-bound, so hidden_fraction is unreliable.",
        "flag",
    ),
)


def _options(row: PointRow[FsdpRow]) -> Options:
    return knobs_of(row.point.recorded)


TABLE = points_table(
    "training",
    "one row per point",
    (
        POINT,
        DIRECTORY,
        replace(MODEL, dropped=1),
        P("ranks", lambda row: row.point.recorded["distributed"].get("dp_size"), kind="count", header="ranks"),
        NODES,
        DEVICE,
        through(STRATEGY, _options),
        replace(PRECISION, dropped=1),
        setting_of_point(lambda point: NAMING.in_words(knobs_of(point.recorded))),
        *(through(column, _options) for column in KNOBS),
        STATUS,
        ERROR,
    ),
    (*TIMES, *OF_POINTS, *MEASURED, CHOSEN, NOTE),
)
OF_RUNS = (replace(RUNS, usual=1), *TIMES, *MEASURED)
COMPARED: Table[FsdpRow] = Table(
    "training",
    "one row per setting",
    (
        setting(),
        attribute("precision", kind="text", read="config.precision"),
        *(through(column, attrgetter("options"), header="") for column in (STRATEGY, *KNOBS)),
        *OF_RUNS,
        NOTE,
    ),
)
GAIN = "samples_per_s over that of the reference, minus 1."
REFERENCE, *_, PROVEN, REASON = decision_columns("the setting with the fewest changed options")
ANSWERS: Table[CaseAnalysis[Any, FsdpRow]] = Table(
    "training",
    "one row per model, ranks, nodes and device: the best setting",
    (
        *case_columns(("model", "device"), ("ranks", "nodes")),
        through(STRATEGY, attrgetter("best.options")),
        attribute("precision", kind="text", read="best.config.precision"),
        attribute("setting", kind="text", read="best.setting"),
        A(
            "overrides",
            lambda analysis: overrides(analysis.best.options, analysis.differing),
            "Command-line overrides that select this setting.",
            "text",
        ),
        *(through(column, attrgetter("best.options")) for column in KNOBS),
        *(through(column, attrgetter("best")) for column in OF_RUNS),
        REFERENCE,
        A("gain", lambda analysis: analysis.best.over_reference - 1, GAIN),
        PROVEN,
        REASON,
    ),
)
