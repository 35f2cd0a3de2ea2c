"""One profiled pass: a Kineto trace of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from overlap_sweep.measure.clock import meet, spin
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.variant import Variant
from overlap_sweep.results.run_directory import keep, trace_file

SPIN_US = 10_000.0
"""Enqueueing an operator takes the profiled host some milliseconds."""


def capture_each(variants: Mapping[str, Variant], ranks: Ranks, iterations: int, directory: Path) -> list[str]:
    """`capture` every one of them under its name; the names of all ranks' traces. Collective."""
    for name, variant in variants.items():
        capture(variant, ranks, iterations, directory, name)
    return [trace_file(rank, name) for name in variants for rank in range(ranks.world_size)]


def capture(variant: Variant, ranks: Ranks, iterations: int, directory: Path, name: str = "") -> None:
    """Run the variant under the profiler and write this rank's `run_directory.trace_file`.

    Every iteration is a `ProfilerStep#i` range, and starts when all ranks are there. What holds a GPU back until its
    iteration is enqueued stays outside of the range, so that the trace has no gaps but the operator's own. Collective.
    """
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Point-to-point transfers on gloo run in threads of their own.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    variant.get_ready()
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        for iteration in range(iterations):
            ranks.barrier()
            if ranks.device.type == "cuda":
                spin(ranks, SPIN_US)
                meet(ranks)
            with record_function(f"ProfilerStep#{iteration}"):
                kept = variant.forward(iteration)
                if variant.backward:
                    variant.backward(iteration, kept)
                ranks.synchronize()
    trace = directory / trace_file(ranks.rank, name)
    # The profiler compresses what ends in .gz.
    temporary = trace.with_name(f".tmp_{trace.name}")
    profiler.export_chrome_trace(str(temporary))
    keep(temporary, trace)
    # The result names all ranks' traces, so that none may be missing when it is written.
    ranks.barrier()
