"""results_{impl}_tp{n}_dp{m}.json: one run with its configuration, its timed steps and their summary.

The names of fields are those of the benchmark scripts that people know; what they lack comes after them. Times are in
seconds or milliseconds as the names say, memory in 10^9 bytes; null is unknown, of losses and norms no number. Rates
are of all ranks, unless they are called per GPU.
"""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

import msgspec

from overlap_sweep.report.numbers import finite
from overlap_sweep.workloads.tp_training.result import TpTrainingStep
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow


def results_json(row: TpTrainingRow) -> bytes:
    """Returns the file of a single point's row."""
    return msgspec.json.format(msgspec.json.encode(results(row)), indent=2) + b"\n"


def results(row: TpTrainingRow) -> dict[str, Any]:
    """Returns the file's content."""
    (point,) = row.points
    config, options = point.config, dict(point.config["tp_training"])
    vocab_parallel, seed = options.pop("vocab_parallel"), options.pop("seed")
    return {
        "config": {
            "model_name": config["model"]["name"],
            **{name: config[name] for name in ("impl", "tp_size", "dp_size")},
            "num_layers": config["language_model"]["num_hidden_layers"],
            "use_vocab_parallel": vocab_parallel,
            "output_dir": str(point.directory),
            "seed": seed,
            **options,
            "world_size": row.grid.ranks,
            "device": point.case.device,
            "profile": config.get("profile"),
            "language_model": config["language_model"],
        },
        "steps": [_step(step, row) for step in row.steps],
        "summary": _summary(row),
    }


def _step(step: TpTrainingStep, row: TpTrainingRow) -> dict[str, Any]:
    return {
        "step": step.step,
        "loss": step.loss,
        "step_time_s": step.step_us / 1e6,
        "forward_time_s": step.forward_us / 1e6,
        "backward_time_s": step.backward_us / 1e6,
        "optimizer_time_s": step.optimizer_us / 1e6,
        "tokens_per_sec": row.run.tokens_per_step / step.step_us * 1e6,
        "samples_per_sec": row.run.samples_per_step / step.step_us * 1e6,
        "memory_allocated_gb": step.memory_allocated_gb,
        "memory_peak_gb": step.memory_peak_gb,
        "grad_norm": step.grad_norm,
    }


def _summary(row: TpTrainingRow) -> dict[str, Any]:
    run, steps, compared, result = row.run, row.steps, row.losses, row.points[0].result
    assert result
    times_ms, (q1_us, q3_us) = [step.step_us / 1e3 for step in steps], row.quartiles_us
    losses = [step.loss for step in steps if step.loss is not None]
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    mean_per_s = fmean(1e6 / step.step_us for step in steps)
    return {
        "num_steps": len(steps),
        "avg_step_time_ms": fmean(times_ms),
        "std_step_time_ms": stdev(times_ms) if len(times_ms) > 1 else 0.0,
        "avg_tokens_per_sec": run.tokens_per_step * mean_per_s,
        "avg_samples_per_sec": run.samples_per_step * mean_per_s,
        "avg_loss": fmean(losses) if losses else None,
        "final_loss": steps[-1].loss,
        "peak_memory_gb": row.memory_peak_gb,
        "timing_breakdown": {f"{name}_pct": 100 * share for name, share in row.shares.items()},
        "median_step_time_ms": row.time_us / 1e3,
        "q1_step_time_ms": q1_us / 1e3,
        "q3_step_time_ms": q3_us / 1e3,
        "tokens_per_sec_per_gpu": row.tokens_per_s_per_gpu,
        "tflops_per_gpu": row.tflops_per_gpu,
        "peak_tflops_per_gpu": row.peak_tflops,
        "mfu_pct": None if row.mfu is None else 100 * row.mfu,
        "communication": _communication(row),
        "avg_grad_norm": fmean(norms) if norms else None,
        "final_grad_norm": steps[-1].grad_norm,
        "parameters": run.parameters,
        "flops_per_step": run.flops_per_step,
        "host_ahead_ms": None if row.host_ahead_us is None else row.host_ahead_us / 1e3,
        "host_bound": row.launch_bound,
        "losses_agree": None if compared is None else compared.deviates is None,
        "largest_loss_difference": finite(compared.largest.relative) if compared and compared.largest else None,
        "deviates": compared.deviates._asdict() | {"relative": finite(compared.deviates.relative)}
        if compared and compared.deviates
        else None,
        "details": run.details,
        "warnings": result.warnings,
    }


def _communication(row: TpTrainingRow) -> dict[str, float | None] | None:
    """Returns that of a step; None without traces."""
    found = row.communication
    return (
        None
        if found is None
        else {
            "total_ms": found.total_us / 1e3,
            "hidden_ms": found.hidden_us / 1e3,
            "exposed_ms": found.exposed_us / 1e3,
            "hidden_pct": finite(100 * found.hidden_fraction),
            "waiting_ms": found.waiting_us / 1e3,
            "startup_iterations": found.startup_iterations,
        }
    )
