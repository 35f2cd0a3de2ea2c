"""Telemetry of training runs with numbers that one can compute with by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.workloads.fsdp.telemetry import StepRecord, overlap_of, write_metrics

USUAL_DEVICE = {"sm_clock_mhz": 1980.0, "power_w": 640.0, "temperature_c": 61.0, "throttle_reasons": 0.0}
SLOW_DEVICE = {"sm_clock_mhz": 1410.0, "power_w": 690.0, "temperature_c": 71.0, "throttle_reasons": 4.0}


def record(
    step: int,
    rank: int = 0,
    compute_ms: float = 80.0,
    hidden_ms: float = 32.0,
    exposed_ms: float = 8.0,
    idle_ms: float = 0.0,
    device: Mapping[str, float] = USUAL_DEVICE,
    **changed: Any,
) -> StepRecord:
    """Computation from the step's start; an all-gather, and a reduce-scatter until after the computation's end."""
    gather_ms = hidden_ms / 2
    compute, gather, hidden, exposed, idle = (
        round(ms * 1e6) for ms in (compute_ms, gather_ms, hidden_ms - gather_ms, exposed_ms, idle_ms)
    )
    spans = {
        "compute": [(0, compute)],
        "auxiliary": [(0, gather)],
        "reduce_scatter": [(compute - hidden, compute + exposed)],
    }
    fields = {
        "started": 1_763_750_000.0 + step,
        **overlap_of(spans, compute + exposed + idle),
        "loss": 0.7 - step / 1000,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "device": dict(device),
        **changed,
    }
    return StepRecord(step=step, rank=rank, **fields)


def wobbling(number: int, rank: int = 0) -> dict[str, float]:
    """Durations that differ by some per mille from step to step."""
    return {"compute_ms": 80.0 + (number * 7 + rank) % 5 / 10, "exposed_ms": 8.0 + (number * 3 + rank) % 4 / 20}


def write_logs(directory: Path, records: Sequence[StepRecord]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for one in records:
        write_metrics(directory / metrics_file(one.rank), [one])
    return directory


def write_run(
    directory: Path,
    steps: int = 30,
    ranks: int = 2,
    profiled: int = 0,
    factor: float = 1.0,
    dips: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
) -> Path:
    """Logs alone: a slow first step, then steps of some 88 ms times `factor`, and more under the profiler.
    `dips` by step and rank."""
    records = []
    for number in range(steps + profiled):
        for rank in range(ranks):
            fields: dict[str, Any] = wobbling(number, rank)
            if number == 0:
                fields["idle_ms"] = 400.0
            if number >= steps:
                fields |= {"profiled": True, "idle_ms": 30.0}
            fields |= (dips or {}).get((number, rank), {})
            for name in ("compute_ms", "exposed_ms"):
                fields[name] *= factor
            records.append(record(number, rank, hidden_ms=fields.pop("hidden_ms", 32.0) * factor, **fields))
    return write_logs(directory, records)
