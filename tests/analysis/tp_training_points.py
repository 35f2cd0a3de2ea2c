"""Run directories of tensor-parallel stacks, with numbers that one can compute with by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.run_directory import Result, Status, TpTrainingRun, TpTrainingStep, write_result
from tests.analysis.run_directories import ENVIRONMENT

IMPLEMENTATIONS = ("autotp", "fsdp_dtensor", "async_tp", "megatron")

_OPTIONS: dict[str, Any] = {
    **{"attn_impl": "sdpa", "zero_stage": None, "vocab_parallel": True, "sequence_parallel": False, "compile": False},
    **{"tp_comm_overlap": None, "tp_comm_overlap_cfg": None, "batch_size": 2, "seq_length": 512},
    **{"num_training_steps": 7, "warmup_steps": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-5},
    **{"weight_decay": 0.01, "max_grad_norm": 1.0, "dtype": "bfloat16", "autocast": False},
    **{"activation_checkpointing": False, "log_interval": 10, "seed": 42, "peak_tflops": None},
}
_OF_IMPLEMENTATION: dict[str, dict[str, Any]] = {
    "autotp": {"zero_stage": 1},
    "fsdp_dtensor": {},
    "async_tp": {"sequence_parallel": True, "compile": True},
    "megatron": {"attn_impl": None, "sequence_parallel": True, "tp_comm_overlap": True},
}
LANGUAGE_MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1019}


def tp_training_config(
    impl: str = "fsdp_dtensor", tp_size: int = 2, dp_size: int = 1, device: str = "cuda", **changes: Any
) -> dict[str, Any]:
    """A resolved point. A name with a dot changes an option: `**{"tp_training.zero_stage": 2}`."""
    options = {**_OPTIONS, **_OF_IMPLEMENTATION[impl]}
    options |= {name.partition(".")[2]: value for name, value in changes.items() if name.startswith("tp_training.")}
    tokens = options["batch_size"] * options["gradient_accumulation_steps"] * dp_size * options["seq_length"]
    return {
        "runtime": {"device": device, "max_connections": None},
        "profile": "all",
        "repetition": 0,
        "model": {"name": "qwen3_tiny", "source": "sizes"},
        "tp_size": tp_size,
        "impl": impl,
        "backend": impl,
        "dp_size": dp_size,
        "tp_training": options,
        "language_model": LANGUAGE_MODEL,
        "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[options["dtype"]],
        "workload": {"name": "tp_training", "tokens": tokens, "repeats": 5, "profiled": 2},
        **{name: value for name, value in changes.items() if "." not in name},
    }


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


def falling(steps: int = 7, off: Mapping[int, float | None] | None = None, times: float = 1.0) -> list[float | None]:
    """Losses; `off`: other ones at some steps."""
    return [(off or {}).get(step, times * (7.0 - step / 10)) for step in range(steps)]


def tp_training_run(
    point: Mapping[str, Any],
    step_us: float = 10_000.0,
    spread_us: float = 50.0,
    losses: Sequence[float | None] | None = None,
    norms: Sequence[float | None] | None = None,
    **changed: Any,
) -> TpTrainingRun:
    options = point["tp_training"]
    samples = options["batch_size"] * options["gradient_accumulation_steps"] * point["dp_size"]
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


def write_tp_training(
    directory: Path,
    point: Mapping[str, Any] | None = None,
    step_us: float = 10_000.0,
    name: str | None = None,
    status: Status = "ok",
    result: Mapping[str, Any] | None = None,
    **run: Any,
) -> Path:
    """Write result.json of a point into a new folder of `directory`; `run` as `tp_training_run` takes it, `result` more
    of the result."""
    point = dict(point or tp_training_config())
    name = name or f"tp{point['tp_size']}_dp{point['dp_size']}_{point['impl']}_{len(list(directory.glob('*')))}"
    (directory / name).mkdir(parents=True)
    measured = tp_training_run(point, step_us, **run) if status == "ok" else None
    written: dict[str, Any] = {"environment": ENVIRONMENT, "started": "2026-11-21T21:14:03+00:00", **(result or {})}
    objective_us = step_us if status == "ok" else None
    write_result(
        directory / name,
        Result(name=name, point=point, status=status, tp_training=measured, objective_us=objective_us, **written),
    )
    return directory / name


def write_sweep_of_stacks(directory: Path) -> Path:
    """On TP=2 DP=2 Megatron-Core is fastest and AutoTP, with ZeRO 1 and 2, slowest; on TP=4 DP=1 asynchronous TP ties
    with it. Losses agree to a thousandth."""
    times_us = {
        (2, 2): {"autotp": 16_000.0, "fsdp_dtensor": 12_000.0, "async_tp": 11_000.0, "megatron": 10_000.0},
        (4, 1): {"autotp": 14_000.0, "fsdp_dtensor": 9_000.0, "async_tp": 7_020.0, "megatron": 7_000.0},
    }
    for (tp_size, dp_size), of_grid in times_us.items():
        for i, (impl, step_us) in enumerate(of_grid.items()):
            point = tp_training_config(impl, tp_size, dp_size)
            write_tp_training(directory, point, step_us, losses=falling(times=1 + i / 4000))
    second = tp_training_config("autotp", 2, 2, **{"tp_training.zero_stage": 2})
    write_tp_training(directory, second, 16_500.0)
    refused = tp_training_config("async_tp", 1, 4)
    reason = "at tp_size=1 there is nothing for asynchronous TP to overlap; use impl=fsdp_dtensor"
    write_tp_training(directory, refused, name="refused", status="skipped", result={"error": reason})
    large = tp_training_config("fsdp_dtensor", 1, 4)
    write_tp_training(directory, large, name="large", status="failed", result={"error": "CUDA out of memory"})
    return directory
