"""A training run: recorded, profiled, and compared with the same steps with no overlap and without communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap_sweep.config import known
from overlap_sweep.measure import DTYPES, Ranks, stream
from overlap_sweep.measure.environment import DeviceSampler
from overlap_sweep.measure.instruments import named, named_range, nsys_records
from overlap_sweep.measure.profile import capture_each, profile_steps
from overlap_sweep.measure.timing import Anchor, Variant, summarise, time_variants
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.workloads.fsdp.collectives import FLOOR, NONE, POINT, Collectives, Recorder, Streams, resolve
from overlap_sweep.workloads.fsdp.config import HOST_LIMITS, Resolved
from overlap_sweep.workloads.fsdp.ranking_model import RankingModel, compile_layers, initialise
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.fsdp.sharding import replicate, shard
from overlap_sweep.workloads.fsdp.steps import SteadyClock, Step, TrainingSteps
from overlap_sweep.workloads.fsdp.telemetry import Device, StepRecord, overlap_of, write_metrics


def run(point: Resolved, directory: Path, ranks: Ranks) -> dict[str, object]:
    """Trains with telemetry, profiles, and compares. Returns the measured fields of the point's Result. Collective."""
    with ranks.memory_freed():
        return _run(point, directory, ranks)


def _run(point: Resolved, directory: Path, ranks: Ranks) -> dict[str, object]:
    training, parameters, compiled = _set_up(point, ranks)
    with closing(training):
        recorder = training.collectives.recorder
        with DeviceSampler(ranks.device, point.telemetry.sample_interval_s) as sampler:
            recording = TelemetryWriter(directory, ranks, sampler, point.training.log_interval)
            recorder.on = True
            for number in range(known(point.training.max_steps)):
                with named_range(f"step {number}"):
                    recording.add(training.step(POINT))
            recording.write()
            on_gpu = ranks.device.type == "cuda"
            peak_gb = ranks.slowest([torch.cuda.max_memory_allocated() / 1e9])[0] if on_gpu else None
            traces, warnings = _profile(point, training, recording, directory, ranks)
            recorder.on = False
        training.freeze()
        in_mode = {mode: named(mode, Variant(partial(_step, training, mode))) for mode in (POINT, NONE, FLOOR)}
        if traces or nsys_records():
            traces += capture_each({NONE: in_mode[NONE]}, ranks, point.profiling.active, directory)
        times, host_us = _compare(point, in_mode, ranks)
    measured = TrainingRun(
        step=times,
        host_us=host_us,
        samples_per_step=point.samples_per_step,
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


def _set_up(point: Resolved, ranks: Ranks) -> tuple[TrainingSteps, int, str]:
    recorder, streams = Recorder(ranks.device), Streams(asdict(point.streams), ranks.device)
    collectives = Collectives(ranks, streams, recorder, point.distributed.enable_overlap)
    model = _initial_model(point, ranks, recorder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = [unit.body for unit in model.units[1:-1]]
    compiled = compile_layers(layers, point.compile, partial(_try, point), ranks)
    with streams.computing():
        # DDP accumulates gradients on the stream on which it was created.
        distributed: nn.Module = model
        if point.backend == "ddp":
            distributed = replicate(model, point, ranks, collectives)
        else:
            shard(model, point, ranks, collectives)
    training = TrainingSteps(distributed, point, ranks, collectives)
    if ranks.device.type == "cuda":
        # Not the peak of the whole model, which every rank has until it is sharded.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return training, parameters, compiled


def _compare(
    point: Resolved, in_mode: Mapping[str, Variant], ranks: Ranks
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Times whole steps in turns. Returns their times and, on a GPU, the host's times, by mode."""
    clock = SteadyClock(ranks, known(point.workload.steps))
    samples = time_variants(in_mode, ranks, point.workload.warmup, point.workload.repeats, clock)
    times = {mode: summarise(found.us["step"]) for mode, found in samples.items()}
    if ranks.device.type != "cuda":
        return times, {}
    host_us = {mode: clock.host_us(variant) for mode, variant in in_mode.items()}
    return times, {mode: us for mode, us in host_us.items() if us is not None}


def _profile(
    point: Resolved, training: TrainingSteps, recording: TelemetryWriter, directory: Path, ranks: Ranks
) -> tuple[list[str], list[str]]:
    """Runs further steps under the profiler. Returns the names of the traces, and warnings for the reader."""
    if not point.profiling.enabled:
        return [], []
    taken: list[Step] = []
    profiled = profile_steps(lambda: taken.append(training.step(POINT)), ranks, point["profiling"], directory)
    for index in profiled.active:
        recording.add(taken[index], profiled=True)
    recording.write()
    return list(profiled.traces), list(profiled.warnings)


def _initial_model(point: Resolved, ranks: Ranks, recorder: Recorder) -> RankingModel:
    with torch.device(ranks.device):
        model = RankingModel(point.model, point.ranking, recorder)
    synced = point.fsdp.sync_module_states
    # Each rank draws different values, so that the losses show if rank 0's were not broadcast.
    draws = ranks.rank if synced else 0
    initialise(model, stream(ranks.device, point.workload.seed, "parameters", draws))
    if synced and point.backend == "fsdp2" and ranks.world_size > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
    return model


def _try(point: Resolved, layer: nn.Module) -> None:
    device = next(layer.parameters()).device
    dtype = DTYPES[point.precision]
    tokens = point.workload.tokens // point.samples_per_step
    shape = point.training.batch_size, tokens, known(point.model.hidden_size)
    x = torch.randn(shape, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        layer(x).float().sum().backward()
    layer.zero_grad()


class TelemetryWriter:
    """Writes a rank's telemetry, several steps at once, since reading a mark waits for the device."""

    def __init__(self, directory: Path, ranks: Ranks, sampler: DeviceSampler, log_interval: int) -> None:
        self.losses: list[float | None] = []
        """Losses of the steps that were not profiled, mean over all ranks; None if NaN or infinite."""
        self._path, self._ranks, self._sampler = directory / metrics_file(ranks.rank), ranks, sampler
        self._log_interval = log_interval
        self._waiting: list[tuple[Step, bool]] = []
        self._anchor = self._new_anchor()

    def add(self, step: Step, profiled: bool = False) -> None:
        """Adds a step; writes every `log_interval` steps. Collective."""
        self._waiting.append((step, profiled))
        if (step.number + 1) % self._log_interval == 0:
            self.write()

    def write(self) -> None:
        """Writes the pending steps. Collective."""
        if not self._waiting:
            return
        self._ranks.synchronize()
        steps = [step for step, _ in self._waiting]
        losses = _means([step.loss for step in steps], self._ranks)
        records = [
            self._record(step, loss, profiled) for (step, profiled), loss in zip(self._waiting, losses, strict=True)
        ]
        write_metrics(self._path, records)
        self.losses += [record.loss for record in records if not record.profiled]
        self._waiting.clear()
        self._anchor = self._new_anchor()
        last = records[-1]
        if self._ranks.rank == 0:
            print(
                f"step {last.step}: loss {losses[-1]:.4f}, {1e3 * last.step_ms:,.0f} us, "
                f"{1e3 * last.exposed_comm_ms:,.0f} us exposed communication",
                flush=True,
            )

    def _new_anchor(self) -> Anchor:
        self._ranks.synchronize()
        return Anchor(self._ranks.device)

    def _record(self, step: Step, loss: float, profiled: bool) -> StepRecord:
        step_ns = step.end.after_ns(step.begin)
        sample = self._sampler.last_before(step.started + step_ns / 1e9)
        norm = float(step.grad_norm)
        return StepRecord(
            step=step.number,
            rank=self._ranks.rank,
            started=step.started,
            profiled=profiled,
            loss=loss if math.isfinite(loss) else None,
            learning_rate=step.learning_rate,
            grad_norm=norm if math.isfinite(norm) else None,
            loss_scale=step.loss_scale,
            device=Device(**sample.values),
            rocm_smi_output=sample.rocm_smi_output,
            **overlap_of(resolve(step.spans, step.begin, self._anchor), step_ns),
        )


def _means(losses: Sequence[Tensor], ranks: Ranks) -> list[float]:
    mean = torch.stack(list(losses)).double() / ranks.world_size
    if ranks.world_size > 1:
        dist.all_reduce(mean)
    found: list[float] = mean.tolist()
    return found
