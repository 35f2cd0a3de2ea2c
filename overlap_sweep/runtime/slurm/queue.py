"""The Slurm jobs of a sweep: their records for later launches, and their states. Works without accounting."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import write_atomically
from overlap_sweep.runtime.meeting import ON_SLURM

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}
"""Slurm's end states."""
GONE = "GONE"
"""Our state of a job that the controller has forgotten, as it does some minutes after the end."""
TIMEOUT_S = 60

RECORDS = ".slurm"
"""Folder in the sweep's directory with one file for each job."""


@dataclass(frozen=True)
class JobState:
    state: str
    """Slurm's name of the state, such as RUNNING."""
    reason: str = ""
    """Slurm's reason, such as what a pending job waits for."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED or self.state == GONE

    @property
    def cancelled(self) -> bool:
        return self.state == "CANCELLED"

    def __str__(self) -> str:
        return self.state if self.reason in ("", "None") else f"{self.state} ({self.reason})"


def job_states(logs: Mapping[str, Path]) -> dict[str, JobState] | None:
    """Returns the state of each job (`12`, or `12_3` of an array); None if the controller does not answer, for example
    while it restarts.

    `logs` are the jobs' log files by id. UserError if Slurm is not installed.
    """
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
    return JobState("CANCELLED") if never_began else _accounted(job_id)


def _accounted(job_id: str) -> JobState:
    """Returns the state of a job that the controller has forgotten, from accounting if that is kept."""
    command = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job_id}", "--format=State"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return JobState(GONE)
    # The output is such as "CANCELLED by 1000".
    words = answer.stdout.split()[:1] if answer.returncode == 0 else []
    return JobState(words[0]) if words and words[0] in ENDED else JobState(GONE)


def _squeue(job_id: str) -> dict[str, JobState] | None:
    # One call per job: if one of several ids is forgotten, squeue refuses all.
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}", "--format=%i|%T|%r"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    if answer.returncode:
        return {} if "Invalid job id" in answer.stderr else None
    rows = (line.split("|") for line in answer.stdout.splitlines() if line)
    return {found: JobState(state, reason) for found, state, reason in rows}


class JobRecord(msgspec.Struct, frozen=True):
    job_id: str
    points: dict[str, str]
    """Keys (`identity.key_of`) of the job's points by the names of their run directories."""
    log: str
    """Path of the job's log file."""


def record_path(directory: Path, job_id: str) -> Path:
    return directory / RECORDS / f"{job_id}.json"


def write_record(directory: Path, record: JobRecord) -> None:
    path = record_path(directory, record.job_id)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, msgspec.json.encode(record))


def forget(directory: Path, job_id: str) -> None:
    """Removes what was written about a job that has ended and whose results were read."""
    record = record_path(directory, job_id)
    for path in (record, given_up_path(directory, job_id), *record.parent.glob(f"{job_id}_*{ON_SLURM}")):
        path.unlink(missing_ok=True)


def given_up_path(directory: Path, job_id: str) -> Path:
    """Returns the file in which a job that ends says why none of the points that it leaves can be measured."""
    return directory / RECORDS / f"{job_id}.given_up"


def living_jobs(directory: Path) -> list[JobRecord]:
    """Returns the pending and running jobs of earlier launches. UserError if Slurm does not answer."""
    records = {path.stem: _read(path) for path in sorted((directory / RECORDS).glob("*.json"))}
    if not records:
        return []
    try:
        states = job_states({job_id: Path(record.log) for job_id, record in records.items()})
    except UserError:
        states = None
    if states is None:
        raise UserError(
            f"Slurm jobs ({', '.join(sorted(records))}) may be running in {directory}, but Slurm does not answer; "
            f"try again where it does. If the jobs are gone, move {directory / RECORDS} elsewhere."
        )
    for job_id in (job_id for job_id, state in states.items() if state.ended):
        forget(directory, job_id)
    return [record for job_id, record in records.items() if not states[job_id].ended]


def refuse_living_jobs(directory: Path) -> None:
    """Raises UserError if Slurm jobs run in the directory: a local launcher would measure the same points."""
    if living := living_jobs(directory):
        ids = " ".join(record.job_id for record in living)
        raise UserError(
            f"Slurm jobs are running in {directory}; use hydra/launcher=slurm, or cancel them with: scancel {ids}"
        )


def _read(path: Path) -> JobRecord:
    """Returns the record in the file. UserError if it is not a record."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    except (msgspec.DecodeError, OSError) as error:
        raise UserError(f"{path} is not a record of a Slurm job ({error}); move it elsewhere.") from None
    if record.job_id != path.stem:
        raise UserError(f"{path} is not the record of job {path.stem}; move it elsewhere.")
    return record
