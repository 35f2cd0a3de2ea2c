"""Records traces of small training programs with one planted cause of slow communication each (`causes/`):

    python benchmarks/record_causes.py OUT --device cuda --nproc 2 [--only NAME,...] [--list]

It starts torchrun for each environment that scenarios need, on a GPU or on a CPU with gloo, and goes on when a scenario
fails or hangs. `torchrun --nproc-per-node 2 benchmarks/record_causes.py OUT` records those that run in its environment.
OUT/<scenario>/ has each rank's trace_rank<r>.json.gz and scenario.json: what was planted, what may hold too, what ran.
Nothing of overlap_sweep is imported.
"""

# ruff: noqa: E402, I001

from __future__ import annotations

import os

# Before NCCL or PyTorch start: NVLink multicast stays off, also in what is started from here.
NO_MULTICAST = {
    "UB_SKIPMC": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
os.environ.update(NO_MULTICAST)

import argparse
import gc
import json
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

# Registers the scenarios.
from causes import data_parallel, host, queues, sharded, tensor_parallel
from causes.scenario import SCENARIOS, Job, Scenario, Step

MODULES = (data_parallel, sharded, tensor_parallel, host, queues)
WARM_UP_STEPS, TIMED_STEPS, PROFILER_WARM_UP_STEPS = 3, 10, 2
RECORDED_VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    *("TORCH_NCCL_HIGH_PRIORITY", *NO_MULTICAST),
)
# A scenario takes 1 to 5 s on two GPUs, the first also what starting takes.
STALLED_AFTER_S = {"cuda": 60, "cpu": 120}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder for the traces")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nproc", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--only", default="", help="names of scenarios, with commas between; also of another device")
    parser.add_argument("--list", action="store_true", help="only print the scenarios")
    given = parser.parse_args()
    if not given.list and given.out is None:
        parser.error("name a folder for the traces, or give --list")
    unknown = set(filter(None, given.only.split(","))) - set(SCENARIOS)
    if unknown:
        parser.error(f"no scenario is called {', '.join(sorted(unknown))}: --list names all")
    return given


def chosen(only: str, device: str) -> list[Scenario]:
    if only:
        return [SCENARIOS[name] for name in only.split(",")]
    return [each for each in SCENARIOS.values() if device in each.devices]


