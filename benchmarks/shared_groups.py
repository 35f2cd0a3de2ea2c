"""Measures what keeping a torchrun group alive saves: a 15-point sweep with shared groups and with a group per point.

python benchmarks/shared_groups.py [extra overrides ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SWEEP = ["-m", "tp_size=2,4,8", "method=bulk", "num_sm=1,2,4,8,16"]


def seconds(directory: str, *overrides: str) -> float:
    command = [sys.executable, "launch.py", *SWEEP, f"hydra.sweep.dir={directory}", *overrides]
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        shared_s = seconds(f"{directory}/shared", *sys.argv[1:])
        print(f"one group per world size: {shared_s:6.1f} s")
        isolated_s = seconds(f"{directory}/isolated", "runtime.isolate=true", *sys.argv[1:])
        print(f"one group per point:      {isolated_s:6.1f} s   {isolated_s / shared_s:.1f} times as long")


if __name__ == "__main__":
    main()
