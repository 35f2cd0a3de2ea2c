"""Measures the cost of a store per measurement: the time to add and to find one, by size of the store.

The measurements are copies of one real result with different num_sm and times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from overlap_sweep.results.run_directory import Result, read_result
from overlap_sweep.store import Store

SIZES = (10, 1000, 10_000)
TIMED = 50
"""Calls of which the median is printed."""


def varied(result: Result, number: int) -> Result:
    seconds = f"2026-01-{1 + number // 86400 % 28:02}T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}"
    return structs.replace(result, recorded={**result.recorded, "num_sm": number}, started=f"{seconds}+00:00")


def timed_ms(call: Callable[[int], Any]) -> list[float]:
    """Returns the times of TIMED calls in milliseconds."""
    taken = []
    for number in range(TIMED):
        start = time.perf_counter()
        call(number)
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def measure(path: Path, result: Result, size: int) -> str:
    start = time.perf_counter()
    with Store(path) as store:
        for number in range(size):
            store.add(varied(result, number), path.parent)
    fill_s = time.perf_counter() - start
    with Store(path) as store:
        start = time.perf_counter()
        assert store.find(varied(result, 0).point, result.environment)
        first_ms = (time.perf_counter() - start) * 1e3
        find_ms = timed_ms(lambda i: store.find(varied(result, i * size // TIMED).point, result.environment))
        miss_ms = timed_ms(lambda i: store.find(varied(result, size + i).point, result.environment))
        add_ms = timed_ms(lambda i: store.add(varied(result, size + i), path.parent))
    columns = [statistics.median(add_ms), max(add_ms), first_ms, statistics.median(find_ms), statistics.median(miss_ms)]
    return f"{size:>10,}" + "".join(f"{value:>14.2f}" for value in columns) + f"{fill_s:>10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="result.json of an ok point")
    parser.add_argument("--directory", type=Path, help="directory of the stores; default: the system's")
    arguments = parser.parse_args()
    result = read_result(arguments.result)
    headers = ["add", "slowest add", "first find", "find", "find nothing"]
    print(f"milliseconds, medians of {TIMED}; a result of {arguments.result.stat().st_size / 1e3:.1f} kB")
    print(f"{'kept':>10}" + "".join(f"{header:>14}" for header in headers) + f"{'fill (s)':>10}")
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            print(measure(Path(directory) / "measurements", result, size), flush=True)


if __name__ == "__main__":
    main()
