"""Measures the cost of one Slurm job per point: a sweep packed in several ways, on the tests' cluster.

    python -m benchmarks.slurm_packing [POINTS]

A cluster of two nodes with 8 simulated GPUs each is started on this machine, which requires root. The sweep of tiny
points at TP size 2 runs on the CPU. Concurrent jobs share this machine's cores, unlike on a real cluster, so the
comparison is mostly of process starts and of GPUs held meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from overlap_sweep.results.run_directory import RESULT_FILE, find_points, read_result
from tests.slurm.cluster import Slurm, started_cluster
from tests.sweeps import ROOT, SMALL

WAYS = {
    "packed": ("hydra/launcher=slurm",),
    "packed, 10 points a job": ("hydra/launcher=slurm", "hydra.launcher.points_per_job=10"),
    "one job a point": ("hydra/launcher=submitit_slurm",),
}
GPUS_PER_JOB = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=int, nargs="?", default=30)
    points = parser.parse_args().points
    table = Table("way", "jobs", "wall s", "s per point", "GPU-seconds held", title=f"{points} points, TP size 2")
    with started_cluster() as cluster:
        for way, options in WAYS.items():
            wall_s, jobs, held_s = run(cluster, points, options)
            row = (str(jobs), f"{wall_s:.1f}", f"{wall_s / points:.2f}", f"{GPUS_PER_JOB * held_s:.0f}")
            table.add_row(way, *row)
            cluster.clean_up()
    Console().print(table)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} cores; load average at the end: {load}")


def run(cluster: Slurm, points: int, options: tuple[str, ...]) -> tuple[float, int, int]:
    """Seconds from the command to its end, how many jobs there were, and the seconds that they ran in sum."""
    with tempfile.TemporaryDirectory() as folder:
        name = Path(folder).name
        # Distinct points that take equally long: the number of chunks is the same for all.
        swept = ("num_sm=4", f"repetition={','.join(map(str, range(points)))}")
        asked = (
            "hydra.launcher.poll_s=1",
            f"hydra.launcher.gpus_per_node={GPUS_PER_JOB}",
            f"hydra.launcher.name={name}",
        )
        command = [sys.executable, "launch.py", "-m", *SMALL, "profile=none", *swept, *options, *asked]
        start = time.perf_counter()
        subprocess.run(
            [*command, f"hydra.sweep.dir={folder}"], cwd=ROOT, env=cluster.environment, check=True, stdout=sys.stderr
        )
        wall_s = time.perf_counter() - start
        results = [read_result(path / RESULT_FILE) for path in find_points(Path(folder))]
        assert [result.status for result in results] == ["ok"] * points
        shown: dict[str, list[str]] = {}

        def all_ended() -> bool:
            told = cluster.run("squeue", "-h", "-r", "-t", "all", f"--name={name}", "-o", "%i|%T|%M").splitlines()
            shown.update({row[0]: row[1:] for row in (line.split("|") for line in told)})
            return all(state == "COMPLETED" for state, _ in shown.values())

        # The launcher ends with the last result, a moment before the last job.
        cluster.wait_for(all_ended, "the end of the jobs")
    return wall_s, len(shown), sum(seconds(ran) for _, ran in shown.values())


def seconds(ran: str) -> int:
    """Of squeue's `minutes:seconds`."""
    minutes, rest = ran.split(":")
    return 60 * int(minutes) + int(rest)


if __name__ == "__main__":
    main()
