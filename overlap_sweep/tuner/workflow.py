"""From a model to files for Megatron-LM: searches every TP size, tries the best settings together, and proves them.

The best setting of each slot need not be the best in combination: slots share SMs, copy engines and power with their
neighbours. So the best settings, nearly as good ones and presets are run side by side on the whole layer.
"""

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.config import AnalysisConfig, ResolvedModel
from overlap_sweep.errors import UserError
from overlap_sweep.gpus import elsewhere, visible_gpus
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.overlap import models, overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import ASYNC_TP_BACKEND, DEFAULT, FILE, NONE, TUNED, OverlapConfig
from overlap_sweep.program import launch_command
from overlap_sweep.report.charts.figures import left_out
from overlap_sweep.report.console import console_for, print_answers, print_uses, print_written
from overlap_sweep.report.files import write_reports
from overlap_sweep.report.page import FILE_NAME
from overlap_sweep.results.records import LayerTrial, TunerRecord
from overlap_sweep.results.run_directory import Result, now, write_atomically
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.progress import shown_waiting
from overlap_sweep.search.measured import Job, SearchInputs
from overlap_sweep.search.sweeper import Sweep, case_of
from overlap_sweep.search.tasks import Task, cases
from overlap_sweep.workloads import analyse
from overlap_sweep.workloads.layer.config import Layer, WorkloadOptions
from overlap_sweep.workloads.layer.result import LayerTimes, compare
from overlap_sweep.workloads.operator.answer import ROUNDING
from overlap_sweep.workloads.operator.choice import Candidate as Measured
from overlap_sweep.workloads.operator.choice import PassChoice
from overlap_sweep.workloads.operator.config import Resolved
from overlap_sweep.workloads.operator.result import OperatorTimes
from overlap_sweep.workloads.operator.switches import LAYERS_ALIKE, plan

TP_SIZES = (2, 4, 8)

BEST = "best of each slot"

TOGETHER_NOISE = 2.0
"""Noise of the combinations' trial over that of the proof: combinations are much alike, and the proof is measured
anew."""

CONFIGS = "configs"
"""Folder next to the points with the tp_comm_overlap_cfg files of the layers."""

_OF_OPERATORS = ("workload", "operator", "phases", "profile", "repetition")

_OF_LAYERS = {declared.name for declared in fields(WorkloadOptions)}


def tune(inputs: SearchInputs) -> None:
    """Runs the tuner, prints the answer, and writes all files into the sweep's directory.

    UserError, before anything runs, if there is nothing to tune.
    """
    config = inputs.config
    values, notice = _with_tp_sizes(inputs.values, config)
    # Before anything runs; otherwise the error would come minutes later.
    check_presets(config.tuner.presets, values["tp_size"])
    whole = Sweep(inputs, values, lambda point: _refusal(point, config))
    path = whole.measurements.directory / TunerRecord.FILE
    earlier = TunerRecord.read(path) if path.exists() else None
    record = TunerRecord(
        # The trials of an earlier run over the same directory are valid until they are run again.
        together=earlier.together if earlier else [],
        proofs=earlier.proofs if earlier else [],
        command=launch_command(),
        started=now(),
        wall_s=0.0,
    )
    if notice:
        record.dropped["TP sizes"] = notice
        print(f"tuner: {notice}", flush=True)
    for stage in whole.stages:
        _tune_stage(whole, stage, record)
    whole.conclude()
    _keep(whole, record)
    with shown_waiting("writing the report"):
        analysis = analyse(whole.measurements.directory, _analysis_config(whole), record.command)
        try:
            written = write_reports(analysis, whole.measurements.directory)
            outcomes.report = whole.measurements.directory / FILE_NAME
        except UserError as error:
            # The answer itself is printed all the same.
            print(f"warning: {error}", file=sys.stderr)
            written = []
    console = console_for(sys.stdout)
    print_answers(analysis, console)
    print_written(written, console, analysis.sections)
    print_uses(analysis, console)
    for warning in left_out():
        print(f"warning: {warning}", file=sys.stderr)


