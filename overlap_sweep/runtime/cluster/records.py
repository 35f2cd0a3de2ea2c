"""Which jobs of a sweep measure which points: records for later launches."""

from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import write_atomically
from overlap_sweep.runtime.cluster import Cluster, clusters

MEETING = ".nodes"
"""End of the names of files by which a job's nodes meet."""


class JobRecord(msgspec.Struct, frozen=True):
    job_id: str
    points: dict[str, str]
    """Keys (`identity.key_of`) of the job's points by the names of their run directories."""
    log: str
    """Path of the job's log file."""


def folder_of(cluster: Cluster, directory: Path) -> Path:
    """Returns the folder in the sweep's directory with what is kept of each job."""
    return directory / f".{cluster.name}"


def write_record(cluster: Cluster, directory: Path, record: JobRecord) -> None:
    path = folder_of(cluster, directory) / f"{record.job_id}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, msgspec.json.encode(record))


def forget(cluster: Cluster, directory: Path, job_id: str) -> None:
    """Removes what was written about a job that has ended and whose results were read."""
    folder = folder_of(cluster, directory)
    for path in (
        folder / f"{job_id}.json",
        given_up_path(cluster, directory, job_id),
        *folder.glob(f"{job_id}_*{MEETING}"),
    ):
        path.unlink(missing_ok=True)


def given_up_path(cluster: Cluster, directory: Path, job_id: str) -> Path:
    """Returns the file in which a job that ends says why none of the points that it leaves can be measured."""
    return folder_of(cluster, directory) / f"{job_id}.given_up"


def living_jobs(cluster: Cluster, directory: Path) -> list[JobRecord]:
    """Returns the pending and running jobs of earlier launches. UserError if the cluster does not answer."""
    records = {path.stem: _read(cluster, path) for path in sorted(folder_of(cluster, directory).glob("*.json"))}
    if not records:
        return []
    try:
        states = cluster.states({job_id: Path(record.log) for job_id, record in records.items()})
    except UserError:
        states = None
    if states is None:
        raise UserError(
            f"{cluster.title} jobs ({', '.join(sorted(records))}) may be running in {directory}, but {cluster.title} "
            f"does not answer; try again where it does. If the jobs are gone, move {folder_of(cluster, directory)} "
            "elsewhere."
        )
    for job_id in (job_id for job_id, state in states.items() if state.end):
        forget(cluster, directory, job_id)
    return [record for job_id, record in records.items() if not states[job_id].end]


def refuse_living_jobs(directory: Path) -> None:
    """Raises UserError if a cluster's jobs run in the directory: a local launcher would measure the same points."""
    for cluster in clusters():
        if living := living_jobs(cluster, directory):
            raise UserError(
                f"{cluster.title} jobs are running in {directory}; use hydra/launcher={cluster.name}, or cancel them "
                f"with: {cluster.cancel_command([record.job_id for record in living])}"
            )


def _read(cluster: Cluster, path: Path) -> JobRecord:
    """Returns the record in the file. UserError if it is not a record."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    except (msgspec.DecodeError, OSError) as error:
        raise UserError(f"{path} is not a record of a {cluster.title} job ({error}); move it elsewhere.") from None
    if record.job_id != path.stem:
        raise UserError(f"{path} is not the record of job {path.stem}; move it elsewhere.")
    return record
