"""First on the PYTHONPATH of a sweep: the workers of its Slurm jobs tell what they measure, and can be disturbed.

`$SWEEP_FAULTS` is a folder; a point is called there as its run directory:

    measured      gets a line when rank 0 begins a point, and when it has done with it
    hold/POINT    the point waits while this file is there
    kill/POINT    the worker kills its job's process, as the kernel does when memory is short
    sleep_s       so long every point takes in addition
    dead_on_arrival   a job's process ends before it has done anything
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

WORKER = "overlap_sweep.runtime.worker"
FAULTS = Path(os.environ.get("SWEEP_FAULTS", "/nonexistent"))


class _WorkerFinder(MetaPathFinder):
    """Importing the worker here would import torch into every process."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.loader
        load = spec.loader.exec_module

        def load_disturbed(module: Any) -> None:
            load(module)
            module._work = _disturbed(module._work)

        spec.loader.exec_module = load_disturbed  # type: ignore[method-assign]
        return spec


def _disturbed(work: Any) -> Any:
    def _work(request: dict[str, Any], ranks: Any) -> dict[str, Any]:
        point = Path(request["directory"]).name
        if ranks.rank == 0:
            _note(point, "begun")
            if (FAULTS / "kill" / point).exists():
                os.kill(_process_of_job(), signal.SIGKILL)
        while (FAULTS / "hold" / point).exists():
            time.sleep(0.05)
        if (FAULTS / "sleep_s").exists():
            time.sleep(float((FAULTS / "sleep_s").read_text()))
        reply: dict[str, Any] = work(request, ranks)
        if ranks.rank == 0:
            _note(point, reply["status"])
        return reply

    return _work


def _note(point: str, event: str) -> None:
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    line = json.dumps({"point": point, "event": event, "job": os.environ["SLURM_JOB_ID"], "restarts": restarts})
    # One write of few bytes is not torn by other jobs' writes.
    with (FAULTS / "measured").open("a") as file:
        file.write(line + "\n")


def _process_of_job() -> int:
    pid = os.getpid()
    while "submitit.core._submit" not in Path(f"/proc/{pid}/cmdline").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


if "SLURM_JOB_ID" in os.environ:
    if (FAULTS / "dead_on_arrival").exists():
        sys.stderr.write("dead on arrival\n")
        sys.stderr.flush()
        os._exit(7)
    sys.meta_path.insert(0, _WorkerFinder())
