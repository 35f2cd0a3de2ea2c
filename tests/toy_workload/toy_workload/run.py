from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_sweep.measure import Ranks
from overlap_sweep.measure.profile import capture_each
from overlap_sweep.measure.timing import Variant, summarise, time_variants
from overlap_sweep.workloads import Config
from toy_workload.result import ToyTimes


def run(point: Config, directory: Path, ranks: Ranks) -> dict[str, Any]:
    workload = point["workload"]
    output = torch.zeros(workload["tokens"], point["model"]["hidden_size"], device=ranks.device)
    chunks = output.chunk(point["toy"]["chunks"])
    variant = Variant(lambda repeat: [dist.all_reduce(chunk) for chunk in chunks])
    samples = time_variants({"": variant}, ranks, workload["warmup"], workload["repeats"])[""]
    time = summarise(samples.us["all"])
    return {
        "measured": ToyTimes(time=time),
        "objective_us": time.median_us,
        "launch_bound": samples.launch_bound,
        "traces": capture_each({"": variant}, ranks, 1, directory) if point["profile"] == "all" else [],
    }
