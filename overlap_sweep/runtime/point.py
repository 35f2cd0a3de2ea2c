"""Run one point, whatever launcher asks for it: resolve, refuse or measure, and leave a result.json behind."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from overlap_sweep import backends, models, overlap_cfg, space, workloads
from overlap_sweep.config import NO_PART_OF_A_POINT, WORKLOAD_SCHEMAS, SweepConfig, check
from overlap_sweep.errors import UserError
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.run_directory import (
    LOG_FILE,
    RESULT_FILE,
    Result,
    Status,
    read_result,
    settings_file,
    write_atomically,
    write_result,
)
from overlap_sweep.runtime.devices import visible_gpus
from overlap_sweep.runtime.group import GroupError
from overlap_sweep.runtime.outcome import Outcome, outcomes
from overlap_sweep.runtime.pool import pool_for_point

LOG_TAIL_LINES = 20
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"precision": "bf16", "workload": {"tokens": 8192, "repeats": 21}},
    "cpu": {"precision": "fp32", "workload": {"tokens": 128, "repeats": 7}},
}
"""What null stands for, by device."""


def resolve(config: DictConfig) -> dict[str, Any]:
    """The whole configuration as plain data, with what depends on model and machine filled in.

    UserError when a value is out of range, unknown, or asks for more GPUs than there are.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"{missing[0]} has no value; give {missing[0]}=... .")
    check(config, SweepConfig)
    workloads.load(config.workload.name)
    check(config.workload, WORKLOAD_SCHEMAS[config.workload.name], "workload.")
    if config.backend != "auto":
        backends.load(config.backend)
    point: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    for name in NO_PART_OF_A_POINT:
        point.pop(name, None)
    point["model"] = dict(_resolved_model(tuple(point["model"].items())))
    runtime, workload = point["runtime"], point["workload"]
    if runtime["device"] == "auto":
        runtime["device"] = "cuda" if visible_gpus() else "cpu"
    needed = space.world_size(point)
    if runtime["device"] == "cuda" and needed > visible_gpus():
        asked = f"tp_size={point['tp_size']}"
        asked += f" with layer.num_replicas={needed // point['tp_size']}" if needed > point["tp_size"] else ""
        raise UserError(
            f"{asked} needs {needed} GPUs and {visible_gpus()} are visible; "
            "use a smaller tp_size, or runtime.device=cpu."
        )
    defaults = DEFAULTS[runtime["device"]]
    point["precision"] = point["precision"] or defaults["precision"]
    workload |= {name: value for name, value in defaults["workload"].items() if workload[name] is None}
    completed: dict[str, Any] = workloads.load(workload["name"]).complete(point)
    return completed


@cache
def _resolved_model(model: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple(models.resolve(dict(model)).items())


def run_point(config: DictConfig, directory: Path) -> float:
    """Measure the point into `directory`; returns its objective in microseconds, infinite if there is none."""
    point = resolve(config)
    result = _measure(point, directory)
    outcomes.add(Outcome.of(result, directory))
    return math.inf if result.objective_us is None else result.objective_us


def _measure(point: dict[str, Any], directory: Path) -> Result:
    status: Status
    relative_error: dict[str, float | None] = {}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    workload = workloads.load(point["workload"]["name"])
    given = workload.overlap_configs(point)
    reason = workload.refusal(point)
    if reason:
        status, error = "skipped", reason
    else:
        for variant, config in given.items():
            write_atomically(directory / settings_file(variant), overlap_cfg.text(config).encode())
        with pool_for_point(directory) as pool:
            try:
                reply = pool.run(point, directory)
                status, error = reply["status"], reply.get("error")
                relative_error = reply.get("relative_error", {})
            except GroupError as failure:
                status, error = "timeout" if failure.timed_out else "failed", str(failure)
    if status == "ok":
        return read_result(directory / RESULT_FILE)
    if status != "skipped":
        error = "\n".join(filter(None, (error, _tail(directory / LOG_FILE))))
    result = Result(
        name=directory.name,
        point=point,
        status=status,
        error=error,
        settings=given.get("", OverlapConfig()).slots,
        relative_error=relative_error,
        started=started,
    )
    write_result(directory, result)
    return result


def _tail(log: Path) -> str:
    """The end of the point's log, empty if there is none."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
