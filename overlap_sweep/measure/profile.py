"""One profiled pass: a Kineto trace of this rank."""

from __future__ import annotations

from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from overlap_sweep.measure.timing import Variant, meet, spin
from overlap_sweep.ranks import Ranks

SPIN_US = 10_000.0
"""Enqueueing an operator takes the profiled host some milliseconds."""


def capture(variant: Variant, ranks: Ranks, iterations: int, directory: Path) -> str:
    """Run the variant under the profiler and write trace_rank<r>.json.gz; returns the file's name.

    Every iteration is a `ProfilerStep#i` range, and starts when all ranks are there. What holds a GPU back until its
    iteration is enqueued stays outside of the range, so that the trace has no gaps but the operator's own. Collective.
    """
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Point-to-point transfers on gloo run in threads of their own.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        for iteration in range(iterations):
            ranks.barrier()
            if ranks.device.type == "cuda":
                spin(ranks, SPIN_US)
                meet(ranks)
            with record_function(f"ProfilerStep#{iteration}"):
                variant.backward(iteration, variant.forward(iteration))
                ranks.synchronize()
    name = f"trace_rank{ranks.rank}.json.gz"
    temporary = directory / f".{name.removesuffix('.json.gz')}.tmp.json.gz"
    profiler.export_chrome_trace(str(temporary))
    temporary.replace(directory / name)
    return name
