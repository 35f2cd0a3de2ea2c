"""Slurm: jobs submitted through submitit; their states also where no accounts are kept."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.cluster import Cluster, End, JobHere, JobState

if TYPE_CHECKING:
    import submitit

COMMON_OPTIONS = frozenset(
    ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout")
)
"""submitit's options that are not Slurm's own."""

CONTROLLER_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes")

STRAGGLERS_S = 30
"""Time that a job's other tasks have to end after the first of them has."""

PATIENCE_S = 600.0
"""How long to retry sbatch while the controller does not answer."""

ENDS: dict[str, End] = {
    "COMPLETED": "completed",
    "TIMEOUT": "timeout",
    "CANCELLED": "cancelled",
    **dict.fromkeys(("BOOT_FAIL", "NODE_FAIL", "PREEMPTED"), "lost"),
    **dict.fromkeys(("DEADLINE", "FAILED", "LAUNCH_FAILED", "OUT_OF_MEMORY"), "failed"),
}
"""How a job has ended, by Slurm's end states."""
GONE = JobState("GONE", "failed")
"""Our state of a job that the controller has forgotten, as it does some minutes after the end."""
TIMEOUT_S = 60


def check() -> None:
    """Raises UserError if Slurm is not installed."""
    if not shutil.which("sbatch"):
        raise UserError(
            "sbatch is not installed; run this where Slurm jobs can be submitted, or leave out hydra/launcher."
        )


def options(given: dict[str, Any]) -> dict[str, object]:
    """Returns submitit's options, as in `Cluster.options`."""
    if given["tasks_per_node"] != 1:
        raise UserError(
            f"hydra.launcher.tasks_per_node={given['tasks_per_node']}: a job has one task on each node, which starts "
            "the ranks there; leave it out."
        )
    if given["signal_delay_s"] >= 60 * given["timeout_min"]:
        raise UserError(
            f"hydra.launcher.signal_delay_s={given['signal_delay_s']} is not shorter than timeout_min="
            f"{given['timeout_min']}, so jobs would stop at once; decrease it, or increase timeout_min."
        )
    found = dict(given)
    # GPUs and CPUs must not be requested in two ways.
    if found["gres"] or found["gpus_per_task"]:
        found["gpus_per_node"] = None
    if found["cpus_per_gpu"]:
        found["cpus_per_task"] = None
    return found


