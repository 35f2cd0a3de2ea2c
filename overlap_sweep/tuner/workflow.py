"""From a model to files for Megatron-LM: every TP size is searched, tried together, and proven, smallest first."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

from overlap_sweep.analysis.sweep import Analysis, analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, space
from overlap_sweep.report import text
from overlap_sweep.report.console import console_for
from overlap_sweep.report.files import write_reports
from overlap_sweep.results.records import LayerTrial, TunerRecord, read_tuner_record, write_tuner_record
from overlap_sweep.results.run_directory import TUNER_FILE, Result
from overlap_sweep.runtime.group_config import elsewhere, visible_gpus
from overlap_sweep.search.rounds import Task
from overlap_sweep.search.sweeper import Sweep, case_of, cases, profile_answers, search, set_up, swept_values
from overlap_sweep.tuner.layer_trials import (
    DEFAULT,
    NONE,
    TUNED,
    case_word,
    check_presets,
    combinations,
    presets,
    run_trial,
    seed_presets,
    write_config,
)
from overlap_sweep.workloads.layer.answer import compare
from overlap_sweep.workloads.layer.result import LayerTimes
from overlap_sweep.workloads.operator.result import OperatorTimes
from overlap_sweep.workloads.operator.scaling import ROUNDING

TP_SIZES = (2, 4, 8)


def tune(
    config: DictConfig, context: HydraContext, launcher: Launcher, params: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Run everything, print the answer, and write all files into the sweep's directory.

    UserError when there is nothing to tune; nothing was started then.
    """
    values, notice = _with_tp_sizes(swept_values(context, params, arguments), config)
    # Before anything is started or written: it would be noticed minutes later.
    check_presets(config.tuner.presets, values["tp_size"])
    whole = set_up(config, context, launcher, values)
    together, proofs = _earlier_trials(whole)
    record = TunerRecord(
        together=together,
        proofs=proofs,
        command=shlex.join(["python", *sys.argv]),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_s=0.0,
    )
    if notice:
        record.dropped["TP sizes"] = notice
        print(f"tuner: {notice}", flush=True)
    for task in whole.tasks:
        seed_presets(task, config.tuner.presets)
    for stage in whole.stages:
        _tune_stage(whole, stage, record)
    whole.report.conclude()
    _keep(whole, record)
    analysis = _analyse(whole)
    written = write_reports(analysis, whole.measurements.directory, record.command)
    console = console_for(sys.stdout)
    text.print_answers(analysis, console)
    text.print_written(written, console, analysis.sections)


def _earlier_trials(whole: Sweep) -> tuple[list[LayerTrial], list[LayerTrial]]:
    """Of a run over the same directory that this one goes on from: they hold until they are run again."""
    path = whole.measurements.directory / TUNER_FILE
    if not path.exists():
        return [], []
    earlier = read_tuner_record(path)
    return earlier.together, earlier.proofs


def _add(trial: LayerTrial, trials: list[LayerTrial]) -> None:
    """In place of the same one of an earlier run."""
    at = next((index for index, other in enumerate(trials) if other.point == trial.point), len(trials))
    trials[at : at + 1] = [trial]


def _with_tp_sizes(values: dict[str, list[str]], config: DictConfig) -> tuple[dict[str, list[str]], str | None]:
    if "tp_size" in values:
        return values, None
    if elsewhere():
        return {**values, "tp_size": [str(tp_size) for tp_size in tp_sizes_up_to(config.max_tp_size, None)[0]]}, None
    gpus = visible_gpus() if config.runtime.device != "cpu" else 0
    on_gpus = config.runtime.device == "cuda" or (config.runtime.device == "auto" and gpus)
    tp_sizes, notice = tp_sizes_up_to(config.max_tp_size, gpus if on_gpus else None)
    return {**values, "tp_size": [str(tp_size) for tp_size in tp_sizes]}, notice


def _tune_stage(whole: Sweep, stage: Sequence[Task], record: TunerRecord) -> None:
    """Search the operators of one TP size (of every model and precision), then take their best to the whole layer."""
    began_s = time.monotonic()
    smallest = min(task.point["tp_size"] for task in whole.tasks)
    tuner = whole.config.tuner

    possible = []
    for tasks in cases(stage):
        if tuner.prove and (reason := _layer_refusal(tasks[0])):
            whole.report.drop(tasks[0].case_label, reason)
        else:
            possible += tasks

    def gate(tasks: Sequence[Task]) -> str | None:
        if not tuner.drop_tp_sizes or tasks[0].point["tp_size"] == smallest:
            return None
        return cannot_scale([task.baseline for task in tasks if task.baseline], tuner.tp_scaling_tolerance)

    search(whole, possible, gate)
    record.search_s += time.monotonic() - began_s
    record.points = whole.measurements.budget.points
    _keep(whole, record)
    profile_answers(possible, whole.measurements, lambda: _analyse(whole))
    if not tuner.prove:
        return
    for tasks in cases([task for task in possible if task.running]):
        with whole.measurements.budget.paused():
            _prove(whole, tasks, record)
        _keep(whole, record)
    # The layer may have decided for others.
    profile_answers(possible, whole.measurements, lambda: _analyse(whole))


