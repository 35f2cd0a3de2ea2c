"""The tidy tables of training runs: what each point measured, and the best setting of each case."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from overlap_sweep.report.frame import Row, column_types, common_cells
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow, is_host_limited, training_case
from overlap_sweep.workloads.fsdp.knob_effects import KnobContribution
from overlap_sweep.workloads.fsdp.knobs import Knobs, changed, frozen, in_words, knobs_of, setting_in_words
from overlap_sweep.workloads.fsdp.step_hidden import Hidden, hidden
from overlap_sweep.workloads.fsdp.times import limited_by_host, measured

KNOB_COLUMNS = {
    "batch_size": "training.batch_size",
    "gradient_accumulation": "training.gradient_accumulation",
    "forward_prefetch": "fsdp.forward_prefetch",
    "backward_prefetch": "fsdp.backward_prefetch",
    "limit_all_gathers": "fsdp.limit_all_gathers",
    "reshard_after_forward": "fsdp.reshard_after_forward",
    "replicas": "fsdp.replicas",
    "reduce_dtype": "fsdp.reduce_dtype",
    "enable_overlap": "distributed.enable_overlap",
    "bucket_cap_mb": "distributed.bucket_cap_mb",
    "compile": "compile.enabled",
}
"""The knobs that have columns of their own; the others are in `setting`."""

_TEXT = (
    *("strategy", "setting", "overrides", "reference", "compiled", "reason"),
    *("backward_prefetch", "reshard_after_forward", "reduce_dtype"),
)
_COUNTS = ("ranks", "batch_size", "gradient_accumulation", "forward_prefetch", "replicas", "samples_per_step")
_FLAGS = ("limit_all_gathers", "enable_overlap", "compile", "chosen", "baseline_launch_bound", "proven")


def _types(*names: str) -> dict[str, str]:
    own = {
        **dict.fromkeys(_TEXT, "string"),
        **dict.fromkeys((*_COUNTS, "parameters", "turned"), "Int64"),
        **dict.fromkeys(_FLAGS, "boolean"),
    }
    return {name: own.get(name, kind) for name, kind in column_types(*names).items()}


COLUMNS = _types(
    *("point", "directory", "model", "ranks", "device", "strategy", "precision", "setting", "turned"),
    *(*KNOB_COLUMNS, "status", "error"),
    *("step_us", "noise_us", "q1_us", "q3_us", "repeats", "none_us", "floor_us", "host_us"),
    *("speedup", "hidden_fraction", "hidden_noise", "comm_us", "exposed_us", "us_per_sample"),
    *("samples_per_step", "samples_per_s", "tokens_per_s", "peak_memory_gb", "parameters"),
    *("first_loss", "loss", "compiled", "launch_bound", "baseline_launch_bound", "chosen"),
)
"""Every column in its order, and its pandas type: one row per point. Times are medians in microseconds, of a whole step
as measured in that point.