def _tune_stage(whole: Sweep, stage: Sequence[Task], record: TunerRecord) -> None:
    """Searches the operators of a TP size for every model and precision, then tries the best settings on the layer."""
    began_s = time.monotonic()
    smallest = min(task.point.tp_size for task in whole.tasks)
    tuner = whole.config.tuner

    def gate(tasks: Sequence[Task]) -> str | None:
        if not tuner.drop_tp_sizes or tasks[0].point.tp_size == smallest:
            return None
        return cannot_scale([task.baseline for task in tasks if task.baseline], tuner.tp_scaling_tolerance)

    whole.search(stage, gate)
    record.search_s += time.monotonic() - began_s
    record.points = whole.measurements.budget.points
    _keep(whole, record)
    whole.profile_answers(stage, _analysis_config(whole))
    for tasks in cases(task for task in stage if task.running and tuner.prove):
        _prove(whole, tasks[0], record)
        _keep(whole, record)


def _refusal(point: Resolved, config: DictConfig) -> str | None:
    """Returns why the tuner does not search an operator, in a sentence, or None: training would not overlap it, or the
    layer that is to prove its settings cannot run at its TP size."""
    model = point.model
    if point.backend != ASYNC_TP_BACKEND and (reason := models.not_overlapped(model, point.operator)):
        return reason
    sizes = point.workload.tokens, point.tp_size
    reason = models.refusal(model, point.operator, *sizes)
    if reason or not config.tuner.prove:
        return reason
    kind = _kind_to_prove(model, config)
    if kind is None:
        return f"{models.lacks(model)}, or search without a proof with tuner.prove=false"
    return models.layer_refusal(model, kind, config.layer.micro_batch_size, *sizes)


def _kind_to_prove(model: ResolvedModel, config: DictConfig) -> str | None:
    """Returns the kind of layer to prove the model's settings on: the user's, unless that is the default."""
    chosen = str(config.layer.kind)
    return chosen if chosen != Layer().kind else models.kind_to_prove(model)


def _prove(whole: Sweep, task: Task, record: TunerRecord) -> None:
    """Tries the best combinations of the task's case on the layer, and compares the fastest with everything else."""
    tuner, tp_size = whole.config.tuner, task.point.tp_size
    chosen = case_of(task, whole.analysed(_analysis_config(whole))).plans.get(tp_size)
    if chosen is None:
        # All its points were launch-bound.
        return
    layers = models.layers_with(task.point.model)
    found = combinations(chosen.choices, max(1, tuner.together), tuner.within, tuner.unmeasured, layers)
    found |= {name: overlap_cfg.read(path) for name, path in presets(tuner.presets, tp_size).items()}
    names = {label: _write_config(whole, task, index, found[label]) for index, label in enumerate(found)}
    taken: str | None = next(iter(found))
    if len(names) > 1:
        result = _run_trial(whole, task, "together", {NONE: NONE, **names}, record.together, TOGETHER_NOISE)
        taken = _fastest_together(names, result)
    tuned = _write_config(whole, task, TUNED, found[taken]) if taken else NONE
    of_presets = {name: f"{FILE}{path}" for name, path in presets(tuner.presets, tp_size).items()}
    variants = {NONE: NONE, DEFAULT: DEFAULT, TUNED: tuned, **of_presets}
    result = _run_trial(whole, task, "proof", variants, record.proofs)
    if result.status in ("failed", "timeout") and tuned != NONE:
        # Shows whether the tuned settings break the layer.
        del variants[TUNED]
        _run_trial(whole, task, "proof_without_tuned", variants, record.proofs)


def _write_config(whole: Sweep, task: Task, name: object, config: OverlapConfig) -> str:
    """Writes the configuration; returns its variant for layers. A configuration without overlap is `none` and has no
    file."""
    if not config.switches["tp_comm_overlap"]:
        return NONE
    folder = whole.measurements.directory / CONFIGS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case_word(task)}_{name}.yaml"
    return f"{FILE}{write_atomically(path, overlap_cfg.text(config).encode())}"


