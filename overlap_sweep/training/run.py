"""A training run: recorded, profiled, and compared with itself without overlap and without communication."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap_sweep.measure.device_samples import DeviceSampler
from overlap_sweep.measure.profile import capture_each
from overlap_sweep.measure.scheduled_profile import profile_steps
from overlap_sweep.measure.timing import summarise, time_variants
from overlap_sweep.measure.variant import Variant
from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import TrainingRun, metrics_file
from overlap_sweep.seeding import stream
from overlap_sweep.training import fully_sharded
from overlap_sweep.training.collectives import FLOOR, NONE, POINT, Collectives
from overlap_sweep.training.compiling import compile_layers
from overlap_sweep.training.ranking_model import RankingModel, initialise
from overlap_sweep.training.recording import Recording
from overlap_sweep.training.replicated import replicate
from overlap_sweep.training.spans import Recorder
from overlap_sweep.training.steady_clock import SteadyClock
from overlap_sweep.training.steps import Step, TrainingSteps
from overlap_sweep.training.streams import Streams

HOST_LIMITS = 0.95
"""Share of a step's time from which on the host that enqueues it is what takes so long."""


def run_training(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """The measured fields of the point's Result. Collective."""
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    recorder = Recorder(ranks.device)
    streams = Streams(point["streams"], ranks.device)
    collectives = Collectives(ranks, streams, recorder, point["distributed"]["enable_overlap"])
    model = _initial_model(point, ranks, recorder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compiled = compile_layers([layer.body for layer in model.layers], point["compile"], partial(_try, point), ranks)  # type: ignore[misc]
    with streams.computing():
        # DDP's gradients are summed up on the stream that it was made on.
        trained = _distributed(model, point, ranks, collectives)
    steps = TrainingSteps(trained, point, ranks, collectives, streams, recorder)

    with DeviceSampler(ranks.device, point["telemetry"]["sample_interval_s"]) as sampler:
        recording = Recording(directory, ranks, sampler, point["training"]["log_interval"])
        recorder.on = True
        for _ in range(point["training"]["max_steps"]):
            recording.add(steps.run())
        recording.write()
        traces, warnings = _profile(point, steps, recording, directory, ranks)
        recorder.on = False
    steps.freeze()
    in_mode = {mode: Variant(partial(_step, steps, collectives, mode)) for mode in (POINT, NONE, FLOOR)}
    if traces:
        collectives.mode = NONE
        active = point["profiling"]["active"]
        traces += capture_each({NONE: in_mode[NONE]}, ranks, active, directory)
    clock = SteadyClock(ranks, point["workload"]["steps"])
    samples = time_variants(in_mode, ranks, point["workload"]["warmup"], point["workload"]["repeats"], clock)
    times = {mode: summarise(found.us["step"]) for mode, found in samples.items()}
    host_us = {mode: clock.host_us(variant) for mode, variant in in_mode.items()} if on_gpu else {}
    peak_gb = ranks.slowest([torch.cuda.max_memory_allocated() / 1e9])[0] if on_gpu else None
    training = TrainingRun(
        step=times,
        host_us=host_us,
        samples_per_step=_samples_per_step(point),
        parameters=parameters,
        losses=recording.losses,
        peak_memory_gb=peak_gb,
        compiled=compiled,
        telemetry=[metrics_file(rank) for rank in range(ranks.world_size)],
    )
    return {
        "training": training,
        "objective_us": times[POINT].median_us,
        "launch_bound": bool(host_us) and host_us[POINT] > HOST_LIMITS * times[POINT].median_us,
        "traces": traces,
        "warnings": warnings,
    }


def forget(ranks: Ranks) -> None:
    """Free what a run has left: models and FSDP2's hooks refer to each other, and the next point needs the memory."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def _step(steps: TrainingSteps, collectives: Collectives, mode: str, _turn: int) -> Step:
    collectives.mode = mode
    return steps.run()


def _profile(
    point: Mapping[str, Any], steps: TrainingSteps, recording: Recording, directory: Path, ranks: Ranks
) -> tuple[list[str], list[str]]:
    """Further steps under the profiler; the names of the traces, and what a reader must know."""
    if not point["profiling"]["enabled"]:
        return [], []
    taken: list[Step] = []
    profiled = profile_steps(lambda: taken.append(steps.run()), ranks, point["profiling"], directory)
    for index in profiled.active:
        recording.add(taken[index], profiled=True)
    recording.write()
    return list(profiled.traces), list(profiled.warnings)


def _initial_model(point: Mapping[str, Any], ranks: Ranks, recorder: Recorder) -> RankingModel:
    with torch.device(ranks.device):
        model = RankingModel(point["model"], point["ranking"], recorder)
    synced = point["fsdp"]["sync_module_states"]
    # What rank 0 will send need not be drawn by the others, but it must be seen if it was not sent.
    draws = ranks.rank if synced else 0
    initialise(model, stream(ranks.device, point["workload"]["seed"], "parameters", draws))
    if synced and point["backend"] == "fsdp2" and ranks.world_size > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
    return model


def _distributed(model: RankingModel, point: Mapping[str, Any], ranks: Ranks, collectives: Collectives) -> nn.Module:
    if point["backend"] == "ddp":
        return replicate(model, point, ranks, collectives)
    fully_sharded.shard(model, point, ranks, collectives)
    return model


def _try(point: Mapping[str, Any], layer: nn.Module) -> None:
    """Forward and backward of one layer as they will be called."""
    device = next(layer.parameters()).device
    dtype = fully_sharded.DTYPES[point["precision"]]
    tokens = point["workload"]["tokens"] // _samples_per_step(point)
    shape = point["training"]["batch_size"], tokens, point["model"]["hidden_size"]
    x = torch.randn(shape, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        layer(x).float().sum().backward()
    layer.zero_grad()


def _samples_per_step(point: Mapping[str, Any]) -> int:
    training = point["training"]
    return int(training["batch_size"] * training["gradient_accumulation"] * point["distributed"]["dp_size"])
