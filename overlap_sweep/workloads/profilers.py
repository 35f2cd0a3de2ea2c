"""Profilers that start the workers of a point: rocprofv3 for workloads whose options include `Profiler`, Nsight Systems
for all that have workers."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.config import Runtime
from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import NSYS_REPORT


class Wrapper(NamedTuple):
    """A program that starts the processes, such as a profiler."""

    words: tuple[str, ...]
    """Program and arguments."""
    missing: str
    """Error message if the program is not in PATH."""


@dataclass
class Profiler:
    """A profiler that starts the workers. Each profiled point has its own torchrun group."""

    rocprofv3: bool = False
    """Run the workers under AMD's rocprofv3, with output in rocprofv3/ of the run directory."""
    rocprofv3_args: str = "--kernel-trace --memory-copy-trace --rccl-trace"
    """Command-line options of rocprofv3 that select what it records."""


def wrapper(profiling: Profiler, directory: Path) -> Wrapper | None:
    """Returns the profiler that `profiling` turns on, which writes into the run directory; None if none is on.
    UserError if its arguments cannot be split."""
    if not profiling.rocprofv3:
        return None
    arguments = _arguments("profiling.rocprofv3_args", profiling.rocprofv3_args)
    # By default it writes a table or a database, by its version; `analyze.py trace` reads its JSON.
    as_json = () if "--output-format" in arguments else ("--output-format", "json")
    return Wrapper(
        ("rocprofv3", *as_json, *arguments, "-d", str(directory.resolve() / "rocprofv3"), "--"),
        "profiling.rocprofv3=true requires rocprofv3 in PATH; add ROCm's (/opt/rocm/bin), or leave "
        "profiling.rocprofv3 out.",
    )


def nsys(runtime: Runtime, directory: Path) -> Wrapper | None:
    """Returns Nsight Systems, which writes a report for each node into the run directory; None if `runtime` does not
    turn it on. UserError if its arguments cannot be split."""
    if not runtime.nsys:
        return None
    arguments = _arguments("runtime.nsys_args", runtime.nsys_args)
    # By default it would end the processes with the first recording, of which training has several.
    captured = ("--capture-range=cudaProfilerApi", "--capture-range-end=repeat") if runtime.device == "cuda" else ()
    output = str(directory.resolve() / f"{NSYS_REPORT}_%h")
    return Wrapper(
        ("nsys", "profile", *captured, "--kill=none", f"--output={output}", "--force-overwrite=true", *arguments),
        "runtime.nsys=true requires nsys in PATH; add that of Nsight Systems, or leave runtime.nsys out.",
    )


def _arguments(option: str, written: str) -> list[str]:
    try:
        return shlex.split(written)
    except ValueError as error:
        raise UserError(f"{option} cannot be split ({error}); close its quotes.") from None
