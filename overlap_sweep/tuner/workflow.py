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

from overlap_sweep.analysis.estimate import median_interval
from overlap_sweep.analysis.points import Case
from overlap_sweep.analysis.sweep import Analysis, CaseAnalysis, analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report import text
from overlap_sweep.report.console import console_for
from overlap_sweep.report.files import write_reports
from overlap_sweep.run_directory import Result, TunerRecord, write_tuner_record
from overlap_sweep.runtime.devices import visible_gpus
from overlap_sweep.search.rounds import Task
from overlap_sweep.search.sweeper import Sweep, cases, search, set_up, swept_values
from overlap_sweep.tuner.combinations import combinations
from overlap_sweep.tuner.layer_trials import case_word, check_presets, presets, run_trial, seed_presets, write_config
from overlap_sweep.tuner.tp_sizes import cannot_scale, tp_sizes_up_to

NONE, DEFAULT, TUNED = "none", "default", "tuned"


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
    record = TunerRecord(
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
    whole.report.conclude(whole.measurements)
    _keep(whole, record)
    analysis = _analyse(whole)
    written = write_reports(analysis, whole.measurements.directory, record.command)
    console = console_for(sys.stdout)
    text.print_answers(analysis, console)
    text.print_written(written, console)


def _with_tp_sizes(values: dict[str, list[str]], config: DictConfig) -> tuple[dict[str, list[str]], str | None]:
    if "tp_size" in values:
        return values, None
    gpus = visible_gpus() if config.runtime.device != "cpu" else 0
    on_gpus = config.runtime.device == "cuda" or (config.runtime.device == "auto" and gpus)
    tp_sizes, notice = tp_sizes_up_to(config.max_tp_size, gpus if on_gpus else None)
    return {**values, "tp_size": [str(tp_size) for tp_size in tp_sizes]}, notice


def _tune_stage(whole: Sweep, stage: Sequence[Task], record: TunerRecord) -> None:
    """Search the operators of one TP size (of every model and precision), then take their best to the whole layer."""
    began_s = time.monotonic()
    smallest = min(task.point["tp_size"] for task in whole.tasks)
    tuner = whole.config.tuner

    def gate(tasks: Sequence[Task]) -> str | None:
        if not tuner.drop_tp_sizes or tasks[0].point["tp_size"] == smallest:
            return None
        return cannot_scale([task.baseline for task in tasks if task.baseline], tuner.tp_scaling_tolerance)

    search(whole, stage, gate)
    record.search_s += time.monotonic() - began_s
    record.points = whole.measurements.budget.points
    _keep(whole, record)
    if not tuner.prove:
        return
    for tasks in cases([task for task in stage if task.running]):
        _prove(whole, tasks, record)
        _keep(whole, record)


def _prove(whole: Sweep, tasks: Sequence[Task], record: TunerRecord) -> None:
    """Try the best combinations together, and the best of them against everything else."""
    tuner, directory, first = whole.config.tuner, whole.measurements.directory, tasks[0]
    tp_size = first.point["tp_size"]
    choices = _case_analysis(whole, first).plans[tp_size].choices
    found = combinations(choices, max(1, tuner.together), tuner.within)
    names = {}
    for index, (label, config) in enumerate(found.items()):
        # A configuration that overlaps nothing is `none`, and no file says that.
        overlaps = config.switches["tp_comm_overlap"]
        names[label] = write_config(directory, f"{case_word(first)}_{index}", config) if overlaps else NONE
    taken = next(iter(found))
    if len(names) > 1 and tuner.together:
        trial, result = run_trial(whole, first, "together", {NONE: NONE, **names})
        record.together.append(trial)
        taken = _fastest_together(names, result)
    tuned = names[taken]
    if tuned != NONE:
        tuned = write_config(directory, f"{case_word(first)}_tuned", found[taken])
    others = {NONE: NONE, DEFAULT: DEFAULT}
    trial, _ = run_trial(whole, first, "proof", {**others, TUNED: tuned, **presets(tuner.presets, tp_size)})
    record.proofs.append(trial)


def _case_analysis(whole: Sweep, task: Task) -> CaseAnalysis:
    """Of the points measured so far, those that may be compared with the task's."""
    assert task.baseline
    environment = task.baseline.environment
    point = task.point
    case = Case(
        model=point["model"]["name"],
        backend=point["backend"],
        device=environment.get("gpu") or point["runtime"]["device"],
        precision=point["precision"],
        tokens=point["workload"]["tokens"],
    )
    return next(found for found in _analyse(whole).cases if found.case == case)


def _analyse(whole: Sweep) -> Analysis:
    tuner = whole.config.tuner
    config = AnalysisConfig(tp_scaling_tolerance=tuner.tp_scaling_tolerance, overlap_threshold=tuner.overlap_threshold)
    return analyse(whole.measurements.directory, config)


def _fastest_together(names: Mapping[str, str], result: Result) -> str:
    """Which combination is fastest on the layer: the first unless another is faster beyond the noise."""
    first = next(iter(names))
    measured = {label: result.variants[name] for label, name in names.items() if name in result.variants}
    right = {label: variant for label, variant in measured.items() if not variant.launch_bound}
    if not right:
        return first
    fastest = min(right, key=lambda label: right[label].times["all"].median_us)
    if first not in right:
        return fastest
    pairs = zip(right[fastest].times["all"].samples_us, right[first].times["all"].samples_us, strict=True)
    return fastest if median_interval([a / b for a, b in pairs]).high < 1 else first


def _keep(whole: Sweep, record: TunerRecord) -> None:
    record.wall_s = whole.measurements.budget.elapsed_s
    record.dropped |= whole.report.dropped
    write_tuner_record(whole.measurements.directory, record)
