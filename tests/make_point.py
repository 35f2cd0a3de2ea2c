"""Run directories with made-up numbers that one can compute with by hand, of every workload.

`resolved` returns the configuration of a point, `make_point` writes its run directory.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from overlap_sweep import space
from overlap_sweep.kernel_shape import COMM_ONLY, GEMM_ONLY, SEQUENTIAL
from overlap_sweep.run_directory import (
    RESULT_FILE,
    CopyTimes,
    DefaultTiming,
    ImplementationTimes,
    PassTimes,
    Result,
    Status,
    Timing,
    TpTrainingRun,
    TpTrainingStep,
    TrainingRun,
    VariantTimes,
    write_result,
)
from overlap_sweep.training_config import Compile, Distributed, Fsdp, Profiling, Ranking, Streams, Training

ENVIRONMENT: dict[str, Any] = {
    "host": "node7",
    "gpu": "NVIDIA H200",
    "gpu_count": 8,
    "driver": "580.1",
    "packages": {"torch": "2.13.0"},
}
LANGUAGE_MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1019}
RING: dict[str, Any] = {"method": "ring_exchange", "aggregate": False, "num_sm": 1}
PIPELINE: dict[str, Any] = {"method": "pipeline", "num_splits": 4, "num_sm": 16}
STARTED = "2026-11-20T21:14:03+00:00"

MODEL: dict[str, Any] = {
    "name": "llama3_8b",
    "source": "sizes",
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "gated_mlp": True,
    "normalization": "RMSNorm",
    "bias": False,
}
RUNTIME: dict[str, Any] = {
    "device": "cuda",
    "isolate": False,
    "timeout_s": 300.0,
    "timeout_factor": 10.0,
    "retries": 1,
    "start_timeout_s": 180.0,
    "threads_per_rank": 1,
    "multicast": False,
    "bootstrap_backend": "gloo",
    "max_connections": None,
}
LAYER: dict[str, Any] = {
    "kind": "transformer_layer",
    "variants": None,
    "comm_overlap": True,
    "tp_comm_overlap_cfg": None,
    "ub_overlap_rs_dgrad": False,
    "num_replicas": 1,
    "micro_batch_size": 1,
    "training": False,
    "recompute": None,
}
TP_TRAINING: dict[str, Any] = {
    **{"attn_impl": "sdpa", "zero_stage": None, "vocab_parallel": True, "sequence_parallel": False, "compile": False},
    **{"tp_comm_overlap": None, "tp_comm_overlap_cfg": None, "batch_size": 2, "seq_length": 512},
    **{"num_training_steps": 7, "warmup_steps": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-5},
    **{"weight_decay": 0.01, "max_grad_norm": 1.0, "dtype": "bfloat16", "autocast": False},
    **{"activation_checkpointing": False, "log_interval": 10, "seed": 42, "peak_tflops": None},
}
STACKS: dict[str, dict[str, Any]] = {
    "autotp": {"zero_stage": 1},
    "fsdp_dtensor": {},
    "async_tp": {"sequence_parallel": True, "compile": True},
    "megatron": {"attn_impl": None, "sequence_parallel": True, "tp_comm_overlap": True},
}
TOKENS_PER_SAMPLE = 145
"""Of a training run of workload=fsdp."""

_COMMON: dict[str, Any] = {
    "model": MODEL,
    "runtime": RUNTIME,
    "backend": "transformer_engine",
    "precision": "bf16",
    "profile": "none",
    "repetition": 0,
    "tp_size": 2,
}
_OPERATOR = {"operator": "fc1", "phase": "all", "method": "none", **dict.fromkeys(space.KNOBS), "phases": None}
_MEASURING = {"tokens": 8192, "warmup": 0, "repeats": 5, "profiled": 1, "seed": 0, "tolerance": None}
_POINTS: dict[str, dict[str, Any]] = {
    "operator": {**_COMMON, **_OPERATOR},
    "layer": {**_COMMON, **_OPERATOR, "tp_size": 4, "backend": "megatron", "layer": LAYER},
    "kernel": {
        **_COMMON,
        **{"backend": "torch", "tp_size": 4, "operator": "fc1", "kernel": "ag_gemm", "m": 1024, "n": 57344, "k": 8192},
        "model": {**MODEL, "name": "llama3_70b"},
        "implementations": {"ring_exchange": RING},
    },
    "fsdp": {
        **_COMMON,
        "tp_size": 1,
        "model": {**MODEL, "name": "ranking"},
        "ranking": asdict(Ranking()),
        "fsdp": {**asdict(Fsdp()), "forward_prefetch": 0},
        "training": {**asdict(Training()), "max_steps": 30, "batch_size": 64, "mixed_precision": "bf16"},
        "distributed": {**asdict(Distributed()), "dp_size": 4},
        "streams": asdict(Streams()),
        "compile": asdict(Compile()),
        "profiling": {**asdict(Profiling()), "enabled": False},
        "telemetry": {"sample_interval_s": 0.1},
    },
    "copy_engine": {
        **_COMMON,
        "tp_size": 1,
        "backend": "copy_engine",
        "model": {"name": "custom"},
        "copy_engine": {
            **{"matrix_size": 4096, "copy_mb": 64.0, "direction": "host_to_device"},
            **{"dtype": "bfloat16", "gemms": 4, "copies": 4},
        },
    },
    "tp_training": {
        **_COMMON,
        "profile": "all",
        "model": {**MODEL, "name": "qwen3_tiny"},
        "impl": "fsdp_dtensor",
        "dp_size": 1,
        "language_model": LANGUAGE_MODEL,
    },
}


def resolved(workload: str, /, **changes: Any) -> dict[str, Any]:
    """Returns a resolved configuration: on GPUs, in bf16, unless it is changed.

    A change is a top-level key, a dict that is merged into one, or a dotted name: `**{"fsdp.forward_prefetch": 1}`.
    `tokens`, `device` and, as a string, `model` are short for `workload.tokens`, `runtime.device` and `model.name`.
    What follows from other keys (tokens of training, backend and precision of stacks) is filled in.
    """
    point = copy.deepcopy({**_POINTS[workload], "workload": {"name": workload, **_MEASURING}})
    if workload == "tp_training":
        point["tp_training"] = {**TP_TRAINING, **STACKS[changes.get("impl", point["impl"])]}
    short = {"tokens": "workload.tokens", "device": "runtime.device"}
    if isinstance(changes.get("model"), str):
        short["model"] = "model.name"
    for key, value in changes.items():
        section, _, name = short.get(key, key).partition(".")
        if name:
            point[section][name] = value
        elif isinstance(value, Mapping) and isinstance(point.get(section), dict):
            point[section] |= value
        else:
            point[section] = value
    derived = {"fsdp": _of_fsdp, "tp_training": _of_stack, "kernel": _of_kernel, "copy_engine": _of_copies}
    for key, value in derived.get(workload, lambda _: {})(point).items():
        if key not in changes:
            point[key] = {**point[key], **value} if isinstance(value, dict) else value
    return point


def _of_fsdp(point: Mapping[str, Any]) -> dict[str, Any]:
    precision = point["training"]["mixed_precision"]
    tokens = _samples(point) * TOKENS_PER_SAMPLE
    return {
        "workload": {"tokens": tokens, "warmup": 1, "steps": 3},
        "backend": point["distributed"]["strategy"],
        "precision": "fp32" if precision == "none" else precision,
    }


def _of_stack(point: Mapping[str, Any]) -> dict[str, Any]:
    options = point["tp_training"]
    return {
        "backend": point["impl"],
        "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[options["dtype"]],
        "workload": {"tokens": _sequences(point) * options["seq_length"], "profiled": 2},
    }


def _of_kernel(point: Mapping[str, Any]) -> dict[str, Any]:
    return {"workload": {"tokens": point["m"], "warmup": 3}}


def _of_copies(point: Mapping[str, Any]) -> dict[str, Any]:
    return {"workload": {"tokens": point["copy_engine"]["matrix_size"], "warmup": 2}}


def _samples(point: Mapping[str, Any]) -> int:
    training = point["training"]
    return int((training["batch_size"] or 1) * training["gradient_accumulation"] * point["distributed"]["dp_size"])


def _sequences(point: Mapping[str, Any]) -> int:
    options = point["tp_training"]
    return int(options["batch_size"] * options["gradient_accumulation_steps"] * point["dp_size"])


def make_point(
    workload: str,
    directory: Path,
    point: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    status: Status = "ok",
    **overrides: Any,
) -> Path:
    """Writes result.json of a point into a new folder of `directory` and returns the folder.

    `point` is its configuration, by default `resolved(workload)`. `overrides` are fields of Result, or what the
    workload's function in `MEASURED` takes; a point that is not ok has measured nothing.
    """
    point = dict(point or resolved(workload))
    number = len(list(directory.glob("*")))
    name = name or f"{space.point_name(point, []) if workload == 'operator' else workload}_{number}"
    measured = MEASURED[workload](point, overrides)
    fields = {"environment": ENVIRONMENT, "started": STARTED, **(measured if status == "ok" else {}), **overrides}
    (directory / name).mkdir(parents=True)
    write_result(directory / name, Result(name=name, point=point, status=status, **fields))
    return directory / name


def missing_point(directory: Path, config: Mapping[str, Any], name: str = "missing") -> Path:
    """What a point that died without a result leaves: the configuration as Hydra composed it, in a new folder."""
    (directory / name / ".hydra").mkdir(parents=True)
    (directory / name / ".hydra" / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    return directory / name


def rewrite(point: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Does `change` to what the point's result.json holds."""
    result = json.loads((point / RESULT_FILE).read_text())
    change(result)
    (point / RESULT_FILE).write_text(json.dumps(result))