setting has every knob that is not at its default, turned counts them. none_us: the same step with every collective
alone on the device; floor_us: without communication. comm_us is none less floor, exposed_us step less floor.
hidden_fraction is by rounds, hidden_noise its noise; both are empty where communication cannot be told from noise.
launch_bound: the host takes as long to enqueue the step as the device to run it; baseline_launch_bound: the same of one
of the two others, which hidden_fraction is measured against. chosen: the best setting of its case.
"""

ANSWER_COLUMNS = _types(
    *("model", "ranks", "device", "strategy", "precision", "setting", "overrides", "turned", *KNOB_COLUMNS),
    *("step_us", "noise_us", "none_us", "floor_us", "host_us"),
    *("speedup", "hidden_fraction", "hidden_noise", "comm_us", "exposed_us", "us_per_sample"),
    *("samples_per_step", "samples_per_s", "tokens_per_s", "peak_memory_gb", "parameters", "loss", "compiled"),
    *("launch_bound", "baseline_launch_bound", "reference", "gain", "proven", "reason"),
)
"""One row per model, ranks and device: the best setting. gain: its samples per second over those of the simplest, which
is `reference`, minus 1; proven: a search measured it again after it had chosen it."""


def training_rows(points: Iterable[Point], analyses: Iterable[TrainingAnalysis], root: Path) -> list[Row]:
    """With exactly the keys of COLUMNS; what does not apply is None."""
    best = {(analysis.case, frozen(analysis.best.knobs)) for analysis in analyses}
    rows = []
    for point in points:
        if point.is_training:
            common = _point_cells(point, root)
            if point.status == "ok":
                chosen = (training_case(point), frozen(knobs_of(point.config))) in best
                rows.append({**common, **_measured_cells(point), "chosen": chosen})
            else:
                rows.append(common)
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def answer_rows(analyses: Iterable[TrainingAnalysis]) -> list[Row]:
    """With exactly the keys of ANSWER_COLUMNS."""
    rows = [
        {
            **analysis.case._asdict(),
            **setting_cells(analysis.best),
            "parameters": analysis.parameters,
            "overrides": analysis.overrides,
            "reference": analysis.reference.setting,
            "gain": analysis.gain,
            "proven": analysis.settled,
            "reason": analysis.reason,
        }
        for analysis in analyses
    ]
    return [{column: row.get(column) for column in ANSWER_COLUMNS} for row in rows]


def setting_cells(row: TrainingRow) -> Row:
    """What is known of a setting beside the others of its case; undefined numbers are NaN."""
    return {
        "setting": row.setting,
        "strategy": row.strategy,
        "precision": row.precision,
        **_knob_cells(row.knobs),
        "step_us": row.time_us,
        "noise_us": row.step.noise_us,
        "none_us": row.none_us,
        "floor_us": row.floor_us,
        "host_us": row.host_us,
        "speedup": row.speedup,
        **_hidden_cells(row.hidden),
        "comm_us": row.comm_us,
        "exposed_us": row.exposed_us,
        "us_per_sample": row.of_sample.time_us,
        "samples_per_step": row.samples_per_step,
        "samples_per_s": row.samples_per_s,
        "tokens_per_s": row.tokens_per_s,
        "peak_memory_gb": row.peak_memory_gb,
        "loss": row.loss,
        "compiled": row.compiled,
        "launch_bound": row.host_limits,
        "baseline_launch_bound": row.host_limits_beside,
    }


def contribution_cells(contribution: KnobContribution) -> Row:
    """One change of one knob; changes are of the time that a sample takes, as shares."""
    low, high = contribution.range
    beside = contribution.beside_best
    return {
        "knob": contribution.knob,
        "before": in_words(contribution.before),
        "after": in_words(contribution.after),
        "pairs": len(contribution.effects),
        "differ": contribution.differs,
        "change": contribution.change,
        "noise": contribution.noise,
        "sure": contribution.sure,
        "lowest_change": low,
        "highest_change": high,
        "change_beside_best": beside.change if beside else None,
        "noise_beside_best": beside.noise if beside else None,
        "taken": contribution.taken,
    }


def _hidden_cells(found: Hidden | None) -> Row:
    if found is None or not found.known:
        return {"hidden_fraction": None, "hidden_noise": None}
    return {"hidden_fraction": found.fraction, "hidden_noise": found.noise}


def _knob_cells(knobs: Knobs) -> Row:
    cells = {column: knobs[name] for column, name in KNOB_COLUMNS.items()}
    words = {name: in_words(cells[name]) for name in ("backward_prefetch", "reshard_after_forward")}
    return {**cells, **words, "forward_prefetch": int(cells["forward_prefetch"]), "turned": len(changed(knobs))}


def _point_cells(point: Point, root: Path) -> Row:
    config, knobs = point.config, knobs_of(point.config)
    return {
        **common_cells(point, root),
        "ranks": config["distributed"]["dp_size"],
        "strategy": config["distributed"]["strategy"],
        "setting": setting_in_words(knobs, knobs),
        **_knob_cells(knobs),
    }


def _measured_cells(point: Point) -> Row:
    assert point.result
    run = measured(point.result)
    step, (none_us, floor_us) = run.step["point"], (run.step[name].median_us for name in ("none", "floor"))
    per_s = 1e6 / step.median_us
    return {
        "step_us": step.median_us,
        "noise_us": estimate(step.samples_us).noise_us,
        "q1_us": step.q1_us,
        "q3_us": step.q3_us,
        "repeats": len(step.samples_us),
        "none_us": none_us,
        "floor_us": floor_us,
        "host_us": run.host_us.get("point"),
        "speedup": none_us / step.median_us,
        **_hidden_cells(hidden(run.step)),
        "comm_us": none_us - floor_us,
        "exposed_us": step.median_us - floor_us,
        "us_per_sample": step.median_us / run.samples_per_step,
        "samples_per_step": run.samples_per_step,
        "samples_per_s": run.samples_per_step * per_s,
        "tokens_per_s": point.config["workload"]["tokens"] * per_s,
        "peak_memory_gb": run.peak_memory_gb,
        "parameters": run.parameters,
        "first_loss": run.losses[0],
        "loss": run.losses[-1],
        "compiled": run.compiled,
        "launch_bound": is_host_limited(point.result),
        "baseline_launch_bound": bool({"none", "floor"} & set(limited_by_host(point.result))),
    }