def _run_trial(
    whole: Sweep,
    task: Task,
    name: str,
    variants: Mapping[str, str],
    trials: list[LayerTrial],
    noise: float = 1.0,
) -> Result:
    """Measures one layer with these variants, by their names in reports, and adds it to the trials, replacing that of
    an earlier run. `noise`: how many times that of the proof is enough."""
    point = f"{name}_{case_word(task)}"
    traced = TUNED in variants
    job = _layer_job(whole, task, point, list(dict.fromkeys(variants.values())), noise, traced=traced)
    of_proof = DEFAULT in variants and variants.get(TUNED, NONE) == NONE
    if of_proof and not workloads.load("layer").overlap_configs(job.point):
        # A layer without any possible overlap would be skipped, and "no overlap" remain unproven, or it would remain
        # unknown whether the layer runs without the tuned settings.
        job = _layer_job(whole, task, point, [NONE], noise, traced=traced)
    (result,) = whole.measurements.run([job])
    at = next((index for index, other in enumerate(trials) if other.point == point), len(trials))
    trials[at : at + 1] = [LayerTrial(tp_size=task.point.tp_size, point=point, variants=dict(variants))]
    return result


def _layer_job(whole: Sweep, task: Task, subdirectory: str, variants: list[str], noise: float, *, traced: bool) -> Job:
    goal = whole.config.tuner.noise_goal
    overrides = [
        *(override for override in task.overrides if _holds_for_layers(override)),
        "workload=layer",
        f"layer.kind={_kind_to_prove(task.point.model, whole.config)}",
        f"layer.variants={override_value(variants)}",
        # What ran in the slots of the file is seen in the traces of the proof.
        f"profile={'all' if traced and whole.config.profile != 'none' else 'none'}",
        *([] if goal is None else [f"workload.noise_goal={noise * goal:g}"]),
        f"hydra.sweep.subdir={override_value(subdirectory)}",
    ]
    return Job(overrides, resolve(whole.compose(overrides)))


def case_word(task: Task) -> str:
    """Returns a unique name of the task's case in the sweep, valid in file names."""
    point = task.point
    parts = models.short_name(point.model), f"tp{point.tp_size}", point.backend, point.precision
    more = f"tokens{point.workload.tokens}", overlap_cfg.process_wide(point)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "_".join(filter(None, (*parts, *more))))


