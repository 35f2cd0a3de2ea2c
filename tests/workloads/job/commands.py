"""Points of workload=job whose command does what a test needs, what they measure, and which processes they leave."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import workloads
from overlap_sweep.config import Runtime
from overlap_sweep.errors import PointFailed
from overlap_sweep.keeper import Command
from overlap_sweep.recorder.recording import Recording, write_recording
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.results.run_directory import clear
from overlap_sweep.workloads import Here
from overlap_sweep.workloads.job import WORKLOAD
from overlap_sweep.workloads.job.config import Config, Job, Resolved
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.job.run import run
from tests.composed import composed

COMMAND = "job.command=python t.py"


def point(*typed: str) -> Resolved:
    """The completed point of a command line."""
    found: Resolved = composed("workload=job", "runtime.device=cpu", *typed)
    return found


def refusal(*typed: str) -> str | None:
    found = point(*typed)
    return workloads.of(found).refusal(found)


def job_point(command: str, **changes: Any) -> Resolved:
    """A completed point. Changes are options of `job`, or `runtime`."""
    runtime = Runtime(**{"device": "cpu"} | changes.pop("runtime", {}))
    options: dict[str, Any] = {"attach": False, "skip_steps": 1, "steps": 4, "command": command} | changes
    found = decoded_point(WORKLOAD.complete(Config(runtime=runtime, job=Job(**options))))
    assert isinstance(found, Resolved)
    return found


def begun(command: Command) -> Command:
    """Returns the command once it has started. NotStarted if it cannot; then nothing of it is left."""
    try:
        command.confirm(60.0)
    except BaseException:
        command.end()
        raise
    return command


def recording(rank: int = 0, world_size: int = 1, **changes: Any) -> Recording:
    """What a rank records: four steps of 100, 101, 102 and 103 us."""
    known: dict[str, Any] = {
        **{"rank": rank, "world_size": world_size, "host": "node7", "device": "cpu", "marked_by": "optimizer"},
        **{"calls_per_step": 1, "host_us": [100.0, 101.0, 102.0, 103.0], "gpu_us": []},
    }
    return Recording(**known | changes)


def recorded(folder: Path, *recordings: Recording) -> str:
    """The shell's command that does what the recorders of these ranks do."""
    folder.mkdir(exist_ok=True)
    for one in recordings:
        write_recording(folder, one)
    # Links, since whoever reads while files are copied finds parts of them.
    return f"ln -f {folder}/job_rank*.json {{run}}/"


def shell(script: str) -> str:
    """The option `job.command` that runs a script without quotes in it."""
    assert "'" not in script
    return f"sh -c '{script}'"


class Tagged:
    """Marks processes through their environment, so that they are found wherever they went."""

    def __init__(self, **variables: str) -> None:
        self._mark, self._variables = f"OVERLAP_SWEEP_TEST={uuid.uuid4().hex}", variables

    @property
    def variables(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        return {name: value}

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, **self._variables, **self.variables}

    def processes(self) -> list[str]:
        """The command lines of those that live."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                # Those that have ended and were not collected have no environment.
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found


def measured(folder: Path, command: str, limit_s: float = 30.0, **changes: Any) -> dict[str, Any]:
    """What a run returns, in a directory that is cleared as before any attempt. None of its processes is left, whatever
    it does."""
    tag, directory = Tagged(), folder / "run"
    directory.mkdir(exist_ok=True)
    clear(directory)
    point = job_point(command, **changes)
    try:
        return run(point, directory, Here(environment=tag.environment, limit_s=limit_s))
    finally:
        assert tag.processes() == []


def failure(folder: Path, command: str, limit_s: float = 30.0, **changes: Any) -> PointFailed:
    with pytest.raises(PointFailed) as failed:
        measured(folder, command, limit_s, **changes)
    return failed.value


def job(found: dict[str, Any]) -> JobRun:
    assert isinstance(found["measured"], JobRun)
    return found["measured"]
