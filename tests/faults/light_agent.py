"""Stands in for a group's agent and workers where a test is about what starts them: processes that speak with the
launcher as the real ones do and leave a result, but measure nothing and import no torch, which takes seconds.

sitecustomize.py runs it in the place of overlap_sweep.runtime.agent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from sitecustomize import run_as_planned

from overlap_sweep.errors import WrongNumbers
from overlap_sweep.overlap import space
from overlap_sweep.results.run_directory import Result, write_result
from overlap_sweep.runtime.agent import _die_with_launcher
from overlap_sweep.workloads.operator.result import OperatorTimes
from tests.make_point import pass_times


def main(arguments: Sequence[str]) -> None:
    """Does not return."""
    world_size, address = (arguments[arguments.index(name) + 1] for name in ("--world-size", "--address"))
    threading.Thread(target=_die_with_launcher, args=(Path(address).parent,), daemon=True).start()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_jobs, args=(rank, address)) for rank in range(int(world_size))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    os._exit(0)


def run_jobs(rank: int, address: str) -> None:
    channel = Client(address, "AF_UNIX")
    channel.send(rank)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            channel.send(work(channel.recv(), rank))


def work(request: dict[str, Any], rank: int) -> dict[str, Any]:
    point, directory = request["point"], Path(request["directory"])
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        run_as_planned(point, directory, rank, lambda: None)
    except WrongNumbers as error:
        return {"status": "failed", "error": str(error), "sound": True, "relative_error": error.relative_error}
    except Exception as error:
        (directory / "worker.log").write_text(traceback.format_exc())
        return {"status": "failed", "error": f"rank {rank}: {type(error).__name__}: {error}"}
    if rank == 0:
        time_us = 100.0 + (point["num_sm"] or 0)
        result = Result(
            name=directory.name,
            point=point,
            status="ok",
            settings=space.settings(point),
            measured=OperatorTimes(times=dict.fromkeys(("fwd", "bwd", "all"), pass_times(time_us))),
            objective_us=time_us,
            environment=request["machine"],
            started=started,
            wall_s=0.1,
            earlier_attempts=request["earlier_attempts"],
        )
        write_result(directory, result)
    return {"status": "ok"}
