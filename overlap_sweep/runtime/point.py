"""Run one point, whatever launcher asks for it: resolve, refuse or measure, and leave a result.json behind."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from overlap_sweep import backends, workloads
from overlap_sweep.config import (
    NO_PART_OF_A_POINT,
    OF_LANGUAGE_MODELS,
    OF_WORKLOAD,
    OPTIONS_OF_WORKLOAD,
    READ_OF_MODEL,
    WORKLOAD_SCHEMAS,
    SweepConfig,
)
from overlap_sweep.declared import check
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, overlap_cfg
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.run_directory import (
    LOG_FILE,
    RESULT_FILE,
    FailedAttempt,
    Result,
    Status,
    clear,
    read_result,
    settings_file,
    write_atomically,
    write_result,
)
from overlap_sweep.runtime.attempts import Attempts, current_launch, limits
from overlap_sweep.runtime.group import GroupError, WorkerPool, pool_for_point
from overlap_sweep.runtime.group_config import (
    check_multicast,
    check_temporary_directory,
    check_wrapper,
    elsewhere,
    machine_of,
    visible_gpus,
)
from overlap_sweep.runtime.kept import LASTING, check_store, kept_result, remember, remembered, whole_result
from overlap_sweep.runtime.outcome import Outcome, outcomes, tail
from overlap_sweep.runtime.stopping import stop_if_told

LOG_TAIL_LINES = 20
LONGEST_ERROR = 10_000
"""Characters; some exceptions print their data."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"precision": "bf16", "workload": {"tokens": 8192, "repeats": 21}},
    "cpu": {"precision": "fp32", "workload": {"tokens": 128, "repeats": 7}},
}
"""What null stands for, by device."""

_PRECISION_BY = {"fsdp": "training.mixed_precision", "tp_training": "tp_training.dtype"}
"""Workloads whose precision has a name of its own."""

_INSTEAD = {"fsdp": {"num_layers": "ranking.num_layers", "vocab_size": "ranking.vocab_size"}}
"""By workload, what says what a key of `model` says elsewhere."""


def resolve(config: DictConfig) -> dict[str, Any]:
    """The whole configuration as plain data, with what depends on model and machine filled in.

    UserError when a value is out of range, unknown, or asks for more GPUs than there are, and where no group of workers
    could be started here.
    """
    missing = sorted(key for key in OmegaConf.missing_keys(config) if not key.startswith("model_preset."))
    if missing:
        raise UserError(f"{missing[0]} has no value; give {missing[0]}=... .")
    check(config, SweepConfig)
    workloads.load(config.workload.name)
    _refuse_idle(config)
    check(config.workload, WORKLOAD_SCHEMAS[config.workload.name], "workload.")
    of_kernels = config.workload.name == "kernel"
    if config.backend != "auto":
        (backends.load_kernels if of_kernels else backends.load)(config.backend)
    point: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    for name in NO_PART_OF_A_POINT:
        point.pop(name, None)
    for workload_name, names in OPTIONS_OF_WORKLOAD.items():
        for name in names if config.workload.name != workload_name else ():
            if point.pop(name, None) is not None:
                raise UserError(f"{name}={config[name]} is for workload={workload_name}; add that, or leave it out.")
    for workload_name, names in OF_WORKLOAD.items():
        if config.workload.name != workload_name:
            _leave_out(point, names, workload_name)
    if config.precision and config.workload.name in _PRECISION_BY:
        instead = f"give {_PRECISION_BY[config.workload.name]} to workload={config.workload.name} instead"
        raise UserError(f"precision={config.precision}: {instead}.")
    language_model = {name: point["model"].pop(name) for name in OF_LANGUAGE_MODELS}
    point["model"] = dict(_resolved_model(tuple(point["model"].items())))
    if config.workload.name == "tp_training":
        point["model"] |= language_model
    runtime, workload = point["runtime"], point["workload"]
    if runtime["device"] == "auto":
        runtime["device"] = "cuda" if elsewhere() or visible_gpus() else "cpu"
    needed = workloads.gpus(point)
    if runtime["device"] == "cuda" and not elsewhere() and needed > visible_gpus():
        asked, mend = workloads.of(point).fewer_gpus(point)
        raise UserError(
            f"{asked} needs {needed} GPUs and {visible_gpus()} are visible; use {mend}, or runtime.device=cpu."
        )
    defaults = DEFAULTS[runtime["device"]]
    if not point.get("dtype"):
        point["precision"] = point["precision"] or defaults["precision"]
    workload |= {name: value for name, value in defaults["workload"].items() if workload[name] is None}
    check_multicast(runtime, os.environ)
    completed: dict[str, Any] = workloads.load(workload["name"]).complete(point)
    if not elsewhere():
        check_wrapper(completed)
        check_temporary_directory()
    return completed


