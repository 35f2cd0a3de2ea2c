"""Layer points of the tuner: configurations side by side on the whole layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.config import LayerWorkload
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.records import LayerTrial
from overlap_sweep.results.run_directory import Result, write_atomically
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search.cell import Candidate
from overlap_sweep.search.measured import Job, override_value
from overlap_sweep.search.rounds import Task
from overlap_sweep.search.sweeper import Sweep, compose

NONE, DEFAULT, TUNED = "none", "default", "tuned"

CONFIGS = "configs"
"""Beside the points: the files that the layers overlap by."""

_OF_OPERATORS = ("workload", "operator", "phases", "profile", "repetition")
_OF_LAYERS = {declared.name for declared in fields(LayerWorkload)}


def write_config(directory: Path, name: str, config: OverlapConfig) -> str:
    """The variant's name under which a layer finds the configuration."""
    folder = directory / CONFIGS
    folder.mkdir(parents=True, exist_ok=True)
    path = write_atomically(folder / f"{name}.yaml", overlap_cfg.text(config).encode())
    return f"file:{path}"


def run_trial(whole: Sweep, task: Task, name: str, variants: Mapping[str, str]) -> tuple[LayerTrial, Result]:
    """Measure one layer under these variants, given by what they are called in reports."""
    subdirectory = f"{name}_{case_word(task)}"
    job = _job(whole, task, subdirectory, list(dict.fromkeys(variants.values())))
    if variants.get(TUNED) == NONE and not workloads.load("layer").overlap_configs(job.point):
        # A layer of which nothing can overlap is skipped, and that no overlap is best would remain unproven.
        job = _job(whole, task, subdirectory, [NONE])
    (result,) = whole.measurements.run([job])
    return LayerTrial(tp_size=task.point["tp_size"], point=subdirectory, variants=dict(variants)), result


def _job(whole: Sweep, task: Task, subdirectory: str, variants: list[str]) -> Job:
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
    """Variants of the files that the user named, by what they are called."""
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
