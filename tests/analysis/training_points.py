"""Run directories of training steps and of copies, with numbers that one can compute with by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlap_sweep.run_directory import CopyTimes, Result, Status, Timing, TrainingRun, write_result
from overlap_sweep.training_config import Compile, Distributed, Fsdp, Profiling, Ranking, Streams, Training
from tests.analysis.run_directories import ENVIRONMENT, timing
from tests.points import MODEL, RUNTIME

TOKENS_PER_SAMPLE = 145


def training_config(**changes: Any) -> dict[str, Any]:
    """A resolved point: FSDP2 on four GPUs in bf16, 64 samples on each. A name with a dot changes a section's knob:
    `**{"fsdp.forward_prefetch": 1}`."""
    config: dict[str, Any] = {
        "runtime": {**RUNTIME, "device": "cuda", "max_connections": None},
        "profile": "none",
        "repetition": 0,
        "model": {**MODEL, "name": "ranking"},
        "ranking": asdict(Ranking()),
        "fsdp": {**asdict(Fsdp()), "forward_prefetch": 0},
        "training": {**asdict(Training()), "max_steps": 30, "batch_size": 64, "mixed_precision": "bf16"},
        "distributed": {**asdict(Distributed()), "dp_size": 4},
        "streams": asdict(Streams()),
        "compile": asdict(Compile()),
        "profiling": {**asdict(Profiling()), "enabled": False},
        "telemetry": {"sample_interval_s": 0.1},
        "workload": {"name": "fsdp", "tokens": None, "warmup": 1, "repeats": 5, "steps": 3, "seed": 0},
        "tp_size": 1,
    }
    for name, value in changes.items():
        section, _, knob = name.partition(".")
        if knob:
            config[section][knob] = value
        else:
            config[section] = value
    training, distributed = config["training"], config["distributed"]
    micro_batches = (training["batch_size"] or 1) * training["gradient_accumulation"] * distributed["dp_size"]
    precision = {"none": "fp32"}.get(training["mixed_precision"], training["mixed_precision"])
    tokens = {"tokens": micro_batches * TOKENS_PER_SAMPLE}
    derived = {"workload": {**config["workload"], **tokens}, "backend": distributed["strategy"], "precision": precision}
    return {**config, **{name: value for name, value in derived.items() if name not in changes}}


def training_run(
    step_us: float,
    none_us: float = 2000.0,
    floor_us: float = 1000.0,
    spread_us: float = 0.0,
    point: Mapping[str, Any] | None = None,
    **changed: Any,
) -> TrainingRun:
    """Five samples whose interquartile range is twice the spread."""
    config = point or training_config()
    training = config["training"]
    samples = training["batch_size"] * training["gradient_accumulation"] * config["distributed"]["dp_size"]
    measured: dict[str, Any] = {
        "step": {
            "point": timing(step_us, spread_us),
            "none": timing(none_us, spread_us),
            "floor": timing(floor_us, spread_us),
        },
        "host_us": {"point": 300.0, "none": 300.0, "floor": 200.0},
        "samples_per_step": samples,
        "parameters": 12_345_678,
        "losses": [0.7, 0.6, 0.5],
        "peak_memory_gb": 11.5,
        "telemetry": [],
    }
    return TrainingRun(**{**measured, **changed})


def write_training(
    directory: Path,
    step_us: float = 1500.0,
    point: Mapping[str, Any] | None = None,
    name: str | None = None,
    status: Status = "ok",
    result: Mapping[str, Any] | None = None,
    **run: Any,
) -> Path:
    """Write result.json of a training point into a new folder of `directory`; `run` as `training_run` takes it,
    `result` more of the result."""
    point = dict(point or training_config())
    name = name or f"training_{len(list(directory.glob('*')))}"
    (directory / name).mkdir(parents=True)
    measured = training_run(step_us, point=point, **run) if status == "ok" else None
    written: dict[str, Any] = {"environment": ENVIRONMENT, "started": "2026-11-21T21:14:03+00:00", **(result or {})}
    objective_us = step_us if status == "ok" else None
    write_result(
        directory / name,
        Result(name=name, point=point, status=status, training=measured, objective_us=objective_us, **written),
    )
    return directory / name


def copy_config(direction: str = "host_to_device", matrix_size: int = 4096, **changes: Any) -> dict[str, Any]:
    """A resolved copy point on one GPU."""
    copy_mb = changes.pop("copy_mb", 64.0)
    return {
        "runtime": {**RUNTIME, "device": "cuda", "max_connections": None},
        "profile": "none",
        "repetition": 0,
        "workload": {"name": "copy_engine", "tokens": matrix_size, "warmup": 2, "repeats": 5, "seed": 0},
        "copy_engine": {
            "matrix_size": matrix_size,
            "copy_mb": copy_mb,
            "direction": direction,
            "dtype": "bfloat16",
            "gemms": 4,
            "copies": 4,
        },
        "model": {"name": "custom"},
        "backend": "copy_engine",
        "precision": "bf16",
        "tp_size": 1,
        **changes,
    }


def copy_times(
    overlapped_us: float, gemm_us: float = 1000.0, copy_us: float = 400.0, spread_us: float = 0.0, **changed: Any
) -> CopyTimes:
    """One after the other they take the sum; four GEMMs of 4096 and four copies of 64 MiB."""
    times: dict[str, Timing] = {
        "gemm": timing(gemm_us, spread_us),
        "copy": timing(copy_us, spread_us),
        "sequential": timing(gemm_us + copy_us, spread_us),
        "overlapped": Timing(
            overlapped_us,
            overlapped_us - spread_us,
            overlapped_us + spread_us,
            [overlapped_us + step * spread_us for step in (1, -2, 2, 0, -1)],
        ),
    }
    bound = dict.fromkeys(times, False)
    known: dict[str, Any] = {"launch_bound": bound, "bytes_copied": 4 * 64 * 2**20, "flops": 4 * 2 * 4096**3}
    return CopyTimes(times=times, **{**known, **changed})


def write_copies(
    directory: Path,
    overlapped_us: float = 1100.0,
    point: Mapping[str, Any] | None = None,
    name: str | None = None,
    status: Status = "ok",
    result: Mapping[str, Any] | None = None,
    **times: Any,
) -> Path:
    """Write result.json of a copy point into a new folder of `directory`."""
    point = dict(point or copy_config())
    name = name or f"copies_{len(list(directory.glob('*')))}"
    (directory / name).mkdir(parents=True)
    measured = copy_times(overlapped_us, **times) if status == "ok" else None
    objective_us = overlapped_us if measured else None
    written: dict[str, Any] = {"environment": ENVIRONMENT, "started": "2026-11-21T21:14:03+00:00", **(result or {})}
    write_result(
        directory / name,
        Result(name=name, point=point, status=status, copies=measured, objective_us=objective_us, **written),
    )
    return directory / name


def write_sweep_of_training(directory: Path) -> Path:
    """Prefetch by accumulation on the same floor: prefetching saves a fifth, keeping parameters gathered some more, and
    accumulation communicates once for two micro batches."""
    times_us: Sequence[tuple[dict[str, Any], float, float, float]] = (
        ({}, 1500.0, 2000.0, 1000.0),
        ({"fsdp.forward_prefetch": 1}, 1200.0, 2000.0, 1000.0),
        ({"fsdp.reshard_after_forward": False}, 1450.0, 1800.0, 1000.0),
        ({"fsdp.forward_prefetch": 1, "fsdp.reshard_after_forward": False}, 1150.0, 1800.0, 1000.0),
        ({"training.gradient_accumulation": 2}, 2500.0, 3000.0, 2000.0),
        ({"fsdp.forward_prefetch": 1, "training.gradient_accumulation": 2}, 2200.0, 3000.0, 2000.0),
        (
            {
                "fsdp.forward_prefetch": 1,
                "fsdp.reshard_after_forward": False,
                "training.gradient_accumulation": 2,
            },
            2100.0,
            2800.0,
            2000.0,
        ),
    )
    for i, (changes, step_us, none_us, floor_us) in enumerate(times_us):
        point = training_config(**changes)
        write_training(
            directory, step_us, point, f"fsdp_{i}", none_us=none_us, floor_us=floor_us, spread_us=step_us / 200
        )
    point = training_config(**{"training.batch_size": 4096})
    write_training(directory, point=point, name="large", status="failed", result={"error": "CUDA out of memory"})
    refused = training_config(**{"distributed.strategy": "ddp", "fsdp.forward_prefetch": 1})
    reason = "fsdp.forward_prefetch changes nothing under DDP"
    write_training(directory, point=refused, name="refused", status="skipped", result={"error": reason})
    return directory


def write_sweep_of_copies(directory: Path) -> Path:
    """To the host everything is hidden but at the smallest size; from one part of the GPU to another nothing."""
    for matrix_size, gemm_us in ((2048, 140.0), (4096, 1000.0)):
        for copy_mb, copy_us in ((16.0, 300.0), (64.0, 1200.0)):
            to_host = copy_config("device_to_host", matrix_size, copy_mb=copy_mb)
            overlapped_us = max(gemm_us, copy_us) + 0.1 * min(gemm_us, copy_us)
            numbers = {"bytes_copied": int(4 * copy_mb * 2**20), "flops": 4 * 2 * matrix_size**3}
            write_copies(directory, overlapped_us, to_host, gemm_us=gemm_us, copy_us=copy_us, spread_us=2.0, **numbers)
            inside = copy_config("device_to_device", matrix_size, copy_mb=copy_mb)
            write_copies(
                directory,
                gemm_us + copy_us / 10 + 1,
                inside,
                gemm_us=gemm_us,
                copy_us=copy_us / 10,
                spread_us=2.0,
                **numbers,
            )
    refused = copy_config("peer", runtime={**RUNTIME, "device": "cpu"})
    write_copies(directory, point=refused, name="refused", status="skipped", result={"error": "needs a GPU"})
    return directory
