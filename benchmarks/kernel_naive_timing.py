"""Compares naive with GPU-bound timing of kernels: PyTorch's fused operators and their baselines.

    torchrun --nproc-per-node 8 benchmarks/kernel_naive_timing.py [CUDA_DEVICE_MAX_CONNECTIONS]

Naive timing is the usual loop: enqueue twenty calls, wait for the GPU, divide. Each rank's GEMM is the
same on any number of ranks.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from overlap_sweep import backends
from overlap_sweep.backends.symm_mem import MAX_CONNECTIONS
from overlap_sweep.backends.torch.kernels import baselines_of
from overlap_sweep.config import ResolvedModel
from overlap_sweep.measure import Ranks
from overlap_sweep.measure.timing import summarise, time_variants
from overlap_sweep.runtime.group_config import NO_MULTICAST
from overlap_sweep.workloads.kernel import run as kernel_run
from overlap_sweep.workloads.kernel.config import Resolved, ResolvedOptions
from overlap_sweep.workloads.kernel.run import Call

ITERATIONS = 20
REPEATS = 21
LOCAL_GEMMS = {
    "ag_gemm": [(8192, 8192, 7168), (8192, 8192, 1280)],
    "gemm_rs": [(8192, 7168, 8192), (8192, 1280, 8192)],
}
"""Sizes m, k and n of one rank's GEMM, by kernel."""


def main() -> None:
    connections = sys.argv[1] if len(sys.argv) > 1 else str(MAX_CONNECTIONS)
    os.environ.update(NO_MULTICAST, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
    if ranks.rank == 0:
        print(f"{'kernel':8} {'m x k x n of a rank':20} {'':11} {'naive us':>9} {'GPU-bound us':>13}", flush=True)
    for kernel, gemms in LOCAL_GEMMS.items():
        for m, k, n in gemms:
            measure(kernel, m, k, n, ranks)
    dist.destroy_process_group()


def measure(kernel: str, m: int, k: int, n: int, ranks: Ranks) -> None:
    """The baselines and the fused operator, both ways; rank 0 prints."""
    gathers, module = kernel == "ag_gemm", backends.load_kernels("symm_mem")
    sizes = {"m": m, "n": n * ranks.world_size if gathers else n, "k": k if gathers else k * ranks.world_size}
    point = Resolved(
        **{"kernel": kernel, "tp_size": ranks.world_size, "backend": "symm_mem", "precision": "bf16", **sizes},
        model=ResolvedModel(name="custom"),
        workload=ResolvedOptions(tokens=m, warmup=0, repeats=REPEATS),
        implementations={},
    )
    problem = kernel_run.draw_problem(point, ranks)
    calls = baselines_of(problem, ranks)
    calls["ring"] = module.build(point, module.implementations(point)["ring"], problem, ranks)
    naive_us = {name: naive(call, len(problem.inputs), ranks) for name, call in calls.items()}
    variants = {name: kernel_run.variant(call, problem) for name, call in calls.items()}
    samples = time_variants(variants, ranks, 3, REPEATS)
    for name, taken in samples.items():
        bound = f"{summarise(taken.us['all']).median_us:13.1f}{' (launch-bound)' if taken.launch_bound else ''}"
        if ranks.rank == 0:
            print(f"{kernel:8} {f'{m} x {k} x {n}':20} {name:11} {naive_us[name]:9.1f} {bound}", flush=True)
    module.close()


def naive(call: Call, inputs: int, ranks: Ranks) -> float:
    """Microseconds of a call, slowest rank."""
    for iteration in range(3):
        call(iteration % inputs)
    ranks.barrier()
    start = time.perf_counter_ns()
    for iteration in range(ITERATIONS):
        call(iteration % inputs)
    ranks.synchronize()
    return ranks.slowest([(time.perf_counter_ns() - start) / 1e3 / ITERATIONS])[0]


if __name__ == "__main__":
    main()