def timing(median_us: float, spread_us: float = 0.0) -> Timing:
    """Five samples around the median: their interquartile range is twice the spread."""
    samples = [median_us + step * spread_us for step in (-2, -1, 0, 1, 2)]
    return Timing(median_us, median_us - spread_us, median_us + spread_us, samples)


def timing_of(samples_us: list[float]) -> Timing:
    q1_us, median_us, q3_us = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(median_us, q1_us, q3_us, samples_us)


# Operators.


def operator_config(
    tp_size: int = 2, operator: str = "fc1", phase: str = "all", method: str = "none", **changes: Any
) -> dict[str, Any]:
    """`resolved("operator", ...)`, in short."""
    return resolved("operator", tp_size=tp_size, operator=operator, phase=phase, method=method, **changes)


def default_timing(default_us: float, none_us: float = 100.0, minute: int = 0, spread_us: float = 0.0) -> DefaultTiming:
    """The library's default overlap, measured at that minute of the hour."""
    measured = f"2026-11-20T21:{minute:02}:30+00:00"
    return DefaultTiming(timing(default_us, spread_us), timing(none_us, spread_us), measured)


def pass_times(
    point_us: float,
    none_us: float = 100.0,
    floor_us: float = 50.0,
    tp1_us: float | None = None,
    spread_us: float = 0.0,
    default: DefaultTiming | None = None,
) -> PassTimes:
    tp1 = None if tp1_us is None else timing(tp1_us)
    return PassTimes(timing(point_us, spread_us), timing(none_us, spread_us), timing(floor_us), tp1, default)


