"""Measures time and peak memory of `analyze.py diagnose` over more and more ranks.

python benchmarks/many_ranks.py TRACE [--megabytes 100] [--ranks 1 2 4 8 12] [--command diagnose]

TRACE, a smaller Kineto trace of one rank, is repeated up to that many megabytes of JSON for each rank, with all ranks
in its process groups. Memory is the sum over all processes of the command, each page that several share in parts (PSS).
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trace_reader import ROOT, repeated

EVERY_S = 0.05


def as_rank(text: str, rank: int, ranks: int) -> str:
    """Returns the trace as this rank would have recorded it."""
    listed = ", ".join(map(str, range(ranks)))
    text = re.sub(r'"Process Group Ranks": ?"\[\d[^"]*"', f'"Process Group Ranks": "[{listed}]"', text)
    text = re.sub(r'"Group size": ?(?!1\b)\d+', f'"Group size": {ranks}', text)
    text = re.sub(r'"pg_size": ?\d+, ?"ranks": ?\[[^]]*\]', f'"pg_size": {ranks}, "ranks": [{listed}]', text)
    return re.sub(r'"rank": ?\d+, ?"world_size": ?\d+', f'"rank": {rank}, "world_size": {ranks}', text)


def measure(command: list[str], cache: Path) -> tuple[float, float, float, float, int]:
    """Returns seconds, seconds of all cores, peak MiB of all processes and of the first one, and the most processes."""
    environment = {**os.environ, "OVERLAP_SWEEP_CACHE": str(cache)}
    begin, cores_begin = time.perf_counter(), cores_s()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    peak = first = 0.0
    most = 0
    while process.poll() is None:
        sizes = [pss_mib(pid) for pid in [process.pid, *children(process.pid)]]
        peak, first, most = max(peak, sum(sizes)), max(first, sizes[0]), max(most, len(sizes))
        time.sleep(EVERY_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}.")
    return time.perf_counter() - begin, cores_s() - cores_begin, peak, first, most


def cores_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def pss_mib(pid: int) -> float:
    try:
        return int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1]) / 1024
    except (OSError, TypeError):
        # It has ended.
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 12])
    parser.add_argument("--command", default="diagnose")
    asked = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, {asked.megabytes:g} MB of JSON a rank, analyze.py {asked.command}")
    with tempfile.TemporaryDirectory() as directory:
        text = repeated(asked.trace, asked.megabytes, Path(directory)).read_text()
        for ranks in asked.ranks:
            folder = Path(directory, f"ranks{ranks}")
            folder.mkdir()
            for rank in range(ranks):
                (folder / f"trace_rank{rank}.json").write_text(as_rank(text, rank, ranks))
            command = [sys.executable, "analyze.py", *asked.command.split(), str(folder)]
            seconds, cores, peak, first, most = measure(command, folder / "cache")
            print(
                f"  {ranks:3} ranks {seconds:6.1f} s, {cores:6.1f} s of all cores  {peak:5.0f} MiB in all  "
                f"{first:6.0f} MiB in the first of {most} processes",
                flush=True,
            )


if __name__ == "__main__":
    main()
