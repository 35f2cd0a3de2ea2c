"""Stands in for a group's agent and workers where a test is about what starts them: processes that speak with the
launcher as the real ones do and leave a result, but measure nothing and import no torch, which takes seconds.

sitecustomize.py runs it in the place of overlap_sweep.runtime.agent.
"""

import argparse
import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sitecustomize import run_as_planned, start_as_planned

from overlap_sweep import workloads
from overlap_sweep.errors import WrongNumbers
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.run_directory import Result, write_result
from overlap_sweep.runtime.channel import SECRET, PointRequest, Reply, connect
from overlap_sweep.workloads.operator.result import OperatorTimes
from tests.make_point import MEASURED, pass_times


def main(arguments: Sequence[str]) -> None:
    """Does not return."""
    parser = argparse.ArgumentParser()
    for name, default in (("--world-size", 0), ("--nodes", 1), ("--node", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--address")
    given = parser.parse_known_args(arguments)[0]
    start_as_planned(given.node)
    of_node = given.world_size // given.nodes
    context = multiprocessing.get_context("fork")
    numbers = range(given.node * of_node, (given.node + 1) * of_node)
    ranks = [context.Process(target=run_jobs, args=(rank, given.address)) for rank in numbers]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    os._exit(0)


def run_jobs(rank: int, address: str) -> None:
    channel = connect(address, os.environ[SECRET], 10.0)
    channel.send(rank)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            channel.send(work(channel.recv(), rank))


def work(request: PointRequest, rank: int) -> Reply:
    typed, directory = request.point, request.directory
    point = dict(typed)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        run_as_planned(point, directory, rank, lambda: None)
    except WrongNumbers as error:
        return Reply("failed", str(error), final=True, relative_error=error.relative_error)
    except Exception as error:
        (directory / "worker.log").write_text(traceback.format_exc())
        return Reply("failed", f"rank {rank}: {type(error).__name__}: {error}")
    if rank == 0:
        result = Result(
            name=directory.name,
            recorded=point,
            status="ok",
            settings=workloads.of(typed).overlap_configs(typed).get("", OverlapConfig()).slots,
            environment=dict(request.machine),
            started=started,
            wall_s=0.1,
            earlier_attempts=list(request.earlier_attempts),
            **measured(point),
        )
        write_result(directory, result)
    return Reply("ok")


def measured(point: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result that depend on the workload. More SMs are slower."""
    if point["workload"]["name"] != "operator":
        return {"measured": MEASURED[point["workload"]["name"]](point), "objective_us": 100.0}
    time_us = 100.0 + (point["num_sm"] or 0)
    times = OperatorTimes(times=dict.fromkeys(("fwd", "bwd", "all"), pass_times(time_us)))
    return {"measured": times, "objective_us": time_us}
