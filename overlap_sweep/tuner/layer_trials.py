"""What is tried on the whole layer: the best of each slot together, what is nearly as good, and presets, side by side.

The best of each slot need not be the best together: slots share SMs, copy engines and power with their neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.records import LayerTrial
from overlap_sweep.results.run_directory import Result, write_atomically
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search.cell import Candidate
from overlap_sweep.search.choices import compose
from overlap_sweep.search.measured import Job, override_value
from overlap_sweep.search.rounds import Task
from overlap_sweep.search.sweeper import Sweep
from overlap_sweep.workloads.layer.config import WorkloadOptions
from overlap_sweep.workloads.operator.choice import Candidate as Measured
from overlap_sweep.workloads.operator.choice import PassChoice
from overlap_sweep.workloads.operator.switches import plan

BEST = "best of each slot"

CONFIGS = "configs"
"""Beside the points: the files that the layers overlap by."""

_OF_OPERATORS = ("workload", "operator", "phases", "profile", "repetition")

_OF_LAYERS = {declared.name for declared in fields(WorkloadOptions)}


def combinations(
    choices: Sequence[PassChoice], limit: int, within: float, unmeasured: str = "off"
) -> dict[str, OverlapConfig]:
    """At most `limit` different configurations by what they are: first the plan of these choices, then with one pass's
    setting replaced by another way to overlap it, those that should cost least first.

    A setting that is slower than the chosen one by more than `within` of its time is not tried. Each configuration is
    what Megatron-Core's switches allow, with slots that nothing was measured of as `unmeasured` says.
    """
    found = {BEST: plan(choices, unmeasured).config}
    for choice, other in _alternatives(choices, within):
        if len(found) >= limit:
            break
        config = plan([replace(c, chosen=other) if c is choice else c for c in choices], unmeasured).config
        if config not in found.values():
            found[f"{choice.label} by {other.name}"] = config
    return found


def _alternatives(choices: Sequence[PassChoice], within: float) -> Iterator[tuple[PassChoice, Measured]]:
    """For each choice its best candidate that overlaps by other methods, and its best one by the same."""
    near = []
    for choice in choices:
        kinds_seen = set()
        for candidate in sorted(choice.candidates, key=lambda candidate: candidate.time_us):
            lost_us = candidate.time_us - choice.chosen.time_us
            same_methods = _methods(candidate) == _methods(choice.chosen)
            if candidate is choice.chosen or not candidate.measured or same_methods in kinds_seen:
                continue
            kinds_seen.add(same_methods)
            if lost_us <= within * choice.chosen.time_us:
                near.append((same_methods, lost_us, choice, candidate))
    for _, _, choice, candidate in sorted(near, key=lambda item: item[:2]):
        yield choice, candidate


def _methods(candidate: Measured) -> dict[str, str]:
    return {slot: setting["method"] for slot, setting in candidate.settings.items()}


NONE, DEFAULT, TUNED = "none", "default", "tuned"


def write_config(directory: Path, name: str, config: OverlapConfig) -> str:
    """Writes the configuration; returns the variant under which a layer finds it."""
    folder = directory / CONFIGS
    folder.mkdir(parents=True, exist_ok=True)
    path = write_atomically(folder / f"{name}.yaml", overlap_cfg.text(config).encode())
    return f"file:{path}"


def run_trial(whole: Sweep, task: Task, name: str, variants: Mapping[str, str]) -> tuple[LayerTrial, Result]:
    """Measure one layer under these variants, given by what they are called in reports."""
    subdirectory = f"{name}_{case_word(task)}"
    job = _layer_job(whole, task, subdirectory, list(dict.fromkeys(variants.values())))
    if variants.get(TUNED) == NONE and not workloads.load("layer").overlap_configs(job.point):
        # A layer of which nothing can overlap is skipped, and that no overlap is best would remain unproven.
        job = _layer_job(whole, task, subdirectory, [NONE])
    (result,) = whole.measurements.run([job])
    return LayerTrial(tp_size=task.point["tp_size"], point=subdirectory, variants=dict(variants)), result


def _layer_job(whole: Sweep, task: Task, subdirectory: str, variants: list[str]) -> Job:
    overrides = [
        *(override for override in task.overrides if _holds_for_layers(override)),
        "workload=layer",
        f"layer.variants={override_value(variants)}",
        "profile=none",
        f"hydra.sweep.subdir={override_value(subdirectory)}",
    ]
    return Job(overrides, resolve(compose(whole.config, whole.context, overrides)))


def case_word(task: Task) -> str:
    """Fit for a file: what tells the cases of a sweep apart."""
    point = task.point
    model = str(point["model"]["name"]).rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]
    parts = model, f"tp{point['tp_size']}", point["backend"], point["precision"], f"tokens{point['workload']['tokens']}"
    name = "_".join(parts)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _holds_for_layers(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    group, _, name = key.partition(".")
    return key not in _OF_OPERATORS and (group != "workload" or name in _OF_LAYERS)


def presets(paths: Sequence[str] | None, tp_size: int) -> dict[str, str]:
    """Returns the variants of the files that the user named, by what they are called in reports."""
    files = _preset_files(paths, tp_size)
    return {f"preset {path.stem}": f"file:{path}" for path in files}


def check_presets(paths: Sequence[str] | None, tp_sizes: Sequence[str]) -> None:
    """UserError where a file that the user named is no tp_comm_overlap_cfg."""
    for tp_size in tp_sizes:
        by_name: dict[str, Path] = {}
        for path in _preset_files(paths, tp_size):
            overlap_cfg.read(path)
            other = by_name.setdefault(path.stem, path)
            if other != path:
                raise UserError(f"tuner.presets: {other} and {path} would have one name in the report; rename one.")


def _preset_files(paths: Sequence[str] | None, tp_size: int | str) -> list[Path]:
    return [Path(given.replace("{tp}", str(tp_size))).expanduser() for given in paths or ()]


def seed_presets(task: Task, paths: Sequence[str] | None) -> None:
    """Have the task's operator measured with the settings of the presets, too, as far as it can be."""
    workload = workloads.load("operator")
    for path in _preset_files(paths, task.point["tp_size"]):
        slots = overlap_cfg.read(path).slots
        for pass_name in space.PASSES:
            candidate = Candidate.of(overlap_cfg.settings_of_pass(slots, task.operator, pass_name))
            phases = {slot.partition("_")[2]: setting for slot, setting in candidate.settings.items()}
            if phases and not workload.refusal({**task.point, "phases": phases}):
                task.seed(pass_name, candidate)
