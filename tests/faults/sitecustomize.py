"""Makes points of the operator workload fail. Python loads this at its start where a test puts it on PYTHONPATH.

OVERLAP_SWEEP_FAULTS names a directory with `plan.json`, a list of such as

    {"num_sm": 2, "fault": "segfault", "times": 1, "rank": 1}

: `fault` names a function below; `times` is how many attempts at the point it spoils (default: all), `rank` the rank on
which it happens, null for every one (default 1). What else is given chooses the points. Every run of a point on a rank
is noted in `journal.jsonl` beside it, as {"num_sm": ..., "tp_size": ..., "rank": ..., "pid": ...}.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

PLAN, JOURNAL = "plan.json", "journal.jsonl"
WORKLOAD = "overlap_sweep.workloads.operator"
NO_CHOICE = ("fault", "times", "rank")
FLOOD_LINES, FLOOD_LINE = 40_000, "flooded " * 100
A_GIGABYTE = 2**30


def raises() -> None:
    raise RuntimeError("raised on purpose")


def raises_at_length() -> None:
    raise RuntimeError("long " * 10**6)


def memory_error() -> None:
    raise MemoryError("no memory left, on purpose")


def out_of_memory() -> None:
    """A real one: the address space may not grow any more."""
    import torch

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + A_GIGABYTE, resource.RLIM_INFINITY))
    kept = []
    while True:
        kept.append(torch.ones(A_GIGABYTE // 16))


def segfault() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits() -> None:
    os._exit(0)


def hangs() -> None:
    time.sleep(10**6)


def hangs_in_c() -> None:
    """Holds the interpreter's lock and hears no signal but SIGKILL."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    ctypes.PyDLL(None).sleep(10**6)


def floods() -> None:
    for _ in range(FLOOD_LINES):
        print(FLOOD_LINE, flush=False)
    sys.stdout.flush()
    raise RuntimeError("raised after the flood")


def writes_nothing() -> None:
    _write_results(lambda directory, result: None)


def writes_half() -> None:
    from overlap_sweep import run_directory

    whole = run_directory.write_result

    def half(directory: Path, result: Any) -> None:
        path = whole(directory, result)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    _write_results(half)


def dies_while_writing() -> None:
    """Where power would be lost: the content is there, not yet its name."""
    from overlap_sweep import run_directory

    def dies(temporary: Path, path: Path) -> Path:
        os._exit(1)

    run_directory.keep = dies


def dawdles() -> None:
    """Not a fault: time to do something to a point that is running."""
    time.sleep(2)


def _write_results(write: Callable[[Path, Any], Any]) -> None:
    """For this process's remaining life, which a failed attempt ends."""
    from overlap_sweep import run_directory

    run_directory.write_result = write


def _noted_before(journal: Path, run: dict[str, Any]) -> int:
    """How often the point was run on the rank, whoever did it; and that it is now."""
    point = {name: value for name, value in run.items() if name != "pid"}
    lines = journal.read_text().splitlines() if journal.exists() else []
    with journal.open("a") as file:
        file.write(json.dumps(run) + "\n")
    return sum(point.items() <= json.loads(line).items() for line in lines)


def _spoil(point: dict[str, Any], rank: int, directory: Path) -> None:
    run = {"num_sm": point["num_sm"], "tp_size": point["tp_size"], "rank": rank, "pid": os.getpid()}
    before = _noted_before(directory / JOURNAL, run)
    for entry in json.loads((directory / PLAN).read_text()):
        chosen = {name: value for name, value in entry.items() if name not in NO_CHOICE}
        here = entry.get("rank", 1) in (rank, None)
        if here and chosen.items() <= point.items() and before < entry.get("times", 10**6):
            globals()[entry["fault"]]()


def _wrap(module: ModuleType, directory: Path) -> None:
    run = module.run

    def spoilt(point: dict[str, Any], run_directory: Path, ranks: Any) -> dict[str, Any]:
        _spoil(point, ranks.rank, directory)
        return run(point, run_directory, ranks)

    module.run = spoilt  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Only workers ever call what is wrapped, and they fork from a server that has it not imported yet."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != WORKLOAD:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            _wrap(module, Path(os.environ["OVERLAP_SWEEP_FAULTS"]))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if "OVERLAP_SWEEP_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder())
