"""Sweeps some of whose points fail: see sitecustomize.py for how and what."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.sitecustomize import JOURNAL, PLAN
from tests.sweeps import SMALL, Launch

TINY = (*SMALL, "profile=none", "hydra.sweep.subdir='tp${tp_size}_sm${num_sm}'")
"""Points that take a tenth of a second, in directories with short names."""


def faulty_launch(tmp_path: Path, plan: Sequence[dict[str, Any]] = ()) -> Launch:
    """A launch into `tmp_path`/sweep, whose workers obey the plan and keep a journal."""
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / PLAN).write_text(json.dumps(plan))
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    return Launch(tmp_path / "sweep", {"OVERLAP_SWEEP_FAULTS": str(faults), "PYTHONPATH": path})


def journal(tmp_path: Path) -> list[dict[str, int]]:
    """All runs of a point on a rank, in order."""
    path = tmp_path / "faults" / JOURNAL
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def worker_pids(tmp_path: Path, num_sm: int) -> list[set[int]]:
    """Of every attempt at the point the workers that ran it, in order."""
    runs = [run for run in journal(tmp_path) if run["num_sm"] == num_sm]
    by_rank = [[run["pid"] for run in runs if run["rank"] == rank] for rank in sorted({run["rank"] for run in runs})]
    return [set(pids) for pids in zip(*by_rank, strict=True)]