def _layer_refusal(task: Task) -> str | None:
    """Why no whole layer of the model can run at the task's TP size, whatever single operators can; or None."""
    point = task.point
    if lacking := models.lacks(point["model"]):
        return f"{lacking}, or search without a whole layer: tuner.prove=false"
    sizes = point["model"], point["workload"]["tokens"], point["tp_size"]
    reasons = (models.refusal(sizes[0], operator, *sizes[1:]) for operator in space.OPERATORS)
    return next(filter(None, reasons), None)


def _prove(whole: Sweep, tasks: Sequence[Task], record: TunerRecord) -> None:
    """Try the best combinations together, and the best of them against everything else."""
    tuner, directory, first = whole.config.tuner, whole.measurements.directory, tasks[0]
    tp_size = first.point["tp_size"]
    plan = case_of(first, _analyse(whole)).plans.get(tp_size)
    if plan is None:
        # Every point of it was launch-bound.
        return
    choices = plan.choices
    found = combinations(choices, max(1, tuner.together), tuner.within, tuner.unmeasured)
    names = {}
    for index, (label, config) in enumerate(found.items()):
        # A configuration that overlaps nothing is `none`, and no file says that.
        overlaps = config.switches["tp_comm_overlap"]
        names[label] = write_config(directory, f"{case_word(first)}_{index}", config) if overlaps else NONE
    taken: str | None = next(iter(found))
    if len(names) > 1:
        trial, result = run_trial(whole, first, "together", {NONE: NONE, **names})
        _add(trial, record.together)
        taken = _fastest_together(names, result)
    tuned = names[taken] if taken else NONE
    if taken and tuned != NONE:
        tuned = write_config(directory, f"{case_word(first)}_tuned", found[taken])
    own, given = {NONE: NONE, DEFAULT: DEFAULT}, presets(tuner.presets, tp_size)
    trial, result = run_trial(whole, first, "proof", {**own, TUNED: tuned, **given})
    _add(trial, record.proofs)
    if result.status in ("failed", "timeout") and tuned != NONE:
        # Whether it is the tuned one that breaks the layer must be known before anybody trains with it.
        trial, _ = run_trial(whole, first, "proof_without_tuned", {**own, **given})
        _add(trial, record.proofs)


def _analyse(whole: Sweep) -> Analysis:
    tuner = whole.config.tuner
    config = AnalysisConfig(
        tp_scaling_tolerance=tuner.tp_scaling_tolerance,
        overlap_threshold=tuner.overlap_threshold,
        unmeasured=tuner.unmeasured,
    )
    return analyse(whole.measurements.directory, config)


def _fastest_together(names: Mapping[str, str], result: Result) -> str | None:
    """Which combination is fastest on the layer: the first unless another is faster beyond the noise. None where the
    layer ran and all of them were left out, since they compute wrong numbers there."""
    first = next(iter(names))
    if result.status != "ok":
        return first
    variants = result.measured_as(LayerTimes).variants
    measured = {label: variants[name] for label, name in names.items() if name in variants}
    right = {label: variant for label, variant in measured.items() if not variant.launch_bound}
    if not right:
        return first if measured else None
    fastest = min(right, key=lambda label: right[label].times["all"].median_us)
    if first not in right:
        return fastest
    tried = max(len(right) - 1, 1)
    (compared,) = compare([(right[fastest], right[first])], result.point["runtime"]["device"], tried)
    return fastest if compared.faster else first


def _keep(whole: Sweep, record: TunerRecord) -> None:
    record.wall_s = time.monotonic() - whole.measurements.budget.began_s
    record.dropped |= whole.report.dropped
    write_tuner_record(whole.measurements.directory, record)


def tp_sizes_up_to(most: int, gpus: int | None) -> tuple[list[int], str | None]:
    """TP sizes to search, smallest first, and what to say of those that the machine has too few GPUs for.

    `gpus` is None on a CPU, where ranks need none. UserError when none is left.
    """
    asked = [size for size in TP_SIZES if size <= most]
    if not asked:
        raise UserError(f"max_tp_size={most} leaves nothing that communicates; give 2 or more.")
    possible = [size for size in asked if gpus is None or size <= gpus]
    if not possible:
        raise UserError(f"tensor parallelism needs 2 GPUs at least and {gpus} is visible; or use runtime.device=cpu.")
    missing = [f"TP={size}" for size in asked if size not in possible]
    return possible, f"{', '.join(missing)} left out: {gpus} GPUs are visible" if missing else None


def cannot_scale(baselines: Sequence[Result], tolerance: float) -> str | None:
    """Why a TP size cannot be efficient whatever its overlap, given its operators without overlap; or None.

    Its times can at best be the floor's. It scales while they are at most (1 + tolerance) x TP=1's / TP size.
    """
    tp_size = baselines[0].point["tp_size"]
    floor_us, tp1_us = 0.0, 0.0
    for result in baselines:
        for times in (result.measured_as(OperatorTimes).times[pass_name] for pass_name in space.PASSES):
            if times.tp1 is None:
                return None
            floor_us += times.floor.median_us
            tp1_us += times.tp1.median_us
    ratio = floor_us * tp_size / tp1_us
    if ratio <= 1 + tolerance + ROUNDING:
        return None
    return (
        f"even with all communication hidden it would take {ratio:.2f} times TP=1's time / {tp_size}, and "
        f"{1 + tolerance:.2f} is allowed (tuner.drop_tp_sizes=false searches it all the same)"
    )