def _holds_for_layers(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    group, _, name = key.partition(".")
    return key not in _OF_OPERATORS and (group != "workload" or name in _OF_LAYERS)


def combinations(
    choices: Sequence[PassChoice],
    limit: int,
    within: float,
    unmeasured: str = "off",
    layers: Mapping[str, int] = LAYERS_ALIKE,
) -> dict[str, OverlapConfig]:
    """Returns at most `limit` different configurations by description: first the plan of these choices, then plans with
    one pass's setting replaced by another, smallest slowdown first.

    Settings that are slower than the chosen one by more than the fraction `within` are left out. Every configuration is
    possible with Megatron-Core's switches; `unmeasured` and `layers` are as in `plan`.
    """
    found = {BEST: plan(choices, unmeasured, layers).config}
    for choice, other in _alternatives(choices, within):
        if len(found) >= limit:
            break
        config = plan([replace(c, chosen=other) if c is choice else c for c in choices], unmeasured, layers).config
        if config not in found.values():
            found[f"{choice.label} by {other.name}"] = config
    return found


def _alternatives(choices: Sequence[PassChoice], within: float) -> Iterator[tuple[PassChoice, Measured]]:
    """Yields each choice's best other candidate with the same methods and the best with other methods, within reach."""
    near = []
    for choice in choices:
        kinds_seen = set()
        for candidate in sorted(choice.candidates, key=lambda candidate: candidate.time_us):
            lost_us = candidate.time_us - choice.chosen.time_us
            same_methods = _methods(candidate) == _methods(choice.chosen)
            if candidate is choice.chosen or same_methods in kinds_seen:
                continue
            kinds_seen.add(same_methods)
            if lost_us <= within * choice.chosen.time_us:
                near.append((same_methods, lost_us, choice, candidate))
    for _, _, choice, candidate in sorted(near, key=lambda item: item[:2]):
        yield choice, candidate


def _methods(candidate: Measured) -> dict[str, str]:
    return {slot: space.method_of(setting) for slot, setting in candidate.settings.items()}


def _fastest_together(names: Mapping[str, str], result: Result) -> str | None:
    """Returns the fastest combination on the layer: the first, unless another is faster beyond the noise. None if the
    layer ran but all combinations computed wrong numbers."""
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
    (gain,) = compare([(right[fastest], right[first])], result.point.runtime.device, tried)
    return fastest if gain.faster else first


def presets(paths: Sequence[str] | None, tp_size: int | str) -> dict[str, Path]:
    """Returns the user's preset files by their names in reports. UserError if two have the same."""
    found: dict[str, Path] = {}
    for path in (Path(path.replace("{tp}", str(tp_size))).expanduser() for path in paths or ()):
        if (other := found.setdefault(f"preset {path.stem}", path)) != path:
            raise UserError(f"tuner.presets: {other} and {path} have the same name in the report; rename one.")
    return found


def check_presets(paths: Sequence[str] | None, tp_sizes: Sequence[str]) -> None:
    """Raises UserError if a preset file is not a valid tp_comm_overlap_cfg, or two have the same name."""
    for path in (path for tp_size in tp_sizes for path in presets(paths, tp_size).values()):
        overlap_cfg.read(path)


def _analysis_config(whole: Sweep) -> AnalysisConfig:
    tuner = whole.config.tuner
    return AnalysisConfig(
        tp_scaling_tolerance=tuner.tp_scaling_tolerance,
        overlap_threshold=tuner.overlap_threshold,
        unmeasured=tuner.unmeasured,
    )


def _keep(whole: Sweep, record: TunerRecord) -> None:
    record.wall_s = time.monotonic() - whole.measurements.budget.began_s
    record.dropped |= whole.dropped
    record.write(whole.measurements.directory)


def _with_tp_sizes(values: dict[str, list[str]], config: DictConfig) -> tuple[dict[str, list[str]], str | None]:
    """Returns the values with the TP sizes to search, smallest first, and a notice about those that need more GPUs than
    are visible. UserError if none is left."""
    if "tp_size" in values:
        return values, None
    sizes = [size for size in TP_SIZES if size <= config.max_tp_size]
    if not sizes:
        raise UserError(f"max_tp_size={config.max_tp_size} leaves no communication to overlap; give 2 or more.")
    device = config.runtime.device
    gpus = 0 if elsewhere() or device == "cpu" else visible_gpus()
    limited = not elsewhere() and (device == "cuda" or (device == "auto" and gpus))
    possible = [size for size in sizes if size <= gpus] if limited else sizes
    if not possible:
        raise UserError(f"Tensor parallelism needs at least 2 GPUs; {gpus} visible. Try runtime.device=cpu.")
    missing = [f"TP={size}" for size in sizes if size not in possible]
    notice = f"{', '.join(missing)} left out: only {gpus} GPUs are visible" if missing else None
    return {**values, "tp_size": list(map(str, possible))}, notice


def cannot_scale(baselines: Sequence[Result], tolerance: float) -> str | None:
    """Returns why a TP size cannot scale with any overlap, from its operators' baselines, or None.

    Its time can at best be the floor. It scales while that is at most (1 + tolerance) x TP=1's time / TP size.
    """
    tp_size = baselines[0].point_as(Resolved).tp_size
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
        f"even with all communication hidden it would take {ratio:.2f} times TP=1's time / {tp_size}, more than the "
        f"allowed {1 + tolerance:.2f} (tuner.drop_tp_sizes=false searches it anyway)"
    )
