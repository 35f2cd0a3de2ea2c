"""Asking Slurm how jobs are. Works without accounting."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.errors import UserError

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}
"""Slurm's names of states that a job does not leave by itself."""
GONE = "GONE"
"""Our name for that of a job that the controller has forgotten, as it does some minutes after the end."""
TIMEOUT_S = 60


@dataclass(frozen=True)
class JobState:
    state: str
    """Slurm's name of it, such as RUNNING."""
    reason: str = ""
    """Slurm's: of a waiting job what it waits for."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED or self.state == GONE

    @property
    def cancelled(self) -> bool:
        return self.state == "CANCELLED"

    def __str__(self) -> str:
        told = self.reason not in ("", "None")
        return f"{self.state} ({self.reason})" if told else self.state


def job_states(logs: Mapping[str, Path]) -> dict[str, JobState] | None:
    """Of each job (`12`, or `12_3` of an array). None when the controller does not answer, as while it restarts.

    `logs` are the files that the jobs print to, by id: another job that got the id of a forgotten one has its script
    elsewhere. UserError when there is no Slurm here.
    """
    if not shutil.which("squeue"):
        raise UserError("there is no squeue here; run this on a machine that can submit Slurm jobs.")
    # The whole arrays: squeue knows no single elements of those that wait together.
    found: dict[str, _Listed] = {}
    for array in sorted({job_id.partition("_")[0] for job_id in logs}):
        listed = _squeue(array)
        if listed is None:
            return None
        found |= listed
    return {job_id: _state(job_id, found, log) for job_id, log in logs.items()}


def _state(job_id: str, found: Mapping[str, _Listed], log: Path) -> JobState:
    if job_id not in found:
        return JobState("CANCELLED") if _never_began(job_id, found, log) else _accounted(job_id)
    return found[job_id].state if found[job_id].script.parent in log.parents else JobState(GONE)


def _never_began(job_id: str, found: Mapping[str, _Listed], log: Path) -> bool:
    """An element of an array that is cancelled while it waits is forgotten at once, by sacct too, unlike the others."""
    array = f"{job_id.partition('_')[0]}_"
    others = (listed for other, listed in found.items() if other.startswith(array))
    return not log.exists() and any(listed.script.parent in log.parents for listed in others)


def _accounted(job_id: str) -> JobState:
    """Of a job that the controller has forgotten: where Slurm keeps accounts, they tell whether it was cancelled."""
    command = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job_id}", "--format=State"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return JobState(GONE)
    # Such as "CANCELLED by 1000"; of a job that was queued again only the last line counts.
    words = answer.stdout.split()[:1] if answer.returncode == 0 else []
    return JobState(words[0]) if words and words[0] in ENDED else JobState(GONE)


class _Listed(NamedTuple):
    state: JobState
    script: Path


def _squeue(job_id: str) -> dict[str, _Listed] | None:
    # One call a job: of several ids squeue refuses all when one is forgotten.
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}", "--format=%i|%T|%r|%o"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    if answer.returncode:
        return {} if "Invalid job id" in answer.stderr else None
    rows = (line.split("|", 3) for line in answer.stdout.splitlines() if line)
    return {found: _Listed(JobState(state, reason), Path(script)) for found, state, reason, script in rows}