def _measured_operator(point: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`fwd`, `bwd`: PassTimes; a pass that is not given took as long as none."""
    fwd, bwd = overrides.pop("fwd", None), overrides.pop("bwd", None)
    times = {"fwd": fwd or pass_times(100.0), "bwd": bwd or pass_times(200.0, none_us=200.0, floor_us=150.0)}
    overrides.setdefault("settings", space.settings(point))
    return {"times": times}


# Layers.


def layer_config(
    kind: str = "transformer_layer", tp_size: int = 4, num_replicas: int = 1, training: bool = False, **changes: Any
) -> dict[str, Any]:
    """`resolved("layer", ...)`, in short."""
    layer = {"kind": kind, "num_replicas": num_replicas, "training": training}
    return resolved("layer", tp_size=tp_size, layer=layer, **changes)


def variant(whole_us: Sequence[float], step_us: float | None = None, **changed: Any) -> VariantTimes:
    """`whole_us` by round; a third of it is forward, and the rest but for the optimizer's step is backward."""
    parts = {
        "fwd": [time_us / 3 for time_us in whole_us],
        "bwd": [time_us * 2 / 3 - (step_us or 0.0) for time_us in whole_us],
        "all": list(whole_us),
    }
    if step_us is not None:
        parts["step"] = [step_us] * len(whole_us)
    return VariantTimes(times={name: timing_of(samples) for name, samples in parts.items()}, **changed)


def _measured_layer(point: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`variants`: VariantTimes by name."""
    return {}


# Kernels.


def kernel_config(m: int = 1024, backend: str = "torch", **changes: Any) -> dict[str, Any]:
    """An all-gather before fc1 of llama3_70b on four GPUs; without an operator, of no model."""
    model = {} if changes.get("operator", "fc1") else {"model": "custom"}
    return resolved("kernel", m=m, backend=backend, **model, **changes)


def implementation(
    time_us: float, spread_us: float = 0.0, setting: Mapping[str, Any] | None = None, **changed: Any
) -> ImplementationTimes:
    """Five samples whose interquartile range is twice the spread."""
    error = changed.pop("relative_error", 1e-3)
    return ImplementationTimes(
        time=timing(time_us, spread_us), setting=dict(setting or {}), relative_error=error, **changed
    )


def baselines(
    sequential_us: float = 200.0, gemm_us: float = 100.0, comm_us: float = 80.0, spread_us: float = 0.0, **changed: Any
) -> dict[str, ImplementationTimes]:
    return {
        SEQUENTIAL: implementation(sequential_us, spread_us, **changed),
        GEMM_ONLY: implementation(gemm_us, spread_us, relative_error=None),
        COMM_ONLY: implementation(comm_us, spread_us, relative_error=None),
    }


def _measured_kernel(point: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`implementations`: ImplementationTimes by name; baselines that are missing are the usual ones."""
    given = overrides.pop("implementations", {"ring_exchange": implementation(150.0)})
    return {"implementations": {**baselines(), **given}}


# Training runs of workload=fsdp.


def training_run(
    step_us: float,
    none_us: float = 2000.0,
    floor_us: float = 1000.0,
    spread_us: float = 0.0,
    point: Mapping[str, Any] | None = None,
    **changed: Any,
) -> TrainingRun:
    """Five samples whose interquartile range is twice the spread."""
    times = {"point": step_us, "none": none_us, "floor": floor_us}
    measured: dict[str, Any] = {
        "step": {name: timing(time_us, spread_us) for name, time_us in times.items()},
        "host_us": {"point": 300.0, "none": 300.0, "floor": 200.0},
        "samples_per_step": _samples(point or resolved("fsdp")),
        "parameters": 12_345_678,
        "losses": [0.7, 0.6, 0.5],
        "peak_memory_gb": 11.5,
        "telemetry": [],
    }
    return TrainingRun(**{**measured, **changed})


def _measured_fsdp(point: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`step_us`, and what `training_run` takes."""
    given = _taken(overrides, "step_us", "none_us", "floor_us", "spread_us", *TrainingRun.__struct_fields__)
    step_us = given.pop("step_us", 1500.0)
    return {"training": training_run(step_us, point=point, **given), "objective_us": step_us}


# Copies.


def copy_config(
    direction: str = "host_to_device", matrix_size: int = 4096, copy_mb: float = 64.0, **changes: Any
) -> dict[str, Any]:
    """`resolved("copy_engine", ...)`, in short."""
    sizes = {"direction": direction, "matrix_size": matrix_size, "copy_mb": copy_mb}
    return resolved("copy_engine", copy_engine=sizes, **changes)


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


def _measured_copies(point: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`overlapped_us`, and what `copy_times` takes."""
    given = _taken(overrides, "overlapped_us", "gemm_us", "copy_us", "spread_us", "bytes_copied", "flops")
    overlapped_us = given.pop("overlapped_us", 1100.0)
    if isinstance(overrides.get("launch_bound"), dict):
        given["launch_bound"] = overrides.pop("launch_bound")
    return {"copies": copy_times(overlapped_us, **given), "objective_us": overlapped_us}


# Tensor-parallel stacks.


def stack_config(
    impl: str = "fsdp_dtensor", tp_size: int = 2, dp_size: int = 1, device: str = "cuda", **changes: Any
) -> dict[str, Any]:
    """`resolved("tp_training", ...)`, in short."""
    return resolved("tp_training", impl=impl, tp_size=tp_size, dp_size=dp_size, device=device, **changes)


def falling(steps: int = 7, off: Mapping[int, float | None] | None = None, times: float = 1.0) -> list[float | None]:
    """Losses; `off`: other ones at some steps."""
    return [(off or {}).get(step, times * (7.0 - step / 10)) for step in range(steps)]


def steps_of(
    step_us: float, spread_us: float, losses: Sequence[float | None], norms: Sequence[float | None], warmup: int
) -> list[TpTrainingStep]:
    """The timed ones lie around the median, with an interquartile range of twice the spread if there are five; forward
    takes three tenths, backward a half, the optimizer a tenth."""
    offsets = (-2, 2, 0, 1, -1)
    steps = []
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        time_us = 10 * step_us if number < warmup else step_us + offsets[(number - warmup) % 5] * spread_us
        steps.append(
            TpTrainingStep(
                **{"step": number, "warmup": number < warmup, "loss": loss, "grad_norm": norm, "step_us": time_us},
                **{"forward_us": 0.3 * time_us, "backward_us": 0.5 * time_us, "optimizer_us": 0.1 * time_us},
                memory_allocated_gb=10.0 + number / 10,
                memory_peak_gb=20.0,
            )
        )
    return steps


def tp_training_run(
    point: Mapping[str, Any],
    step_us: float = 10_000.0,
    spread_us: float = 50.0,
    losses: Sequence[float | None] | None = None,
    norms: Sequence[float | None] | None = None,
    **changed: Any,
) -> TpTrainingRun:
    options, samples = point["tp_training"], _sequences(point)
    losses = falling(options["num_training_steps"]) if losses is None else losses
    norms = [1.5] * len(losses) if norms is None else norms
    measured: dict[str, Any] = {
        "steps": steps_of(step_us, spread_us, losses, norms, options["warmup_steps"]),
        "parameters": 200_000_000,
        "tokens_per_step": samples * options["seq_length"],
        "samples_per_step": samples,
        "flops_per_step": 1e12 * samples,
        "host_ahead_us": 5000.0,
        "details": {"attention": "flash"},
    }
    return TpTrainingRun(**{**measured, **changed})


def _measured_stack(point: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`step_us`, and what `tp_training_run` takes."""
    given = _taken(overrides, "step_us", "spread_us", "losses", "norms", *TpTrainingRun.__struct_fields__)
    return {"tp_training": tp_training_run(point, **given), "objective_us": given.get("step_us", 10_000.0)}


def _taken(overrides: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: overrides.pop(name) for name in names if name in overrides}


MEASURED = {
    "operator": _measured_operator,
    "layer": _measured_layer,
    "kernel": _measured_kernel,
    "fsdp": _measured_fsdp,
    "copy_engine": _measured_copies,
    "tp_training": _measured_stack,
}
"""By workload, from a point and the overrides that it takes out of them, the fields of Result that were measured."""