def _refuse_idle(config: DictConfig) -> None:
    """UserError where a key of `model` was given that the workload does not read: the run would not be what it says."""
    if config.model_preset is None:
        # A configuration of the user's own that composes none.
        return
    preset: Any = OmegaConf.to_container(config.model_preset, resolve=True)
    preset = {**_usual()["model"], **preset}
    given = [str(key) for key, value in config.model.items() if value != preset[key]]
    workload = config.workload.name
    without_model = workload == "kernel" and config.n is not None
    read = () if without_model else READ_OF_MODEL[workload]
    idle = next((key for key in given if key not in read), None)
    if idle is None:
        return
    instead = _INSTEAD.get(workload, {}).get(idle)
    reads = f"it reads model.{{{','.join(read)}}}" if read else "it reads nothing of model"
    beside = " with n and k" if without_model else ""
    raise UserError(
        f"model.{idle}={config.model[idle]}: workload={workload}{beside} does not use it; "
        f"{f'give {instead} instead; ' if instead else ''}{reads}."
    )


def _leave_out(point: dict[str, Any], names: Sequence[str], workload: str) -> None:
    """What only another workload knows. UserError where something of it was asked for."""
    for name in names:
        given, unasked = point.pop(name), _usual()[name]
        changed = [key for key, value in given.items() if value != unasked[key]]
        if changed:
            raise UserError(f"{name}.{changed[0]} is for workload={workload}; add that, or leave it out.")


@cache
def _usual() -> dict[str, Any]:
    """What is not asked for."""
    usual: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(SweepConfig))  # type: ignore[assignment]
    return usual


@cache
def _resolved_model(model: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple(models.resolve(dict(model)).items())


def run_point(config: DictConfig, directory: Path, may_keep: bool = False) -> float:
    """Measure the point into `directory`; returns its objective in microseconds, infinite if there is none.

    With `may_keep` a result that the directory has already is as good.
    """
    point = resolve(config)
    check_store(config)
    kept = kept_result(directory, point) if may_keep else None
    result = kept or remembered(config, point, directory) or measure(point, directory)
    if not kept:
        remember(config, result, directory)
    outcomes.add(Outcome.of(result, directory))
    return objective_us(result)


def objective_us(result: Result | None) -> float:
    """What sweepers minimise; infinite where nothing was measured, so that none prefers it."""
    return math.inf if result is None or result.objective_us is None else result.objective_us


def measure(point: dict[str, Any], directory: Path) -> Result:
    """Have the point measured by a group of workers, tried again where that may help, and write its result."""
    clear(directory)
    workload = workloads.of(point)
    reason = workload.refusal(point)
    if reason:
        return _without_times(point, directory, "skipped", reason)
    for variant, settings in workload.overlap_configs(point).items():
        write_atomically(directory / settings_file(variant), overlap_cfg.text(settings).encode())
    attempts = Attempts(directory)
    # Slurm queues a job again when its node fails or somebody else needs it.
    attempts.bury("the job that measured it was ended and queued again", lost=True)
    reply: dict[str, Any] = {}
    log_start = 0
    with pool_for_point(directory) as pool:
        while len(attempts.failed) <= point["runtime"]["retries"]:
            attempts.begin()
            log_start = _size(directory / LOG_FILE)
            try:
                reply = _attempt(pool, point, directory, attempts.ended)
            except BaseException:
                attempts.end("interrupted")
                raise
            if reply["status"] in LASTING:
                break
            attempts.end(reply["status"], reply["error"][:LONGEST_ERROR])
            if reply.get("final"):
                break
            if len(attempts.failed) <= point["runtime"]["retries"]:
                stop_if_told()
            # What is left of memory, streams and other ranks' collectives must not fail the next attempt, too. Nor may
            # what the failed one wrote be taken for the next one's.
            pool.close()
            clear(directory)
    if reply.get("status") == "ok":
        result = read_result(directory / RESULT_FILE)
        limits.learn(result)
    elif reply.get("status") == "skipped":
        result = _without_times(point, directory, "skipped", reply["error"])
    else:
        *earlier, last = attempts.failed
        error = "\n".join(filter(None, (last.error, tail(directory / LOG_FILE, LOG_TAIL_LINES, log_start))))
        result = _without_times(
            *(point, directory, last.status, error),
            earlier_attempts=earlier,
            relative_error=reply.get("relative_error", {}),
        )
    attempts.forget()
    return result


def _attempt(
    pool: WorkerPool, point: dict[str, Any], directory: Path, earlier: Sequence[FailedAttempt]
) -> dict[str, Any]:
    """`status`, and unless that is `ok` an `error`; `final` where another attempt would end alike."""
    try:
        reply = pool.run(point, directory, limits.limit_s(point), earlier)
    except GroupError as failure:
        return {"status": "timeout" if failure.timed_out else "failed", "error": str(failure)}
    if reply["status"] == "ok" and whole_result(directory) is None:
        return {"status": "failed", "error": f"the workers left no whole {RESULT_FILE}"}
    return {**reply, "final": reply.get("sound", False)}


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _without_times(point: dict[str, Any], directory: Path, status: Status, error: str, **more: Any) -> Result:
    """Write why the point was not measured."""
    given = workloads.of(point).overlap_configs(point)
    result = Result(
        name=directory.name,
        point=point,
        status=status,
        error=error,
        settings=given.get("", OverlapConfig()).slots,
        environment=machine_of(point),
        launch=current_launch(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    )
    write_result(directory, result)
    return result
