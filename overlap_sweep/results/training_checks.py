"""What a training run's and a copy point's result must be before anything else looks at it, whoever wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.check_parts import (
    MEASURE_AGAIN,
    UPDATE,
    Count,
    SizedWorkload,
    Word,
    Workload,
    check_name,
    contradiction,
    is_whole,
)
from overlap_sweep.results.run_directory import Result, Timing
from overlap_sweep.trace.directories import is_plain_name

STRATEGIES = ("fsdp2", "ddp")
STEP_VARIANTS = ("point", "none", "floor")
"""What is measured of every training step."""
COPY_VARIANTS = ("gemm", "copy", "sequential", "overlapped")
"""What is measured of GEMMs and copies."""

_MOST_VARIANTS = 20
_MOST_STEPS = 10**6
_LONGEST_REASON = 10_000
"""Characters of why the layers were not compiled."""
_MOST_GB = 1e9
_MOST_OTHER_KNOBS = 100
_LONGEST_OPTIONS = 2000
"""As JSON: a setting's name has them all."""

_Flag = bool | None
_Number = int | float | None


class _Ranking(msgspec.Struct):
    num_layers: Count
    sequence_length: Count
    num_sparse_features: Count
    num_dense_features: Count
    vocab_size: Count


class _Fsdp(msgspec.Struct):
    forward_prefetch: bool | int = False
    backward_prefetch: str | None = None
    limit_all_gathers: _Flag = None
    reshard_after_forward: bool | int = True
    sync_module_states: _Flag = None
    use_orig_params: _Flag = None
    replicas: Count | None = None
    reduce_dtype: str | None = None


class _Training(msgspec.Struct):
    """As it was asked for: null is what the device decides."""

    batch_size: Count | None
    gradient_accumulation: Count
    mixed_precision: str | None
    learning_rate: _Number = None
    warmup_steps: _Number = None
    weight_decay: _Number = None
    grad_clip_norm: _Number = None


class _Distributed(msgspec.Struct):
    strategy: str
    dp_size: Count
    enable_overlap: _Flag = None
    overlap_reduce_scatter: _Flag = None
    overlap_clone_for_reduce_scatter: _Flag = None
    bucket_cap_mb: _Number = None
    gradient_as_bucket_view: _Flag = None
    env: dict[str, Word] = {}


class _Compile(msgspec.Struct):
    enabled: bool = False
    backend: str | None = None
    mode: str | None = None
    fullgraph: _Flag = None
    dynamic: _Flag = None
    options: dict[str, Any] = {}


class TrainingConfig(msgspec.Struct):
    """The part of a training point's configuration that analysis relies on, beside that of every point."""

    workload: Workload
    ranking: _Ranking
    fsdp: _Fsdp
    training: _Training
    distributed: _Distributed
    streams: dict[str, str]
    compile: _Compile


class CopyEngine(msgspec.Struct):
    matrix_size: Count
    copy_mb: Annotated[float, msgspec.Meta(gt=0, lt=2**40)]
    direction: str
    dtype: str
    gemms: Count
    copies: Count


class CopyConfig(msgspec.Struct):
    """The same of GEMMs beside copies. Their tokens, as Hydra composed them, are a reference."""

    workload: Workload
    copy_engine: CopyEngine


class _Resolved(msgspec.Struct):
    workload: SizedWorkload
    precision: str


def check_training_config(config: Mapping[str, Any], path: Path) -> None:
    """UserError where it is none of a training point, whether as Hydra composed it or as it was run."""
    known = msgspec.convert(config, TrainingConfig)
    for name in _strings([msgspec.to_builtins(known)]):
        check_name(name, path)
    others = {**known.distributed.env, **known.compile.options}
    if len(others) > _MOST_OTHER_KNOBS or len(json.dumps(known.compile.options)) > _LONGEST_OPTIONS:
        said = f"{len(others)} variables and options of torch.compile, or very long ones"
        raise UserError(f"{path} sets {said}; {MEASURE_AGAIN}.")
    if known.distributed.strategy not in STRATEGIES:
        said = known.distributed.strategy
        raise UserError(f"{path} says {said}, which is none of {', '.join(STRATEGIES)}; {UPDATE}.")


