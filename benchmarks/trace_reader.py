"""Compares seconds and peak memory of our trace reader with json.load and Holistic Trace Analysis.

python benchmarks/trace_reader.py TRACE [--megabytes 500] [--hta PYTHON]

TRACE, a smaller Kineto trace, is repeated with shifted times, correlations and steps up to that many megabytes of JSON.
--hta names the Python of an environment with HolisticTraceAnalysis. Every reader runs in a separate process; its
imports are not timed.
"""

import argparse
import gzip
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

READERS = {
    "overlap_sweep, read": "from overlap_sweep.trace.kineto import read_trace as run",
    "overlap_sweep, and phases": """
from pathlib import Path
from overlap_sweep.trace.files import read_trace_file
def run(path): read_trace_file(Path(path), with_parts=False)
""",
    "overlap_sweep, and their parts": """
from pathlib import Path
from overlap_sweep.trace.files import read_trace_file
def run(path): read_trace_file(Path(path), with_parts=True)
""",
    "json.load": """
import json
def run(path): json.load(open(path))
""",
}
HTA = """
from hta.trace_analysis import TraceAnalysis
def run(path):
    analysis = TraceAnalysis(trace_files={0: path}, include_last_profiler_step=True)
    analysis.get_comm_comp_overlap(visualize=False)
"""
MEASURE = """
import re, sys, time
start = time.perf_counter()
run(sys.argv[1])
seconds = time.perf_counter() - start
# Not ru_maxrss, which starts with what the parent had when it forked.
print("RESULT", seconds, int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024)
"""


def repeated(trace: Path, megabytes: float, directory: Path) -> Path:
    """The trace's text with its list of events so often that it has so many megabytes."""
    content = trace.read_bytes()
    text = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode()
    begin = re.search(r'"traceEvents": ?\[', text)
    assert begin, trace
    start, end = begin.end(), text.rindex("]")
    head, events, tail = text[:start], text[start:end], text[end:]
    times = [float(found[1]) for found in re.finditer(r'"ts": ?(\d+\.\d+)', events)]
    steps = 1 + max((int(found[1]) for found in re.finditer(r"ProfilerStep#(\d+)", events)), default=0)
    path = directory / "repeated.json"
    with path.open("w") as file:
        file.write(head + events)
        for copy in range(1, math.ceil(megabytes * 1e6 / len(text))):
            file.write("," + _later(events, copy, copy * (max(times) - min(times) + 1e4), steps))
        file.write(tail)
    return path


def _later(events: str, copy: int, shift_us: float, steps: int) -> str:
    events = re.sub(r'"ts": ?(\d+\.\d+)', lambda found: f'"ts": {float(found[1]) + shift_us:.3f}', events)
    events = re.sub(r'"(correlation|External id)": ?(\d+)', lambda f: f'"{f[1]}": {int(f[2]) + copy * 10**7}', events)
    return re.sub(r"ProfilerStep#(\d+)", lambda found: f"ProfilerStep#{int(found[1]) + copy * steps}", events)


def measure(python: str, code: str, path: Path) -> tuple[float, float]:
    """Seconds, and the process's peak in MiB."""
    command = [python, "-c", code + MEASURE, str(path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    _, seconds, peak_mib = next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split()
    return float(seconds), float(peak_mib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--hta", metavar="PYTHON")
    asked = parser.parse_args()
    readers = {name: (sys.executable, code) for name, code in READERS.items()}
    if asked.hta:
        readers["Holistic Trace Analysis"] = (asked.hta, HTA)
    with tempfile.TemporaryDirectory() as directory:
        large = repeated(asked.trace, asked.megabytes, Path(directory))
        for path in (asked.trace, large):
            text_mb = _text_mb(path)
            print(f"\n{path.name}: {text_mb:.1f} MB of JSON, {path.stat().st_size / 1e6:.1f} MB on disk")
            for name, (python, code) in readers.items():
                if path.suffix == ".gz" and name == "json.load":
                    code = code.replace("import json", "import gzip, json").replace("open(path)", "gzip.open(path)")
                seconds, peak_mib = measure(python, code, path)
                print(f"  {name:32} {seconds:8.2f} s  {text_mb / seconds:6.0f} MB/s  {peak_mib:7.0f} MiB", flush=True)


def _text_mb(path: Path) -> float:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        size = 0
        while block := file.read(1 << 24):
            size += len(block)
    return size / 1e6


if __name__ == "__main__":
    main()
