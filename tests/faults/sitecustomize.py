"""Makes points of the workloads operator and fsdp fail or wait. Python loads this at its start where it is on its path.

OVERLAP_SWEEP_FAULTS names a directory with

    plan.json       a list of such as {"num_sm": 2, "fault": "segfault", "times": 1, "rank": 1}: `fault` names a
                    function below; `times` is how many attempts at the point it spoils (default: all), `rank` the rank
                    on which it happens, null for every one (default 1); what else is given chooses the points;
                    an entry with `agent` or `task`, the number of a node, happens when the light agent or the Slurm
                    task of that node starts
    hold/POINT      the point whose run directory has that name waits while this file is there
    journal.jsonl   gets a line when a rank begins a point, and when it has run it

With OVERLAP_SWEEP_LIGHT the processes of a group are those of light_agent.py.
"""

import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.when_imported import change_when_imported

PLAN, JOURNAL, HOLD = "plan.json", "journal.jsonl", "hold"


def raises() -> None:
    raise RuntimeError("raised on purpose " + "at length " * 10**6)


def segfault() -> None:
    ctypes.string_at(0)


def hangs_in_c() -> None:
    """Holds the interpreter's lock and hears no signal but SIGKILL."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    ctypes.PyDLL(None).sleep(10**6)


def floods() -> None:
    print(*["flooded " * 100] * 40_000, sep="\n", flush=True)
    raise MemoryError("raised after the flood")


def wrong_numbers() -> None:
    from overlap_sweep.errors import WrongNumbers

    raise WrongNumbers("wrong numbers", {"output": 1.0})


def writes_half() -> None:
    from overlap_sweep.results import run_directory

    write_whole = run_directory.write_result

    def write_half(directory: Path, result: Any, **how: bool) -> None:
        path = write_whole(directory, result, **how)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    # For this process's remaining life, which a failed attempt ends.
    run_directory.write_result = write_half


def dies_while_writing() -> None:
    """Where power would be lost: the content is there, not yet its name."""
    from overlap_sweep.results import run_directory

    def dies(temporary: Path, path: Path, **_: bool) -> Path:
        os._exit(1)

    run_directory.keep = dies


def dawdles() -> None:
    """Not a fault: time to do something to a point that is running."""
    time.sleep(2)


def kills_job() -> None:
    """The process of a cluster's job, as the kernel does when memory is short."""
    pid = os.getpid()
    while not re.search(r"submitit\.core\._submit|cloudpickle\.loads", Path(f"/proc/{pid}/cmdline").read_text()):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    time.sleep(10**6)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def waits() -> None:
    time.sleep(10**6)


def kills_agent() -> None:
    """Only of light groups, whose ranks are the agent's children."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10**6)


def start_as_planned(node: int) -> None:
    """Called by light agents: an entry of the plan with `agent` is about that of this node, not about points."""
    _happen_at_start("agent", node)


def _happen_at_start(kind: str, node: int) -> None:
    faults = Path(os.environ["OVERLAP_SWEEP_FAULTS"])
    begun = {"event": "started", kind: node}
    before = sum(begun.items() <= noted.items() for noted in read_journal(faults))
    _note(faults, begun)
    for entry in json.loads((faults / PLAN).read_text()):
        if entry.get(kind) == node and before < entry.get("times", 10**6):
            globals()[entry["fault"]]()


def run_as_planned(point: dict[str, Any], directory: Path, rank: int, run: Callable[[], Any]) -> Any:
    """Runs the point, whose run directory is given, as far as its faults allow."""
    faults = Path(os.environ["OVERLAP_SWEEP_FAULTS"])
    line = {"point": directory.name, "num_sm": point.get("num_sm"), "tp_size": point.get("tp_size"), "rank": rank}
    begun = {**line, "event": "begun"}
    before = sum(begun.items() <= noted.items() for noted in read_journal(faults))
    _note(faults, begun)
    while (faults / HOLD / directory.name).exists():
        time.sleep(0.05)
    for entry in json.loads((faults / PLAN).read_text()):
        chosen = {name: value for name, value in entry.items() if name not in ("fault", "times", "rank")}
        here = entry.get("rank", 1) in (rank, None) and not entry.keys() & {"agent", "task"}
        if here and chosen.items() <= point.items() and before < entry.get("times", 10**6):
            globals()[entry["fault"]]()
    measured = run()
    _note(faults, {**line, "event": "run"})
    return measured


def read_journal(faults: Path) -> list[dict[str, Any]]:
    path = faults / JOURNAL
    # Without a last line that another rank is still writing.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _note(faults: Path, line: dict[str, Any]) -> None:
    line = {**line, "pid": os.getpid(), "restarts": int(os.environ.get("SLURM_RESTART_COUNT", 0))}
    # One write of few bytes is not torn by other processes' writes.
    with (faults / JOURNAL).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _spoil_workload(module: ModuleType) -> None:
    run = module.WORKLOAD.run

    def spoilt(point: dict[str, Any], directory: Path, ranks: Any) -> Any:
        return run_as_planned(point, directory, ranks.rank, lambda: run(point, directory, ranks))

    module.WORKLOAD = replace(module.WORKLOAD, run=spoilt)


CHANGED = {f"overlap_sweep.workloads.{name}": _spoil_workload for name in ("operator", "fsdp")}
"""By module what is done to it when it is imported. Of the workload only workers ever call what is changed, and they
fork from an agent that has it not imported yet."""


if "OVERLAP_SWEEP_FAULTS" in os.environ:
    if "overlap_sweep.runtime.agent" in sys.orig_argv and "OVERLAP_SWEEP_LIGHT" in os.environ:
        from light_agent import main

        main(sys.orig_argv)
    if "submitit.core._submit" in sys.orig_argv:
        _happen_at_start("task", int(os.environ["SLURM_PROCID"]))
    change_when_imported(CHANGED)