def submit(calls: Sequence[Callable[[], None]], options: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """Submits the jobs as an array if there are several, as in `Cluster.submit`."""
    # Slow to import, and only needed here.
    import submitit

    given = dict(options)
    # A new folder every time, since jobs load files there by job number. Not one for each job: Slurm fails a job whose
    # log has no folder, and jobs may start before their numbers are known here.
    new = uuid.uuid4().hex[:12]
    folder = Path(re.sub("%[jAat]", new, given.pop("submitit_folder"))).absolute()
    executor = submitit.AutoExecutor(
        folder=folder,
        cluster="slurm",
        slurm_max_num_timeout=given.pop("max_num_timeout"),
        # In a container it is not where it is here.
        slurm_python=given.pop("python", None),
    )
    # A job that may not be requeued is lost with its node, and Slurm's default depends on the site.
    additional = {"requeue": True}
    additional |= {name.replace("_", "-"): value for name, value in given.pop("additional_parameters").items()}
    if additional.get("no-requeue"):
        del additional["requeue"]
    additional = {name: value for name, value in additional.items() if value is not False}
    if given["nodes"] > 1:
        # Where the first task dies before the others know how to reach it, they would wait in vain.
        given["srun_args"] = [f"--wait={STRAGGLERS_S}", *(given.get("srun_args") or [])]
    parameters = {key if key in COMMON_OPTIONS else f"slurm_{key}": value for key, value in given.items()}
    executor.update_parameters(**parameters, slurm_additional_parameters=additional)
    try:
        jobs = _patiently(executor, calls)
    except UserError:
        if new in folder.name:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return [(job.job_id, job.paths.stdout if given["stderr_to_stdout"] else job.paths.stderr) for job in jobs]


def _patiently(executor: submitit.AutoExecutor, calls: Sequence[Callable[[], None]]) -> list[submitit.Job[None]]:
    """Submits the calls as an array; retries while the controller does not answer."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    deadline = time.monotonic() + PATIENCE_S
    wait_s = 2.0
    while True:
        try:
            # submitit prints sbatch's message and raises it too.
            with contextlib.redirect_stderr(io.StringIO()), executor.batch():
                return [executor.submit(call) for call in calls]
        except (FailedJobError, FailedSubmissionError) as error:
            reason = " ".join(str(error).split())
            if not any(symptom in reason for symptom in CONTROLLER_AWAY) or time.monotonic() > deadline:
                raise UserError(f"Slurm refused the job: {reason}") from None
            print(f"slurm: the controller does not answer; trying again in {wait_s:.0f} s", flush=True)
            time.sleep(wait_s)
            wait_s = min(60.0, 2 * wait_s)


def states(logs: Mapping[str, Path]) -> dict[str, JobState] | None:
    """Returns the state of each job (`12`, or `12_3` of an array), as in `Cluster.states`."""
    if not shutil.which("squeue"):
        raise UserError("squeue is not installed; run this where Slurm jobs can be submitted.")
    # Whole arrays, since squeue knows no single elements of pending arrays.
    found: dict[str, JobState] = {}
    for array in sorted({job_id.partition("_")[0] for job_id in logs}):
        listed = _squeue(array)
        if listed is None:
            return None
        found |= listed
    return {job_id: _state(job_id, found, log) for job_id, log in logs.items()}


def _state(job_id: str, found: Mapping[str, JobState], log: Path) -> JobState:
    if job_id in found:
        return found[job_id]
    # Slurm, sacct too, forgets an array's element at once if it is cancelled while pending.
    never_began = not log.exists() and any(other.startswith(f"{job_id.partition('_')[0]}_") for other in found)
    return JobState("CANCELLED", "cancelled") if never_began else _accounted(job_id)


def _accounted(job_id: str) -> JobState:
    """Returns the state of a job that the controller has forgotten, from accounting if that is kept."""
    command = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job_id}", "--format=State"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return GONE
    # The output is such as "CANCELLED by 1000".
    words = answer.stdout.split()[:1] if answer.returncode == 0 else []
    return JobState(words[0], ENDS[words[0]]) if words and words[0] in ENDS else GONE


def _squeue(job_id: str) -> dict[str, JobState] | None:
    # One call per job: if one of several ids is forgotten, squeue refuses all.
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}", "--format=%i|%T|%r"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    if answer.returncode:
        return {} if "Invalid job id" in answer.stderr else None
    rows = (line.removesuffix("|None").split("|") for line in answer.stdout.splitlines() if line)
    return {found: JobState(state, ENDS.get(state), *reason) for found, state, *reason in rows}


def cancel(job_ids: Sequence[str]) -> bool:
    return subprocess.run(["scancel", *job_ids], capture_output=True, check=False).returncode == 0


def here() -> JobHere:
    """Returns the job of this process, which is a task of it."""
    environ = os.environ
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return JobHere(
        f"{array}_{element}" if array else environ["SLURM_JOB_ID"],
        restarts=int(environ.get("SLURM_RESTART_COUNT", 0)),
        node=int(environ.get("SLURM_PROCID", 0)),
        nodes=int(environ.get("SLURM_NNODES", 1)),
        host=environ.get("SLURMD_NODENAME", ""),
    )


def requeue(job_id: str) -> bool:
    answer = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True, check=False)
    print(answer.stderr.strip() or f"job {job_id} was requeued", flush=True)
    return answer.returncode == 0


CLUSTER = Cluster(
    name="slurm",
    title="Slurm",
    check=check,
    options=options,
    submit=submit,
    states=states,
    cancel=cancel,
    cancel_command=lambda job_ids: f"scancel {' '.join(job_ids)}",
    here=here,
    requeue=requeue,
)
