"""A training run: recorded, profiled, and compared with itself without overlap and without communication."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap_sweep.measure import Ranks, stream
from overlap_sweep.measure.environment import DeviceSampler
from overlap_sweep.measure.profile import capture_each, profile_steps
from overlap_sweep.measure.timing import Variant, summarise, time_variants
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.workloads.fsdp.collectives import FLOOR, NONE, POINT, Collectives, Streams
from overlap_sweep.workloads.fsdp.config import HOST_LIMITS
from overlap_sweep.workloads.fsdp.ranking_model import RankingModel, initialise
from overlap_sweep.workloads.fsdp.recording import Recorder, Recording
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.fsdp.sharding import DTYPES, replicate, shard
from overlap_sweep.workloads.fsdp.steps import SteadyClock, Step, TrainingSteps

NOT_COMPILED = "no"
LONGEST_REASON = 200
"""Characters: inductor lists all of its options in a line."""


def run_training(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns the measured fields of the point's Result. Collective."""
    training, parameters, compiled = _set_up(point, ranks)
    recorder = training.collectives.recorder
    with DeviceSampler(ranks.device, point["telemetry"]["sample_interval_s"]) as sampler:
        recording = Recording(directory, ranks, sampler, point["training"]["log_interval"])
        recorder.on = True
        for _ in range(point["training"]["max_steps"]):
            recording.add(training.step(POINT))
        recording.write()
        on_gpu = ranks.device.type == "cuda"
        peak_gb = ranks.slowest([torch.cuda.max_memory_allocated() / 1e9])[0] if on_gpu else None
        traces, warnings = _profile(point, training, recording, directory, ranks)
        recorder.on = False
    training.freeze()
    in_mode = {mode: Variant(partial(_step, training, mode)) for mode in (POINT, NONE, FLOOR)}
    if traces:
        traces += capture_each({NONE: in_mode[NONE]}, ranks, point["profiling"]["active"], directory)
    times, host_us = _compare(point, in_mode, ranks)
    measured = TrainingRun(
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
        "measured": measured,
        "objective_us": times[POINT].median_us,
        "launch_bound": host_us.get(POINT, 0.0) > HOST_LIMITS * times[POINT].median_us,
        "traces": traces,
        "warnings": warnings,
    }


def _step(training: TrainingSteps, mode: str, _turn: int) -> Step:
    return training.step(mode)


