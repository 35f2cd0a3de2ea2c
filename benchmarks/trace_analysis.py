"""How long `analyze.py trace` takes over some traces, and its peak memory, beside the bytes of JSON inside.

python benchmarks/trace_analysis.py [FILE ...]        (default: the recorded traces of the tests)
"""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def json_bytes(path: Path) -> int:
    content = path.read_bytes()
    return len(gzip.decompress(content) if path.suffix == ".gz" else content)


def main() -> None:
    files = [Path(name).resolve() for name in sys.argv[1:]] or sorted((ROOT / "tests/data/traces").glob("h200*"))
    command = [sys.executable, "analyze.py", "trace", *map(str, files), "--format", "csv"]
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - start
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{len(files)} traces, {sum(map(json_bytes, files)) / 2**20:.1f} MiB of JSON, {os.cpu_count()} cores:")
    print(f"{wall_s:.2f} s from start to exit, {peak_mib:.0f} MiB at the peak of the largest process")


if __name__ == "__main__":
    main()
