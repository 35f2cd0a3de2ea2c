"""What a sweep's directory tells of the Slurm jobs that work for it, for the launch that comes after a dead one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import write_atomically
from overlap_sweep.runtime.kept import LASTING, of_launch, whole_result
from overlap_sweep.runtime.slurm.queue import job_states

RECORDS = ".slurm"
"""Below the sweep's directory, one file for each job."""
PATIENCE_S = 120.0


class JobRecord(msgspec.Struct, frozen=True):
    job_id: str
    launch: str
    """Attempts at points are counted for each launch."""
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
    """The job has ended, and what it left was looked at."""
    record_path(directory, job_id).unlink(missing_ok=True)


def forget_if_done(directory: Path, job_id: str) -> None:
    """The job may live, but has nothing left to do."""
    path = record_path(directory, job_id)
    if path.exists():
        record = _read(path)
        if all(_done(directory / name, record.launch) for name in record.points):
            forget(directory, job_id)


def _done(directory: Path, launch: str) -> bool:
    result = whole_result(directory)
    return result is not None and (result.status in LASTING or of_launch(result, launch))


def on_record(directory: Path, job_id: str, launch: str) -> bool:
    """Whether the job is known as one of the launch. Waits for the record, which is written just after the job is
    submitted, and which a network file system shows later still. What a job does that nobody knows of, another will do
    too."""
    deadline = time.monotonic() + PATIENCE_S
    while not (path := record_path(directory, job_id)).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return _read(path).launch == launch


def living_jobs(directory: Path) -> list[JobRecord]:
    """Those of earlier launches that are waiting or running still. UserError when that cannot be found out."""
    records = {record.job_id: record for record in _records(directory)}
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
    """UserError when Slurm jobs work in the directory: another launcher would measure the same points."""
    if living := living_jobs(directory):
        ids = " ".join(record.job_id for record in living)
        raise UserError(f"Slurm jobs work in {directory}; go on with hydra/launcher=slurm, or end them: scancel {ids}.")


def _records(directory: Path) -> Iterator[JobRecord]:
    for path in sorted((directory / RECORDS).glob("*.json")):
        yield _read(path)


def _read(path: Path) -> JobRecord:
    """UserError for what is none: its id and log are used as names of files."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    except (msgspec.DecodeError, OSError) as error:
        raise UserError(f"{path} is no record of a Slurm job ({error}); remove it.") from None
    sound = re.fullmatch(r"\d+(_\d+)?", record.job_id) and path.stem == record.job_id
    if not sound or not Path(record.log).name.startswith(f"{record.job_id}_"):
        raise UserError(f"{path} is no record of a Slurm job ({record.job_id}, {record.log}); remove it.")
    return record
