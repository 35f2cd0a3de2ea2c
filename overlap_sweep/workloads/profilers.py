"""Profilers that start the workers of a point, for any workload whose options include `Profiler`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.workloads import Wrapper


@dataclass
class Profiler:
    """A profiler that starts the workers. Each profiled point has its own torchrun group."""

    rocprofv3: bool = False
    """Run the workers under AMD's rocprofv3, with output in rocprofv3/ of the run directory."""
    rocprofv3_args: str = "--kernel-trace --memory-copy-trace --rccl-trace"
    """Command-line options of rocprofv3 that select what it records."""


def wrapper(profiling: Mapping[str, Any], directory: Path) -> Wrapper | None:
    """Returns the profiler that `profiling` turns on, which writes into the run directory; None if none is on.
    UserError if its arguments cannot be split."""
    if not profiling["rocprofv3"]:
        return None
    try:
        arguments = shlex.split(profiling["rocprofv3_args"])
    except ValueError as error:
        raise UserError(f"profiling.rocprofv3_args cannot be split ({error}); close its quotes.") from None
    return Wrapper(
        ("rocprofv3", *arguments, "-d", str(directory.resolve() / "rocprofv3"), "--"),
        "profiling.rocprofv3=true requires rocprofv3 in PATH; add ROCm's (/opt/rocm/bin), or leave "
        "profiling.rocprofv3 out.",
    )
