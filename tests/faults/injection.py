"""Sweeps some of whose points fail or wait: see sitecustomize.py for how and what."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.sitecustomize import HOLD, PLAN, read_journal
from tests.sweeps import SMALL, Launch

TINY = (*SMALL, "profile=none", "hydra.sweep.subdir='tp${tp_size}_sm${num_sm}'")
"""Points that take a tenth of a second, in directories with short names."""


def faults_in(folder: Path, plan: Sequence[dict[str, Any]] = ()) -> Path:
    """Makes `folder`/faults, from which injected processes read what they are to do, and where they keep a journal."""
    faults = folder / "faults"
    (faults / HOLD).mkdir(parents=True)
    set_plan(folder, plan)
    return faults


def set_plan(folder: Path, plan: Sequence[dict[str, Any]]) -> None:
    (folder / "faults" / PLAN).write_text(json.dumps(plan))


def injected(faults: Path, light: bool) -> dict[str, str]:
    """The environment of processes that obey the faults; `light`: workers measure nothing, and start at once."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    return {"OVERLAP_SWEEP_FAULTS": str(faults), "PYTHONPATH": path, **({"OVERLAP_SWEEP_LIGHT": "1"} if light else {})}


def faulty_launch(folder: Path, plan: Sequence[dict[str, Any]] = (), light: bool = False) -> Launch:
    """A launch into `folder`/sweep, whose workers obey the plan."""
    return Launch(folder / "sweep", injected(faults_in(folder, plan), light))


def journal(folder: Path) -> list[dict[str, Any]]:
    """All runs of a point on a rank that were begun, in order."""
    return [line for line in read_journal(folder / "faults") if line["event"] == "begun"]


def worker_pids(folder: Path, num_sm: int) -> list[set[int]]:
    """Of every attempt at the point the workers that ran it, in order."""
    runs = [run for run in journal(folder) if run["num_sm"] == num_sm]
    by_rank = [[run["pid"] for run in runs if run["rank"] == rank] for rank in sorted({run["rank"] for run in runs})]
    return [set(pids) for pids in zip(*by_rank, strict=True)]