def check_copy_config(config: Mapping[str, Any], path: Path) -> None:
    """The same of a copy point."""
    known = msgspec.convert(config, CopyConfig)
    for name in (known.copy_engine.direction, known.copy_engine.dtype):
        check_name(name, path)


def check_resolved(result: Result, path: Path) -> None:
    """UserError where the configuration is not as a point was run, whatever became of it."""
    try:
        msgspec.convert(result.point, _Resolved)
    except msgspec.ValidationError as error:
        raise UserError(f"{path} is no result of a point ({error}); {MEASURE_AGAIN}.") from None


def check_training(result: Result, path: Path) -> None:
    """UserError where analysis could not rely on what a training point that is ok measured."""
    run = result.training
    if run is None or not _are_whole(run.step, STEP_VARIANTS):
        raise UserError(f"{path} is ok without whole times of its steps; {MEASURE_AGAIN}.")
    _check_timings(run.step, path)
    point = result.point
    if point["training"]["batch_size"] is None:
        raise UserError(f"{path} is ok without a batch size; {MEASURE_AGAIN}.")
    per_step = point["training"]["batch_size"] * point["training"]["gradient_accumulation"]
    per_step *= point["distributed"]["dp_size"]
    host_us, losses = run.host_us.values(), run.losses
    said = None
    if run.samples_per_step != per_step:
        said = f"{run.samples_per_step} samples in a step of {per_step}"
    elif point["workload"]["tokens"] is None:
        said = "no tokens"
    elif not 1 <= run.parameters < 2**63:
        said = f"{run.parameters} parameters"
    elif not all(math.isfinite(time_us) and time_us >= 0 for time_us in host_us):
        said = "a host without a time"
    elif not 1 <= len(losses) <= _MOST_STEPS or not all(loss is None or math.isfinite(loss) for loss in losses):
        said = "losses that are none"
    elif run.peak_memory_gb is not None and not 0 <= run.peak_memory_gb < _MOST_GB:
        said = f"a peak memory of {run.peak_memory_gb:g} GB"
    elif len(run.compiled) > _LONGEST_REASON:
        said = f"{len(run.compiled)} characters about its compilation"
    elif len(run.telemetry) > point["distributed"]["dp_size"] or not all(map(is_plain_name, run.telemetry)):
        said = "telemetry files that are none beside it"
    if said:
        raise UserError(f"{path} has {said}, which there cannot be; {MEASURE_AGAIN}.")
    for name in run.host_us:
        check_name(name, path)


def check_copies(result: Result, path: Path) -> None:
    """The same of a copy point."""
    copies = result.copies
    if copies is None or not _are_whole(copies.times, COPY_VARIANTS):
        raise UserError(f"{path} is ok without whole times of GEMMs and copies; {MEASURE_AGAIN}.")
    _check_timings(copies.times, path)
    for name, count in (("bytes_copied", copies.bytes_copied), ("flops", copies.flops)):
        if not 1 <= count < 2**63:
            raise UserError(f"{path} has {name}={count}, which there cannot be; {MEASURE_AGAIN}.")
    for name in copies.launch_bound:
        check_name(name, path)


def _are_whole(times: Mapping[str, Timing], expected: Iterable[str]) -> bool:
    timings = times.values()
    rounds = {len(timing.samples_us) for timing in timings}
    return times.keys() >= set(expected) and len(rounds) == 1 and all(map(is_whole, timings))


def _check_timings(times: Mapping[str, Timing], path: Path) -> None:
    if len(times) > _MOST_VARIANTS:
        raise UserError(f"{path} names {len(times)} variants, more than {_MOST_VARIANTS}; {MEASURE_AGAIN}.")
    for name, timing in times.items():
        check_name(name, path)
        if reason := contradiction(timing):
            raise UserError(f"{path} gives {name} {reason}, which there cannot be; {MEASURE_AGAIN}.")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """Those in it, names included; how deep it is was checked before."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            yield from _strings(value.values())
        elif isinstance(value, list):
            yield from _strings(value)
