"""A training run of one implementation: recorded step by step, then profiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from overlap_sweep.errors import Refused
from overlap_sweep.measure.profile import ProfiledSteps, profile_steps
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.timing import summarise
from overlap_sweep.workloads.tp_training import implementation
from overlap_sweep.workloads.tp_training.implementation import Facts, groups_of
from overlap_sweep.workloads.tp_training.inputs import TokenBatches
from overlap_sweep.workloads.tp_training.language_model import LESS_MEMORY, flops_per_token, least_bytes, parameters
from overlap_sweep.workloads.tp_training.result import TpTrainingRun
from overlap_sweep.workloads.tp_training.steps import Recording, TrainingSteps

HOST_LEADS = 0.05
"""Share of a step by which the host must be ahead at the end of the backward, or it may be what takes the time. Before
the optimizer, since some stacks wait for the device there."""


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """The measured fields of the point's Result. Collective."""
    training, workload, model = point["tp_training"], point["workload"], point["language_model"]
    _check_memory(point, ranks)
    with _out_of_memory_told(), _forgotten(ranks):
        recording, profiled, facts = _train(point, directory, ranks)
    step = summarise([step.step_us for step in recording.steps if not step.warmup])
    ahead_us = recording.least_ahead_us()
    run = TpTrainingRun(
        steps=recording.steps,
        parameters=parameters(model),
        tokens_per_step=workload["tokens"],
        samples_per_step=workload["tokens"] // training["seq_length"],
        flops_per_step=workload["tokens"] * flops_per_token(model, training["seq_length"]),
        host_ahead_us=ahead_us,
        details=facts.details,
    )
    return {
        "measured": run,
        "objective_us": step.median_us,
        "launch_bound": ahead_us is not None and ahead_us < HOST_LEADS * step.median_us,
        "traces": profiled.traces,
        "warnings": [*facts.warnings, *profiled.warnings],
    }


def _train(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> tuple[Recording, ProfiledSteps, Facts]:
    """What is returned holds nothing of the model, which is garbage then. After a failure the processes end, so that
    nothing is closed: other ranks might not be there to do it, too."""
    training = point["tp_training"]
    groups = groups_of(ranks, point["tp_size"], point["dp_size"])
    batches = TokenBatches(point, ranks, groups.dp_rank)
    built = implementation.load(point["impl"]).build(point, ranks, groups)
    steps = TrainingSteps(built, batches, point, ranks)
    recording = Recording(ranks, groups.dp, training["warmup_steps"], training["log_interval"])
    for _ in range(training["num_training_steps"]):
        recording.add(steps.run())
    recording.read()
    profiled = _profile(point, steps, directory, ranks)
    facts = built.facts()
    built.close()
    return recording, profiled, facts


def _profile(point: Mapping[str, Any], steps: TrainingSteps, directory: Path, ranks: Ranks) -> ProfiledSteps:
    if point["profile"] == "none":
        return ProfiledSteps()
    schedule = {"wait": 0, "warmup": 1, "active": point["workload"]["profiled"], "repeat": 1}
    output = {"chrome_trace": True, "tensorboard": False}
    recorded = {"record_shapes": False, "profile_memory": False, "with_stack": False}
    return profile_steps(steps.run, ranks, {**schedule, **output, **recorded}, directory)


def _check_memory(point: Mapping[str, Any], ranks: Ranks) -> None:
    """Refused where weights, gradients and the optimizer's state alone don't fit."""
    if ranks.device.type != "cuda":
        return
    needed = least_bytes(point)
    free = -ranks.slowest([-torch.cuda.mem_get_info(ranks.device)[0]])[0]
    if needed > free:
        raise Refused(
            f"weights, gradients and optimizer's state take at least {needed / 1e9:.0f} GB of each GPU, of which "
            f"{free / 1e9:.0f} GB are free: give a larger tp_size, a larger dp_size or fewer layers (model.num_layers)"
        )


@contextmanager
def _out_of_memory_told() -> Iterator[None]:
    """With what would take less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise torch.OutOfMemoryError(f"{LESS_MEMORY} ({reason})") from error


@contextmanager
def _forgotten(ranks: Ranks) -> Iterator[None]:
    """The next point needs the memory, and what a model and its hooks refer to each other with."""
    try:
        yield
    finally:
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
