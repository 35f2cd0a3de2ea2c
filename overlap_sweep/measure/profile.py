"""One profiled pass: a Kineto trace of this rank."""

from __future__ import annotations

from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from overlap_sweep.measure.timing import Variant
from overlap_sweep.ranks import Ranks


def capture(variant: Variant, ranks: Ranks, iterations: int, directory: Path) -> str:
    """Run the variant under the profiler and write trace_rank<r>.json.gz; returns the file's name.

    Every iteration is a `ProfilerStep#i` range, and starts when all ranks are there. Collective.
    """
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Point-to-point transfers on gloo run in threads of their own.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    variant.backward(0, variant.forward(0))
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        for iteration in range(iterations):
            ranks.barrier()
            with record_function(f"ProfilerStep#{iteration}"):
                variant.backward(iteration, variant.forward(iteration))
                ranks.synchronize()
    name = f"trace_rank{ranks.rank}.json.gz"
    temporary = directory / f".{name.removesuffix('.json.gz')}.tmp.json.gz"
    profiler.export_chrome_trace(str(temporary))
    temporary.replace(directory / name)
    return name
