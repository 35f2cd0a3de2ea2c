"""The smallest cluster: its jobs are processes of this machine, and so are its nodes.

A job has a folder in that which LOCAL_CLUSTER names. The process that works it off looks there for `cancel` and
`requeue`, and writes its `state`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from overlap_sweep.errors import UserError
from overlap_sweep.keeper import Command, Program
from overlap_sweep.runtime.cluster import Cluster, End, JobHere, JobState

FOLDER, HERE = "LOCAL_CLUSTER", "LOCAL_JOB"
CPUS = 64
"""Of each node."""
ENDS: dict[str, End] = {"COMPLETED": "completed", "CANCELLED": "cancelled", "FAILED": "failed"}


@dataclass
class LocalLauncherConf:
    """Starts jobs as processes of this machine."""

    _target_: str = "hydra_plugins.overlap_sweep_config.ClusterLauncher"
    nodes: int = "${nodes_of_point:}"  # type: ignore[assignment]
    cpus_per_task: int = "${cpus_of_point:}"  # type: ignore[assignment]
    points_per_job: int = 32
    max_jobs: int | None = 8
    poll_s: float = 0.2


def _folder(job_id: str) -> Path:
    return Path(os.environ[FOLDER]) / job_id


def check() -> None:
    if FOLDER not in os.environ:
        raise UserError(f"{FOLDER} is not set.")


def submit(calls: Sequence[Callable[[], None]], options: Mapping[str, Any]) -> list[tuple[str, Path]]:
    if options["cpus_per_task"] > CPUS:
        raise UserError(f"Local refused the job: a node has {CPUS} CPUs.")
    submitted = []
    for call in calls:
        folder = _folder(str(time.time_ns()))
        folder.mkdir(parents=True)
        (folder / "call").write_bytes(cloudpickle.dumps(call))
        (folder / "state").write_text("RUNNING")
        words = [sys.executable, __file__, str(folder), str(options["nodes"])]
        subprocess.Popen(words, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
        submitted.append((folder.name, folder / "log"))
    return submitted


def states(logs: Mapping[str, Path]) -> dict[str, JobState] | None:
    found = {job_id: (_folder(job_id) / "state").read_text() for job_id in logs}
    return {job_id: JobState(state, ENDS.get(state)) for job_id, state in found.items()}


def cancel(job_ids: Sequence[str]) -> bool:
    for job_id in job_ids:
        (_folder(job_id) / "cancel").touch()
    return True


def here() -> JobHere:
    return JobHere(**json.loads(os.environ[HERE]))


def requeue(job_id: str) -> bool:
    (_folder(job_id) / "requeue").touch()
    print(f"job {job_id} was requeued", flush=True)
    return True


CLUSTER = Cluster(
    name="local",
    title="Local",
    check=check,
    options=dict,
    submit=submit,
    states=states,
    cancel=cancel,
    cancel_command=lambda job_ids: f"touch {' '.join(str(_folder(job_id) / 'cancel') for job_id in job_ids)}",
    here=here,
    requeue=requeue,
    launcher=LocalLauncherConf(),
)


def work_off(folder: Path, nodes: int) -> None:
    """Runs the job on its nodes, again as often as it is queued again, and writes how it has ended."""
    # Keepers leave their command the signal blocked that only a launcher handles.
    code = "import cloudpickle, pathlib, signal, sys; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2]); "
    code += "cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())()"
    restarts, state = 0, ""
    while not state:
        places = [JobHere(folder.name, restarts, node, nodes, "localhost") for node in range(nodes)]
        environments = [{**os.environ, HERE: json.dumps(vars(place))} for place in places]
        words = [sys.executable, "-c", code, str(folder / "call")]
        tasks = [Command(Program(words, environment, folder / "log", grace_s=1.0)) for environment in environments]
        is_requeued = False
        while not state and not is_requeued:
            statuses = [task.wait(0.05) for task in tasks]
            if (folder / "cancel").exists():
                state = "CANCELLED"
            elif (folder / "requeue").exists():
                (folder / "requeue").unlink()
                is_requeued = True
            elif any(statuses):
                state = "FAILED"
            elif None not in statuses:
                state = "COMPLETED"
        for task in tasks:
            task.end()
        restarts += 1
    (folder / "new").write_text(state)
    (folder / "new").rename(folder / "state")


if __name__ == "__main__":
    work_off(Path(sys.argv[1]), int(sys.argv[2]))
