"""Records traces of small training programs with one planted cause of slow communication each (`causes/`):

    python benchmarks/record_causes.py OUT --device cuda --nproc 2 [--only NAME,...] [--only-times] [--list]

It starts torchrun for each environment that scenarios need, on a GPU or on a CPU with gloo, and goes on when a scenario
fails or hangs. `torchrun --nproc-per-node 2 benchmarks/record_causes.py OUT` records those that run in its environment.
OUT/<scenario>/ has each rank's trace_rank<r>.json.gz and scenario.json: what was planted, what may hold too, what ran.
At the end it prints what following the advice for each cause gained: steps of the scenario and of one that differs from
it in nothing else, without the profiler. Nothing of overlap_sweep is imported.
"""

# ruff: noqa: E402, I001

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
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

# Registers the scenarios, in this order: the last may leave a device that refuses other work.
from causes import data_parallel, sharded, zero1, tensor_parallel, host, queues, graphs
from causes.gains import gains_of
from causes.recording import record_here
from causes.scenario import SCENARIOS, Scenario, needed

MODULES = (data_parallel, sharded, zero1, tensor_parallel, host, queues, graphs)
# A scenario takes 1 to 5 s on two GPUs, the first also what starting takes.
STALLED_AFTER_S = {"cuda": 60, "cpu": 120}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder for the traces")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nproc", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--only", default="", help="names of scenarios, with commas between; also of another device")
    parser.add_argument("--only-times", action="store_true", help="record no traces")
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
    return [each for each in SCENARIOS.values() if device in each.devices and each.recorded]


def main() -> int:
    given = arguments()
    scenarios = chosen(given.only, given.device)
    if given.list:
        for each in scenarios:
            needs = " ".join(f"{name}={value}" for name, value in each.environment.items())
            print(f"{each.name:28} {each.planted(given.device)['cause']:12} {needs:32} {each.program}")
            for name, advice in each.mends.items():
                print(f"{'':28} mended by {advice} ({name})")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        record_here(given.out, given.device, scenarios, traces=not given.only_times)
        # A status other than 0 would end the other ranks: what lacks a scenario.json has failed.
        return 0
    started, failed = time.monotonic(), []
    for environment in distinct_environments(scenarios, given.device):
        same = [each for each in scenarios if needed(each, given.device) == environment]
        failed += record_in_processes(given, environment, same)
    (given.out / "begun.txt").unlink(missing_ok=True)
    print_recorded(given.out, scenarios)
    print_mended(given.out, [each for each in scenarios if each.mends])
    print(f"{len(scenarios) - len(failed)} of {len(scenarios)} recorded in {time.monotonic() - started:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


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
            *["--only-times"] * given.only_times,
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


def print_recorded(out: Path, scenarios: list[Scenario]) -> None:
    """Prints each scenario with its cause, the median step in ms and its largest trace in bytes."""
    print(f"\n{'scenario':28} {'cause':12} {'step ms':>8} {'bytes':>9}")
    for each in scenarios:
        described = read(out, each.name)
        if described is None:
            print(f"{each.name:28} {'failed':>21}")
            continue
        traces = [trace.stat().st_size for trace in (out / each.name).glob("trace_rank*.json.gz")]
        print(f"{each.name:28} {described['cause']:12} {described['step_ms']:8.1f} {max(traces, default=0):9,}")


def print_mended(out: Path, scenarios: list[Scenario]) -> None:
    """Prints what following the advice gained: medians of steps without the profiler."""
    head = f"{'scenario':26} {'cause':12} {'before ms':>9}  {'advice':64} {'after ms':>9} {'faster by':>9}"
    print(f"\n{head}  quartiles ms")
    others = {name: described for name in SCENARIOS if (described := read(out, name))}
    for each in scenarios:
        gains = {gain.mend: gain for gain in gains_of(others[each.name], others)} if each.name in others else {}
        for name, advice in each.mends.items():
            start = f"{each.name:26} {each.planted(others[each.name]['device'])['cause'] if gains else each.cause:12}"
            if gain := gains.get(name):
                before, after = (statistics.median(times) for times in (gain.before_ms, gain.after_ms))
                ranges = " and ".join(f"{low:.2f}-{high:.2f}" for low, high in gain.ranges)
                print(f"{start} {before:9.2f}  {advice:64} {after:9.2f} {gain.faster:9.1%}  {ranges}")
            else:
                print(f"{start} {'':9}  {advice:64} {'failed':>9}")


def read(out: Path, name: str) -> dict[str, Any] | None:
    path = out / name / "scenario.json"
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
