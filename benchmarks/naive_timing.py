"""Compares naive with GPU-bound timing of overlapped operators: the table of docs/measuring.md.

    torchrun --nproc-per-node 8 benchmarks/naive_timing.py [model ...]

Naive timing is the usual loop: enqueue twenty forward and backward passes, wait for the GPU, divide.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from overlap_sweep import backends
from overlap_sweep.hydra_adapter.overrides import as_choice
from overlap_sweep.measure import Ranks
from overlap_sweep.measure.timing import CudaStream, GpuClock, Variant, summarise, time_variants
from overlap_sweep.runtime.group_config import NO_MULTICAST
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.resolvers import register
from overlap_sweep.workloads.operator.run import bench_for

ITERATIONS = 20
REPEATS = 21
CONF = Path(__file__).parent.parent / "conf"
OVERLAPS = {
    "qkv": {"ring sm4": ("ring_exchange", 4), "bulk sm4": ("bulk", 4)},
    "proj": {"ring sm4": ("ring_exchange", 4), "pipeline sm16": ("pipeline", 16)},
    "fc1": {"ring sm4": ("ring_exchange", 4), "bulk sm4": ("bulk", 4)},
    "fc2": {"ring sm4": ("ring_exchange", 4), "pipeline sm16": ("pipeline", 16)},
}


def main() -> None:
    os.environ.update(NO_MULTICAST, CUDA_DEVICE_MAX_CONNECTIONS="1")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
    register()
    if ranks.rank == 0:
        print(
            f"{'model':12} {'operator':9} {'variant':14} {'naive us':>9} {'GPU-bound us':>13} {'host us':>8}",
            flush=True,
        )
    for model in sys.argv[1:] or ["qwen3_0_6b", "llama3_70b"]:
        for operator, overlaps in OVERLAPS.items():
            measure(model, operator, overlaps, ranks)
    dist.destroy_process_group()


def measure(model: str, operator: str, overlaps: Mapping[str, tuple[str, int]], ranks: Ranks) -> None:
    """Every variant of one operator, both ways; rank 0 prints."""
    points = {
        name: point_for(model, operator, method, num_sm, ranks.world_size)
        for name, (method, num_sm) in {"none": ("none", 1), "default": ("none", 1), **overlaps}.items()
    }
    bench = bench_for(points["none"], ranks)
    for name, point in points.items():
        purpose: Any = name if name in ("none", "default") else "point"
        backends.load(point["backend"]).prepare(point, purpose)
        variant = bench.none if name == "none" else bench.variant(point, purpose)
        naive_us, host_us = naive(variant, ranks)
        clock = GpuClock(CudaStream(ranks))
        samples = time_variants({"it": variant}, ranks, 3, REPEATS, clock)["it"]
        bound = f"{summarise(samples.us['all']).median_us:13.1f}{' (launch-bound)' if samples.launch_bound else ''}"
        if ranks.rank == 0:
            print(f"{model:12} {operator:9} {name:14} {naive_us:9.1f} {bound} {host_us:8.1f}", flush=True)


def point_for(model: str, operator: str, method: str, num_sm: int, tp_size: int) -> dict[str, Any]:
    given = (f"model={model}", f"operator={operator}", f"method={method}", f"num_sm={num_sm}", f"tp_size={tp_size}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolve(compose("config", [*map(as_choice, given), "backend=transformer_engine", "runtime.device=cuda"]))


def naive(variant: Variant, ranks: Ranks) -> tuple[float, float]:
    """Microseconds per iteration by the host's clock, slowest rank; and of that, until the last one was enqueued."""
    for repeat in range(3):
        variant.backward(repeat, variant.forward(repeat))
    ranks.barrier()
    start = time.perf_counter()
    for repeat in range(ITERATIONS):
        variant.backward(repeat, variant.forward(repeat))
    enqueued_s = time.perf_counter() - start
    ranks.synchronize()
    total_s = time.perf_counter() - start
    total_us, enqueued_us = ranks.slowest([total_s * 1e6, enqueued_s * 1e6])
    return total_us / ITERATIONS, enqueued_us / ITERATIONS


if __name__ == "__main__":
    main()
