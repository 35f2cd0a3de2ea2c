"""Slurm's jobs of a sweep: their records for a later launch, and their states as Slurm reports them.

Works without accounting.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import write_atomically

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}
"""Slurm's names of states that a job does not leave by itself."""
GONE = "GONE"
"""Our name for that of a job that the controller has forgotten, as it does some minutes after the end."""
TIMEOUT_S = 60

RECORDS = ".slurm"
"""Below the sweep's directory, one file for each job."""


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
    """Returns the state of each job (`12`, or `12_3` of an array). None when the controller does not answer, as while
    it restarts.

    `logs` are the files that the jobs print to, by id: another job that got the id of a forgotten one has its script
    elsewhere. UserError when there is no Slurm here.
    """
    if not shutil.which("squeue"):
        raise UserError("there is no squeue here; run this on a machine that can submit Slurm jobs.")
    # The whole arrays: squeue knows no single elements of those that wait together.
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
    # An element of an array that is cancelled while it waits is forgotten at once, by sacct too, unlike the others.
    never_began = not log.exists() and any(other.startswith(f"{job_id.partition('_')[0]}_") for other in found)
    return JobState("CANCELLED") if never_began else _accounted(job_id)


def _accounted(job_id: str) -> JobState:
    """Returns the state of a job that the controller has forgotten: accounting, if kept, has whether it was
    cancelled."""
    command = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job_id}", "--format=State"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return JobState(GONE)
    # Such as "CANCELLED by 1000"; of a job that was queued again only the last line counts.
    words = answer.stdout.split()[:1] if answer.returncode == 0 else []
    return JobState(words[0]) if words and words[0] in ENDED else JobState(GONE)


def _squeue(job_id: str) -> dict[str, JobState] | None:
    # One call a job: of several ids squeue refuses all when one is forgotten.
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
    """By the name of a run directory the key (`identity.key_of`) of the point that is measured there."""
    log: str
    """A file with what the job prints."""


def record_path(directory: Path, job_id: str) -> Path:
    return directory / RECORDS / f"{job_id}.json"


def write_record(directory: Path, record: JobRecord) -> None:
    path = record_path(directory, record.job_id)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, msgspec.json.encode(record))


def forget(directory: Path, job_id: str) -> None:
    """Removes the record of a job that has ended and whose results were read."""
    record_path(directory, job_id).unlink(missing_ok=True)


def living_jobs(directory: Path) -> list[JobRecord]:
    """Returns the jobs of earlier launches that are waiting or running still. UserError when that cannot be found
    out."""
    records = {path.stem: _read(path) for path in sorted((directory / RECORDS).glob("*.json"))}
    if not records:
        return []
    try:
        states = job_states({job_id: Path(record.log) for job_id, record in records.items()})
    except UserError:
        states = None
    if states is None:
        raise UserError(
            f"Slurm jobs ({', '.join(sorted(records))}) may be working in {directory}, and Slurm does not answer here; "
            f"try again where it does, or remove {directory / RECORDS} if they are gone."
        )
    for job_id in (job_id for job_id, state in states.items() if state.ended):
        forget(directory, job_id)
    return [record for job_id, record in records.items() if not states[job_id].ended]


def refuse_living_jobs(directory: Path) -> None:
    """Raises UserError when Slurm jobs work in the directory: another launcher would measure the same points."""
    if living := living_jobs(directory):
        ids = " ".join(record.job_id for record in living)
        raise UserError(f"Slurm jobs work in {directory}; go on with hydra/launcher=slurm, or end them: scancel {ids}.")


def _read(path: Path) -> JobRecord:
    """Returns the record in the file. UserError where it is none."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    except (msgspec.DecodeError, OSError) as error:
        raise UserError(f"{path} is no record of a Slurm job ({error}); remove it.") from None
    if record.job_id != path.stem:
        raise UserError(f"{path} is no record of job {path.stem}; remove it.")
    return record