def _set_up(point: Mapping[str, Any], ranks: Ranks) -> tuple[TrainingSteps, int, str]:
    """Returns the model in training, its number of parameters, and what compiled it."""
    recorder, streams = Recorder(ranks.device), Streams(point["streams"], ranks.device)
    collectives = Collectives(ranks, streams, recorder, point["distributed"]["enable_overlap"])
    model = _initial_model(point, ranks, recorder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = [unit.body for unit in model.units[1:-1]]
    compiled = compile_layers(layers, point["compile"], partial(_try, point), ranks)
    with streams.computing():
        # DDP's gradients are summed up on the stream that it was made on.
        distributed: nn.Module = model
        if point["backend"] == "ddp":
            distributed = replicate(model, point, ranks, collectives)
        else:
            shard(model, point, ranks, collectives)
    training = TrainingSteps(distributed, point, ranks, collectives)
    if ranks.device.type == "cuda":
        # Not of the whole model that every rank has had until it was sharded.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return training, parameters, compiled


def _compare(
    point: Mapping[str, Any], in_mode: Mapping[str, Variant], ranks: Ranks
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Time whole steps in turns. Returns their times by mode, and on a GPU the host's."""
    clock = SteadyClock(ranks, point["workload"]["steps"])
    samples = time_variants(in_mode, ranks, point["workload"]["warmup"], point["workload"]["repeats"], clock)
    times = {mode: summarise(found.us["step"]) for mode, found in samples.items()}
    if ranks.device.type != "cuda":
        return times, {}
    host_us = {mode: clock.host_us(variant) for mode, variant in in_mode.items()}
    return times, {mode: us for mode, us in host_us.items() if us is not None}


def forget(ranks: Ranks) -> None:
    """Free what a run has left: models and FSDP2's hooks refer to each other, and the next point needs the memory."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def _profile(
    point: Mapping[str, Any], training: TrainingSteps, recording: Recording, directory: Path, ranks: Ranks
) -> tuple[list[str], list[str]]:
    """Run further steps under the profiler. Returns the names of the traces, and what a reader must know."""
    if not point["profiling"]["enabled"]:
        return [], []
    taken: list[Step] = []
    profiled = profile_steps(lambda: taken.append(training.step(POINT)), ranks, point["profiling"], directory)
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


def _try(point: Mapping[str, Any], layer: nn.Module) -> None:
    """Forward and backward of one layer as they will be called."""
    device = next(layer.parameters()).device
    dtype = DTYPES[point["precision"]]
    tokens = point["workload"]["tokens"] // _samples_per_step(point)
    shape = point["training"]["batch_size"], tokens, point["model"]["hidden_size"]
    x = torch.randn(shape, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        layer(x).float().sum().backward()
    layer.zero_grad()


def _samples_per_step(point: Mapping[str, Any]) -> int:
    training = point["training"]
    return int(training["batch_size"] * training["gradient_accumulation"] * point["distributed"]["dp_size"])


def compile_layers(
    layers: Sequence[nn.Module], config: Mapping[str, Any], example: Callable[[nn.Module], None], ranks: Ranks
) -> str:
    """Compile every layer in place, as `config` (`config.Compile`) asks; collective.

    `example(layer)` runs one forward and backward. It is tried on the first layer, whose code all others share: where
    that raises on any rank, all ranks keep their layers as they were. Called before anything is sharded, since a layer
    that fails inside of FSDP2's hooks leaves its parameters gathered.

    `nn.Module.compile` replaces how the module is called, not the module: a wrapper of `torch.compile(layer)` would put
    `_orig_mod.` into the name of every parameter, and with it into the state dict.

    Returns `no`, the backend's name, or `no: ` and the reason, which is printed, too.
    """
    if not config["enabled"]:
        return NOT_COMPILED
    # What other points of the process have compiled would decide what is compiled now, and whether at all.
    torch._dynamo.reset()
    options = _options(config)
    try:
        layers[0].compile(**options)
        example(layers[0])
        failure = None
    except Exception as error:
        failure = _told(error)
    reason = _shared(failure, ranks)
    if reason is not None:
        # What `compile` set; there is no function that takes it back.
        layers[0]._compiled_call_impl = None
        print(f"torch.compile is left out: {reason}", flush=True)
        return f"{NOT_COMPILED}: {reason}"
    for layer in layers[1:]:
        layer.compile(**options)
    return str(options["backend"])


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of torch.compile."""
    options = {name: config[name] for name in ("backend", "fullgraph", "dynamic")}
    if torch.version.hip and config["backend"] == "inductor":
        print("torch.compile: on ROCm aot_eager instead of inductor, without its mode and options", flush=True)
        return {**options, "backend": "aot_eager"}
    return {**options, "mode": config["mode"], "options": dict(config["options"]) or None}


def _told(error: Exception) -> str:
    """Returns `<type>: <first line>`, of what a backend raised rather than of what dynamo made of it."""
    cause = getattr(error, "inner_exception", error)
    line = next(iter(str(cause).splitlines()), "")
    return f"{type(cause).__name__}: {line[:LONGEST_REASON]}{'...' if len(line) > LONGEST_REASON else ''}"


def _shared(failure: str | None, ranks: Ranks) -> str | None:
    """Returns the failure of the first rank that had one, on all of them."""
    (last,) = ranks.slowest([0.0 if failure is None else float(ranks.world_size - ranks.rank)])
    if not last:
        return None
    told = [failure]
    if ranks.world_size > 1:
        dist.broadcast_object_list(told, ranks.world_size - int(last))
    return told[0]
