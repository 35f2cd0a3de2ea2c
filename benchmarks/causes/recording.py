"""Runs scenarios as one of torchrun's processes: times their steps, and records some with PyTorch's profiler."""

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from causes.scenario import SCENARIOS, Job, Scenario, Step, needed

WARM_UP_STEPS, TIMED_STEPS, PROFILER_WARM_UP_STEPS = 3, 10, 2
# With its mends a scenario is timed in turns, so that all see the same clocks and neighbours.
TURNS, STEPS_IN_TURN = 3, 4
RECORDED_VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    *("TORCH_NCCL_HIGH_PRIORITY", "UB_SKIPMC", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"),
    "NVSHMEM_DISABLE_NVLS",
)


@contextmanager
def process_group(device_type: str) -> Iterator[Job]:
    """Gives this rank's job, on a GPU and cores of its own, or on the CPU."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    if device_type == "cuda":
        keep_to_own_cores(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    yield Job(device)
    dist.destroy_process_group()


def keep_to_own_cores(local_rank: int, local_ranks: int) -> None:
    """Gives each rank its part of the cores: ranks on two threads of one core are hosts of different speed."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        by_core.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    cores = list(by_core.values())
    count = len(cores) // local_ranks
    if count:
        own = cores[local_rank * count : (local_rank + 1) * count]
        os.sched_setaffinity(0, [cpu for core in own for cpu in core])


def record_here(out: Path, device_type: str, scenarios: Sequence[Scenario], *, traces: bool) -> None:
    """Times and records, as one of torchrun's processes, what this environment allows."""
    with process_group(device_type) as job:
        for each in scenarios:
            needs = needed(each, device_type)
            if needs != {name: os.environ.get(name) for name in needs}:
                tell(job, f"{each.name}: left out, needs {needs}")
                continue
            started = time.monotonic()
            if job.rank == 0:
                with (out / "begun.txt").open("a") as file:
                    file.write(f"{each.name}\n")
            try:
                step_ms = record(each, job, out / each.name, traces=traces)
                tell(job, f"{each.name}: {step_ms:.1f} ms a step, took {time.monotonic() - started:.1f} s")
            except Exception as error:
                # What all ranks refuse leaves them in step, and the others are still wanted; else they are stopped.
                print(f"rank {job.rank}: {each.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            gc.collect()
            if job.on_gpu:
                torch.cuda.empty_cache()


def tell(job: Job, line: str) -> None:
    if job.rank == 0:
        print(line, flush=True)


def record(scenario: Scenario, job: Job, directory: Path, *, traces: bool) -> float:
    """Records one scenario on this rank. Returns the median of its step without the profiler in ms."""
    directory.mkdir(parents=True, exist_ok=True)
    step = warm(scenario, job)
    durations_ms = timed_steps(step, job, TIMED_STEPS)
    if traces:
        profiled_steps(scenario, step, job, directory / f"trace_rank{job.rank}.json.gz")
        settle(job)
    described = {
        "name": scenario.name,
        **scenario.planted(job.device.type),
        "program": scenario.program,
        "device": job.device.type,
        "device_name": torch.cuda.get_device_name() if job.on_gpu else platform.processor() or platform.machine(),
        "ranks": job.ranks,
        "environment": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
        "step_ms": round(statistics.median(durations_ms), 3),
        "durations_ms": [round(took, 3) for took in durations_ms],
        "mends": {name: {"advice": advice, "work": SCENARIOS[name].work} for name, advice in scenario.mends.items()},
        "in_turns_ms": {},
        "active_steps": scenario.active_steps,
        "profiler_step": scenario.marked_steps,
        "profiler": scenario.profiler,
        "torch": torch.__version__,
    }
    described_in = directory / "scenario.json"
    if job.rank == 0:
        described_in.write_text(json.dumps(described, indent=2) + "\n")
    # After the profiler: what mends leave behind must not be in the trace.
    if beside := [name for name in scenario.mends if mended_here(scenario, SCENARIOS[name], job)]:
        described["in_turns_ms"] = timed_in_turns(scenario, step, beside, job)
    if job.rank == 0:
        described_in.write_text(json.dumps(described, indent=2) + "\n")
    return statistics.median(durations_ms)


def mended_here(scenario: Scenario, mend: Scenario, job: Job) -> bool:
    device = job.device.type
    return device in mend.devices and needed(mend, device) == needed(scenario, device)


def timed_in_turns(scenario: Scenario, step: Step, mends: Sequence[str], job: Job) -> dict[str, list[float]]:
    """Returns the durations in ms of the scenario's steps and of its mends', taken in turns."""
    steps = {scenario.name: step} | {name: warm(SCENARIOS[name], job) for name in mends}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, each in steps.items():
            each()
            found[name] += [round(took, 3) for took in timed_steps(each, job, STEPS_IN_TURN)]
    return found


def warm(scenario: Scenario, job: Job) -> Step:
    step = scenario.make(job)
    for _ in range(WARM_UP_STEPS):
        step()
    settle(job)
    return step


def settle(job: Job) -> None:
    """Waits for the device and for the other ranks, so that none starts ahead."""
    job.module.synchronize()
    dist.barrier()
    job.module.synchronize()


def timed_steps(step: Step, job: Job, count: int) -> list[float]:
    """Returns durations in ms from the end of a step to the end of the next one, on the device's clock."""
    if not job.on_gpu:
        ends = [time.perf_counter()]
        for _ in range(count):
            step()
            ends.append(time.perf_counter())
        settle(job)
        return [1e3 * (after - before) for before, after in pairwise(ends)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    settle(job)
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def profiled_steps(scenario: Scenario, step: Step, job: Job, trace: Path) -> None:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * job.on_gpu
    if not scenario.marked_steps:
        with profile(activities=activities, **scenario.profiler) as profiler:
            for _ in range(scenario.active_steps):
                step()
        profiler.export_chrome_trace(str(trace))
        return
    plan = schedule(wait=0, warmup=PROFILER_WARM_UP_STEPS, active=scenario.active_steps, repeat=1)

    def export(profiler: Any) -> None:
        profiler.export_chrome_trace(str(trace))

    with profile(activities=activities, schedule=plan, on_trace_ready=export, **scenario.profiler) as profiler:
        for _ in range(PROFILER_WARM_UP_STEPS + scenario.active_steps):
            step()
            profiler.step()
