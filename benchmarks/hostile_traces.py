"""Measures how soon files that are not traces are refused: seconds, peak memory and message.

python benchmarks/hostile_traces.py [--megabytes 200]

Each is written to a temporary directory and read in a separate process. Before they were refused the first took
33 s, the names (92 MB) 108 s and 1.2 GB, the members of a single event each (62 MB) more than two minutes and 2.8 GB.
"""

import argparse
import gzip
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = b'{"traceEvents":['

READ = """
import re, sys, time
from pathlib import Path
from overlap_sweep.trace.files import read_trace_file
start = time.perf_counter()
found = read_trace_file(Path(sys.argv[1]), with_parts=True)
seconds = time.perf_counter() - start
peak_mib = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
print(f"{seconds:7.1f} s {peak_mib:7.0f} MiB  {found.problem or f'{len(found.rows)} rows'}")
"""


def kernels(name: str, stream: str) -> Iterable[bytes]:
    """Events without end; `{i}` in their names and streams is their number."""
    for i in itertools.count():
        of_event = f'"name":"{name.format(i=i)}","ts":{2 * i},"dur":1,"pid":0,"tid":{stream.format(i=i)}'
        yield f'{{"ph":"X","cat":"kernel",{of_event}}},'.encode()


def members(text: bytes) -> Iterable[bytes]:
    yield gzip.compress(HEAD)
    yield from itertools.repeat(gzip.compress(text))


FILES: dict[str, Callable[[], Iterable[bytes]]] = {
    "empty objects": lambda: itertools.chain([HEAD], itertools.repeat(b"{}," * 1000)),
    "small objects": lambda: itertools.chain([HEAD], itertools.repeat(b'{"a":1},' * 1000)),
    "numbers": lambda: itertools.chain([HEAD], itertools.repeat(b"1," * 1000)),
    "names": lambda: itertools.chain([HEAD], kernels("kernel_number_{i}", "7")),
    "streams": lambda: itertools.chain([HEAD], kernels("nvjet_a", "{i}")),
    "gzip members, empty": lambda: members(b""),
    "gzip members of one event": lambda: members(next(iter(kernels("nvjet_a", "7")))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        for name, contents in FILES.items():
            left = megabytes * 1e6
            with path.open("wb") as file:
                for content in contents():
                    left -= file.write(content)
                    if left < 0:
                        break
            done = subprocess.run(
                [sys.executable, "-c", READ, str(path)], cwd=ROOT, check=True, capture_output=True, text=True
            )
            print(f"{name:28} {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