def main() -> int:
    given = arguments()
    scenarios = chosen(given.only, given.device)
    if given.list:
        for each in scenarios:
            needs = " ".join(f"{name}={value}" for name, value in each.environment.items())
            print(f"{each.name:24} {each.planted(given.device)['cause']:12} {needs:32} {each.program}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        return record_here(given.out, given.device, scenarios)
    started, failed = time.monotonic(), []
    for environment in distinct_environments(scenarios, given.device):
        same = [each for each in scenarios if needed(each, given.device) == environment]
        failed += record_in_processes(given, environment, same)
    (given.out / "begun.txt").unlink(missing_ok=True)
    print_table(given.out, scenarios)
    print(f"{len(scenarios) - len(failed)} of {len(scenarios)} recorded in {time.monotonic() - started:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def needed(scenario: Scenario, device: str) -> dict[str, str]:
    """The variables that the scenario needs on this device: on a CPU none has a meaning."""
    return scenario.environment if device == "cuda" else {}


def distinct_environments(scenarios: list[Scenario], device: str) -> list[dict[str, str]]:
    distinct: list[dict[str, str]] = []
    for each in scenarios:
        if needed(each, device) not in distinct:
            distinct.append(needed(each, device))
    return distinct


def record_in_processes(given: argparse.Namespace, environment: dict[str, str], scenarios: list[Scenario]) -> list[str]:
    """Runs torchrun, again after the scenario that broke or hung it. Returns the names that failed."""
    failed, remaining = [], list(scenarios)
    for each in scenarios:
        # What an earlier run has left would look like this one's.
        (given.out / each.name / "scenario.json").unlink(missing_ok=True)
    while remaining:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={given.nproc}"),
            *("--master-addr=127.0.0.1", f"--master-port={free_port()}"),
            *(__file__, str(given.out), "--device", given.device, "--only", ",".join(each.name for each in remaining)),
        ]
        process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
        hung = wait_while_it_progresses(process, given.out, STALLED_AFTER_S[given.device])
        attempted = [each for each in remaining if each.name in begun(given.out)]
        missing = [each for each in remaining if not (given.out / each.name / "scenario.json").exists()]
        if process.returncode == 0 and not hung:
            return failed + [each.name for each in missing]
        last = attempted[-1] if attempted else remaining[0]
        lost = [each.name for each in missing if remaining.index(each) <= remaining.index(last)]
        print(f"{last.name}: {'no progress, stopped' if hung else f'exit status {process.returncode}'}", flush=True)
        failed += lost
        remaining = remaining[remaining.index(last) + 1 :]
    return failed


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def begun(out: Path) -> set[str]:
    path = out / "begun.txt"
    return set(path.read_text().split()) if path.exists() else set()


def wait_while_it_progresses(process: subprocess.Popen[bytes], out: Path, limit_s: float) -> bool:
    """Waits for its end, or stops it when no scenario has begun for limit_s. Returns whether it was stopped."""
    (out / "begun.txt").unlink(missing_ok=True)
    count, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = len(begun(out))
        if now > count:
            count, since = now, time.monotonic()
        elif time.monotonic() - since > limit_s:
            # torchrun passes it on; what does not listen is in the same session.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return True
    return False


def record_here(out: Path, device_type: str, scenarios: list[Scenario]) -> int:
    """Records, as one of torchrun's processes, what this environment allows. Returns the exit status."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    job = Job(device)
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
            median_ms = record(each, job, out / each.name)
            tell(job, f"{each.name}: {median_ms:.1f} ms a step, took {time.monotonic() - started:.1f} s")
        except Exception as error:
            # What all ranks refuse leaves them in step, and the others are still wanted; else they are stopped.
            print(f"rank {job.rank}: {each.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        gc.collect()
        if job.on_gpu:
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    # Under torchrun a status other than 0 would end the other ranks: what lacks a scenario.json has failed.
    return 0


def tell(job: Job, line: str) -> None:
    if job.rank == 0:
        print(line, flush=True)


def record(scenario: Scenario, job: Job, directory: Path) -> float:
    """Records one scenario on this rank. Returns the median of its step without the profiler in ms."""
    directory.mkdir(parents=True, exist_ok=True)
    step = scenario.make(job)
    for _ in range(WARM_UP_STEPS):
        step()
    settle(job)
    durations_ms = timed_steps(step, job)
    settle(job)
    profiled_steps(scenario, step, job, directory / f"trace_rank{job.rank}.json.gz")
    settle(job)
    median_ms = statistics.median(durations_ms)
    if job.rank == 0:
        described = {
            "name": scenario.name,
            **scenario.planted(job.device.type),
            "program": scenario.program,
            "device": job.device.type,
            "device_name": torch.cuda.get_device_name() if job.on_gpu else platform.processor() or platform.machine(),
            "ranks": job.ranks,
            "environment": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
            "step_ms": round(median_ms, 3),
            "step_ms_spread": [round(min(durations_ms), 3), round(max(durations_ms), 3)],
            "active_steps": scenario.active_steps,
            "profiler_step": scenario.marked_steps,
            "profiler": scenario.profiler,
            "torch": torch.__version__,
        }
        (directory / "scenario.json").write_text(json.dumps(described, indent=2) + "\n")
    return median_ms


def settle(job: Job) -> None:
    """Waits for the device and for the other ranks, so that none starts ahead."""
    job.module.synchronize()
    dist.barrier()
    job.module.synchronize()


def timed_steps(step: Step, job: Job) -> list[float]:
    """Durations in ms from the end of a step to the end of the next one, on the device's clock."""
    if not job.on_gpu:
        ends = [time.perf_counter()]
        for _ in range(TIMED_STEPS):
            step()
            ends.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(ends)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
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


def print_table(out: Path, scenarios: list[Scenario]) -> None:
    """Prints each scenario with its cause, the median step in ms and its largest trace in bytes."""
    print(f"\n{'scenario':24} {'cause':12} {'step ms':>8} {'bytes':>9}")
    for each in scenarios:
        path = out / each.name / "scenario.json"
        if not path.exists():
            print(f"{each.name:24} {'failed':>21}")
            continue
        described = json.loads(path.read_text())
        traces = [trace.stat().st_size for trace in path.parent.glob("trace_rank*.json.gz")]
        print(f"{each.name:24} {described['cause']:12} {described['step_ms']:8.1f} {max(traces):9,}")


if __name__ == "__main__":
    sys.exit(main())
