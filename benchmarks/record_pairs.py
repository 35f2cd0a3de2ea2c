"""Records pairs of small training programs that differ in one thing (`causes/pairs.py`), for predictions_table.py:

    python benchmarks/record_pairs.py OUT --device cuda --nproc 2 [--only NAME...]

OUT/traces/<side>/ has each rank's trace_rank<r>.json.gz and scenario.json, OUT/pairs.yaml the pairs with the times of
steps without the profiler, as tests/data/predictions.yaml. Both sides run in turns in one process, or, where they need
other environments, in processes started in turns. What fails or hangs is left out. Nothing of overlap_sweep is
imported.
"""

# ruff: noqa: I001

import os
import record_causes  # First: it keeps NVLink multicast off.

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from causes.pairs import Pair, pairs_of
from causes.recording import process_group, profiled_steps, settle, timed_steps, warm
from causes.scenario import Job, Scenario, needed

TURNS, STEPS_IN_TURN = 6, 3
"""Turns of both sides before their traces are recorded, and as many after."""
LAUNCHES = 2
"""Number of launches of each environment, if a pair needs two."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the traces")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nproc", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--only", nargs="+", default=[], help="names of pairs")
    given = parser.parse_args()
    known = {each.before.name: each for each in pairs_of(given.device)}
    if unknown := {*given.only} - {*known}:
        parser.error(f"no pair is called {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    pairs = [known[name] for name in given.only or known]
    traces = given.out / "traces"
    if "RANK" in os.environ:
        record_here(traces, given.device, pairs)
        return 0
    started = time.monotonic()
    traces.mkdir(parents=True, exist_ok=True)
    sides = [side for each in pairs for side in (each.before, each.after)]
    for side in sides:
        # A side that runs in several processes adds to what is there.
        (traces / side.name / "scenario.json").unlink(missing_ok=True)
    environments = record_causes.distinct_environments(sides, given.device)
    for environment in environments + [one for one in environments if one] * (LAUNCHES - 1):
        own = [each for each in pairs if environment in (each.before.environment, each.after.environment)]
        launch(given, environment, own)
    entries = [entry for each in pairs for entry in entries_of(each, traces)]
    (given.out / "pairs.yaml").write_text("".join(f"- {json.dumps(entry)}\n" for entry in entries))
    print(f"{len(pairs)} pairs, {len(entries)} predictions to make; took {time.monotonic() - started:.0f} s")
    return 0


def launch(given: argparse.Namespace, environment: dict[str, str], pairs: Sequence[Pair]) -> None:
    """Runs torchrun, again with the pairs after one that broke or hung it."""
    remaining, traces = [each.before.name for each in pairs], given.out / "traces"
    while remaining:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={given.nproc}"),
            *("--master-addr=127.0.0.1", f"--master-port={record_causes.free_port()}"),
            *(__file__, str(given.out), "--device", given.device, "--only", *remaining),
        ]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        process = subprocess.Popen(command, env=variables, start_new_session=True)
        limit_s = record_causes.STALLED_AFTER_S[given.device]
        hung = record_causes.wait_while_it_progresses(process, traces, limit_s)
        begun = record_causes.begun(traces)
        if process.returncode == 0 and not hung:
            return
        attempted = [name for name in remaining if name in begun]
        failed = attempted[-1] if attempted else "start"
        print(f"{failed}: {'no progress' if hung else f'exit status {process.returncode}'}", flush=True)
        # What does not even start will not the next time.
        remaining = remaining[remaining.index(failed) + 1 :] if attempted else []


def record_here(traces: Path, device: str, pairs: Sequence[Pair]) -> None:
    with process_group(device) as job:
        for each in pairs:
            if job.rank == 0:
                with (traces / "begun.txt").open("a") as file:
                    file.write(f"{each.before.name}\n")
            try:
                record([side for side in (each.before, each.after) if is_possible(side, device)], job, traces)
            except Exception as error:
                # What all ranks refuse leaves them in step; else they are stopped.
                print(f"{each.before.name}, rank {job.rank}: {type(error).__name__}: {error}", flush=True)
            gc.collect()
            if job.on_gpu:
                torch.cuda.empty_cache()


def is_possible(side: Scenario, device: str) -> bool:
    return all(os.environ.get(name) == value for name, value in needed(side, device).items())


def record(sides: Sequence[Scenario], job: Job, traces: Path) -> None:
    """Times the sides in turns, and records them in between."""
    steps = [(side, warm(side, job)) for side in sides]
    turns_ms: dict[str, list[float]] = {side.name: [] for side in sides}

    def take_turns() -> None:
        for _ in range(TURNS):
            for side, step in steps:
                step()
                turns_ms[side.name].append(round(median(timed_steps(step, job, STEPS_IN_TURN)), 3))

    take_turns()
    for side, step in steps:
        (traces / side.name).mkdir(exist_ok=True)
        profiled_steps(side, step, job, traces / side.name / f"trace_rank{job.rank}.json.gz")
        settle(job)
    take_turns()
    for name, own in turns_ms.items() if job.rank == 0 else ():
        path = traces / name / "scenario.json"
        earlier_ms = json.loads(path.read_text())["turns_ms"] if path.exists() else []
        machine = torch.cuda.get_device_name() if job.on_gpu else "cpu"
        described = {"name": name, "device": machine, "torch": torch.__version__, "turns_ms": earlier_ms + own}
        path.write_text(json.dumps(described) + "\n")
        print(f"{name}: {median(own):.2f} ms", flush=True)


def entries_of(pair: Pair, traces: Path) -> list[dict[str, Any]]:
    """Returns the predictions that the pair allows. `measured_ms`: the median of the first side's turns, and that times
    the median ratio of turns that followed each other; `noise`: two standard errors of that ratio."""
    paths = [traces / side.name / "scenario.json" for side in (pair.before, pair.after)]
    if not all(path.exists() for path in paths):
        return []
    before_ms, after_ms = (json.loads(path.read_text())["turns_ms"] for path in paths)
    ratios = [after / before for before, after in zip(before_ms, after_ms, strict=True)]
    low, ratio, high = quantiles(ratios, n=4)
    # A median's standard error is 0.93 quartile ranges / sqrt(count) of normal times.
    noise = round(2 * 0.93 * (high - low) / len(ratios) ** 0.5, 4)
    measured_ms = [round(median(before_ms), 3), round(median(before_ms) * ratio, 3)]
    ways = [(pair.before.name, pair.change, pair.after.name, measured_ms)]
    if pair.back:
        ways.append((pair.after.name, pair.back, pair.before.name, measured_ms[::-1]))
    names = ("recordings", "before", "change", "after", "measured_ms", "noise")
    return [dict(zip(names, ("traces", *way, noise), strict=True)) for way in ways]


if __name__ == "__main__":
    sys.exit(main())
