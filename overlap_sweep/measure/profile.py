"""Records Kineto traces of this rank: of single passes, and of training steps by the profiler's schedule."""

import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from overlap_sweep.measure import Ranks
from overlap_sweep.measure.instruments import named, nsys_records, recorded_by_nsys
from overlap_sweep.measure.timing import Variant, enqueues_ahead, gpu_clock, meet, rest_for, spin
from overlap_sweep.results.run_directory import keep, trace_file
from overlap_sweep.trace.disk import TENSORBOARD_FOLDER

SPIN_US = 10_000.0
"""Least length of the spin: under the profiler the host needs some milliseconds to enqueue an operator."""

BY_ROCPROFV3 = (
    "No Chrome trace was written: exporting one is known to crash on ROCm. profiling.rocprofv3=true records a trace."
)
NO_CHROME_TRACE = f"{BY_ROCPROFV3} profiling.tensorboard=true exports one for TensorBoard all the same."

SAME_EXPORT = "Exporting traces for TensorBoard is known to crash on ROCm."


def capture_each(variants: Mapping[str, Variant], ranks: Ranks, iterations: int, directory: Path) -> list[str]:
    """Writes a trace of every variant under its name. Returns the file names of all ranks' traces. Collective.

    Every iteration is a `ProfilerStep#i` range and starts when all ranks are ready. The spin that holds a GPU back
    until its iteration is enqueued is outside the range, so that the only gaps in the trace are the operator's own.
    Where Nsight Systems records, there are no traces.
    """
    variants = {name: named(name, variant) for name, variant in variants.items()}
    if nsys_records():
        with recorded_by_nsys():
            for variant in variants.values():
                variant.get_ready()
                _iterate(variant, ranks, iterations, SPIN_US)
        return []
    for name, variant in variants.items():
        # Point-to-point transfers on gloo run in other threads.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        variant.get_ready()
        ahead_us = max(SPIN_US, _rest_us(variant, ranks))
        with profile(activities=_activities(ranks), experimental_config=everywhere) as profiler:
            _iterate(variant, ranks, iterations, ahead_us)
        trace = directory / trace_file(ranks.rank, name)
        keep(_exported(profiler, trace), trace)
        # The result names all ranks' traces, so all must exist before it is written.
        ranks.barrier()
    return [trace_file(rank, name) for name in variants for rank in range(ranks.world_size)]


def _rest_us(variant: Variant, ranks: Ranks) -> float:
    """Returns the rest that GPUs need before each iteration, to run it as fast as when it was timed. Runs the passes
    once, since the first ones after preparing are slower, too. Collective."""
    if not enqueues_ahead([variant], ranks.device):
        return 0.0
    turn = gpu_clock(ranks)(replace(variant, step=None), 0)
    (turn_us,) = ranks.slowest([sum(turn.us.values())])
    return rest_for(turn_us) * turn_us


def _iterate(variant: Variant, ranks: Ranks, iterations: int, ahead_us: float) -> None:
    for iteration in range(iterations):
        ranks.barrier()
        if ranks.device.type == "cuda" and not variant.waits:
            spin(ranks, ahead_us)
            meet(ranks)
        with record_function(f"ProfilerStep#{iteration}"):
            kept = None
            for _name, run in variant.computation():
                kept = run(iteration, kept)
            ranks.synchronize()


def _activities(ranks: Ranks) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])]


def _exported(profiler: profile, trace: Path) -> Path:
    # The profiler compresses files whose name ends in .gz.
    temporary = trace.with_name(f".tmp_{trace.name}")
    profiler.export_chrome_trace(str(temporary))
    return temporary


@dataclass(frozen=True)
class ProfiledSteps:
    """The recorded traces and the recorded calls."""

    traces: list[str] = field(default_factory=list)
    """File names of the traces in the run directory, of all ranks and cycles."""
    warnings: list[str] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    """Indices of the recorded calls of `run_step`: N of ProfilerStep#N."""


def profile_steps(
    run_step: Callable[[], object], ranks: Ranks, profiling: Mapping[str, Any], directory: Path
) -> ProfiledSteps:
    """Calls `run_step` (wait + warmup + active) * repeat times, and writes the profiler's traces.

    `profiling`: the options of that name. Each cycle writes a trace per rank, as requested: `run_directory.trace_file`
    for analyze.py, and the same file under torch_profiler/rank<r>/ for TensorBoard. torch exports a recording only once
    ("Trace is already saved"), so the file for TensorBoard is a copy under the name that torch's handler would use.

    On ROCm exporting is known to crash. The Chrome trace, which is on by default, is left out; the one for TensorBoard,
    which is off by default, is still written. If nothing is to be written, no step is run. Untested on AMD hardware.
    Where Nsight Systems records the steps, there are no traces. Collective.
    """
    wait, warmup, active, repeat = (profiling[name] for name in ("wait", "warmup", "active", "repeat"))
    cycle = wait + warmup + active
    recorded = [first + wait + warmup + step for first in range(0, cycle * repeat, cycle) for step in range(active)]
    if nsys_records():
        for _ in range(repeat):
            for _ in range(wait + warmup):
                run_step()
            with recorded_by_nsys():
                for _ in range(active):
                    run_step()
        return ProfiledSteps(active=recorded)
    chrome, tensorboard, warnings = bool(profiling["chrome_trace"]), bool(profiling["tensorboard"]), []
    if torch.version.hip:
        warnings += [NO_CHROME_TRACE] if chrome else []
        warnings += [SAME_EXPORT] if tensorboard else []
        chrome = False
    if not (chrome or tensorboard):
        return ProfiledSteps(warnings=warnings)
    written: list[str] = []
    # Names differ between processes, so traces of an earlier attempt would remain.
    folder = directory / TENSORBOARD_FOLDER / f"rank{ranks.rank}"
    shutil.rmtree(folder, ignore_errors=True)

    def write(profiler: profile) -> None:
        variant = f"cycle{len(written)}" if written else ""
        written.append(variant)
        trace = directory / trace_file(ranks.rank, variant)
        temporary = _exported(profiler, trace)
        if tensorboard:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(temporary, folder / f"{platform.node()}_{os.getpid()}.{time.time_ns()}.pt.trace.json.gz")
        if chrome:
            keep(temporary, trace)
        else:
            temporary.unlink()

    with profile(
        activities=_activities(ranks),
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
        on_trace_ready=write,
        record_shapes=profiling["record_shapes"],
        profile_memory=profiling["profile_memory"],
        with_stack=profiling["with_stack"],
        # Our own threads may run collectives on gloo. torch 2.13 then records no memory events.
        experimental_config=_ExperimentalConfig(profile_all_threads=not profiling["profile_memory"]),
    ) as profiler:
        for _ in range(cycle * repeat):
            run_step()
            # The device's work must end inside the step's range.
            ranks.synchronize()
            profiler.step()
    # The result names all ranks' traces, so all must exist before it is written.
    ranks.barrier()
    traces = [trace_file(rank, variant) for variant in written for rank in range(ranks.world_size)] if chrome else []
    return ProfiledSteps(traces, warnings, recorded)
