"""Measures the seconds per point from the start of a sweep until its first point would run.

    python benchmarks/composition.py

312 points of one model are composed, checked and named as by launch.py -m; none is run. CPU time is printed too,
because wall time is unreliable on a shared machine.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

SWEEP = (
    *("tp_size=2,4", "operator=qkv,proj,fc1,fc2", "method=bulk,ring_exchange,pipeline", "num_sm=range(1,14)"),
    "runtime.device=cpu",
)


def main() -> None:
    from overlap_sweep.runtime import jobs as launching
    from overlap_sweep.runtime.jobs import Job, Sweep

    def stop(sweep: Sweep, jobs: Sequence[Job]) -> NoReturn:
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        print(f"{len(jobs)} points: {wall_s / len(jobs):.4f} s per point, {cpu_s / len(jobs):.4f} s of CPU time")
        raise SystemExit

    launching.keep_results = stop
    with tempfile.TemporaryDirectory() as directory:
        sys.argv = ["launch.py", "-m", *SWEEP, f"hydra.sweep.dir={directory}"]
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")


if __name__ == "__main__":
    main()
