"""What a result of workload=tp_training must be before anything else looks at it, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.check_parts import MEASURE_AGAIN, UPDATE, Count, SizedWorkload, Workload, check_name
from overlap_sweep.results.run_directory import Result, TpTrainingRun, TpTrainingStep
from overlap_sweep.workloads.tp_training.config import IMPLEMENTATIONS, PRECISION_OF

_LEAST_US = 1e-6
"""Rates are quotients by times."""
_MOST_US = 1e15
_MOST_STEPS = 10**6
_MOST_GB = 1e9
_MOST_FLOPS = 1e30
_LONGEST_PATH = 4096

_Number = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
_Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]


class _Options(msgspec.Struct):
    """As they were asked for: null is what the device or the implementation decides."""

    batch_size: Count
    gradient_accumulation_steps: Count
    seq_length: Count | None = None
    num_training_steps: Count | None = None
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    learning_rate: _Number = 0.0
    weight_decay: _Number = 0.0
    max_grad_norm: _Number = 0.0
    dtype: str | None = None
    attn_impl: str | None = None
    zero_stage: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = None
    vocab_parallel: bool | None = None
    sequence_parallel: bool | None = None
    compile: bool = False
    tp_comm_overlap: bool | None = None
    tp_comm_overlap_cfg: str | None = None
    autocast: bool = False
    activation_checkpointing: bool = False
    log_interval: Count | None = None
    seed: int = 0
    peak_tflops: _Positive | None = None


class TpTrainingConfig(msgspec.Struct):
    """The part of a point's configuration that analysis relies on, beside that of every point."""

    workload: Workload
    tp_size: Count
    impl: str | None
    dp_size: Count | None
    tp_training: _Options


class _LanguageModel(msgspec.Struct):
    num_hidden_layers: Count


class _ResolvedOptions(msgspec.Struct):
    seq_length: Count
    num_training_steps: Count
    warmup_steps: int
    dtype: str
    vocab_parallel: bool
    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    seed: int


class _Resolved(msgspec.Struct):
    """What there is no null in once a point was run."""

    workload: SizedWorkload
    precision: str
    impl: str
    dp_size: Count
    tp_training: _ResolvedOptions
    language_model: _LanguageModel


def check_tp_training_config(config: Mapping[str, Any], path: Path) -> None:
    """UserError where it is none of such a point, whether as Hydra composed it or as it was run."""
    known = msgspec.convert(config, TpTrainingConfig)
    options = known.tp_training
    for value, choices in ((known.impl, IMPLEMENTATIONS), (options.dtype, PRECISION_OF)):
        if value is not None and value not in choices:
            raise UserError(f"{path} says {value[:200]!r}, which is none of {', '.join(choices)}; {UPDATE}.")
    check_name(options.attn_impl or "", path)
    file = options.tp_comm_overlap_cfg or ""
    if len(file) > _LONGEST_PATH or not file.isprintable():
        raise UserError(f"{path} has the file {file[:100]!r}, too long or not printable; {MEASURE_AGAIN}.")


def check_resolved_tp_training(result: Result, path: Path) -> None:
    """UserError where the configuration is not as a point was run, whatever became of it."""
    try:
        msgspec.convert(result.point, _Resolved)
    except msgspec.ValidationError as error:
        raise UserError(f"{path} is no result of a point ({error}); {MEASURE_AGAIN}.") from None


def check_tp_training(result: Result, path: Path) -> None:
    """UserError where analysis could not rely on what a point that is ok measured."""
    run, options = result.tp_training, result.point["tp_training"]
    if run is None or not any(not step.warmup for step in run.steps):
        raise UserError(f"{path} is ok without a timed step; {MEASURE_AGAIN}.")
    samples = options["batch_size"] * options["gradient_accumulation_steps"] * result.point["dp_size"]
    numbers = [step.step for step in run.steps]
    said = None
    if len(numbers) > _MOST_STEPS or numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < 2**31:
        said = "steps that don't follow each other"
    elif run.samples_per_step != samples:
        said = f"{run.samples_per_step} samples in a step of {samples}"
    elif run.tokens_per_step != samples * options["seq_length"]:
        said = f"{run.tokens_per_step} tokens in a step of {samples * options['seq_length']}"
    elif not 1 <= run.parameters < 2**63:
        said = f"{run.parameters} parameters"
    elif not 0 < run.flops_per_step < _MOST_FLOPS:
        said = f"{run.flops_per_step:g} operations in a step"
    elif run.host_ahead_us is not None and not abs(run.host_ahead_us) < _MOST_US:
        said = f"a host that is {run.host_ahead_us:g} us ahead"
    else:
        said = next((reason for step in run.steps if (reason := _mistake(step))), None)
    if said:
        raise UserError(f"{path} has {said}, which there cannot be; {MEASURE_AGAIN}.")


def _mistake(step: TpTrainingStep) -> str | None:
    parts_us = (step.forward_us, step.backward_us, step.optimizer_us)
    if not _LEAST_US <= step.step_us < _MOST_US or not all(0 <= part_us < _MOST_US for part_us in parts_us):
        return f"a step {step.step} without whole times"
    if not _are_known((step.loss,), -math.inf) or not _are_known((step.grad_norm,), 0.0):
        return f"a step {step.step} whose loss or gradient norm is none"
    if not all(gb is None or 0 <= gb < _MOST_GB for gb in (step.memory_allocated_gb, step.memory_peak_gb)):
        return f"a step {step.step} with a memory that is none"
    return None


def _are_known(values: Iterable[float | None], least: float) -> bool:
    """Numbers from the least on, or null."""
    return all(value is None or (math.isfinite(value) and value >= least) for value in values)


def timed_steps(run: TpTrainingRun) -> list[TpTrainingStep]:
    """Those after the warm-up."""
    return [step for step in run.steps if not step.warmup]
