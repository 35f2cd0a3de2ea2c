"""Handing jobs to Slurm, through submitit."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.jobs import Sweep
from overlap_sweep.runtime.slurm.batch import Batch
from overlap_sweep.runtime.slurm.packing import Pack
from overlap_sweep.runtime.slurm.records import RECORDS, JobRecord, forget, write_record

OF_EVERY_EXECUTOR = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout"),
)
"""submitit's options that are not Slurm's own."""
CONTROLLER_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes")
PATIENCE_S = 600.0
"""How long sbatch is tried again while the controller is away."""


def submit(
    sweep: Sweep, packs: Sequence[Pack], launch: str, say: Callable[[str], None]
) -> dict[str, tuple[Pack, Path]]:
    """One job for each pack, as an array where several have the same options; by id the pack and what the job's output
    goes to. Each is on record when this returns. UserError when Slurm refuses; then none of them is left."""
    alike: dict[str, list[Pack]] = defaultdict(list)
    for pack in packs:
        alike[json.dumps(pack.options, sort_keys=True)].append(pack)
    submitted: dict[str, tuple[Pack, Path]] = {}
    try:
        for group in alike.values():
            submitted |= _submit_array(sweep, group, launch, say)
    except UserError:
        _take_back(sweep, list(submitted))
        raise
    return submitted


def _take_back(sweep: Sweep, job_ids: Sequence[str]) -> None:
    """Where scancel fails, too, the records tell the next launch of the jobs."""
    if job_ids and not subprocess.run(["scancel", *job_ids], capture_output=True, check=False).returncode:
        for job_id in job_ids:
            forget(sweep.directory, job_id)


def _submit_array(
    sweep: Sweep, packs: Sequence[Pack], launch: str, say: Callable[[str], None]
) -> dict[str, tuple[Pack, Path]]:
    # As the stock launcher does.
    import submitit

    options = dict(packs[0].options)
    folder = Path(options.pop("submitit_folder")).absolute()
    executor = submitit.AutoExecutor(
        folder=folder, cluster="slurm", slurm_max_num_timeout=options.pop("max_num_timeout")
    )
    # A job that may not be queued again loses its node for good, and Slurm's default is the administrator's.
    additional = {"requeue": True, **options.pop("additional_parameters")}
    if additional.get("no-requeue"):
        del additional["requeue"]
    given = {key if key in OF_EVERY_EXECUTOR else f"slurm_{key}": value for key, value in options.items()}
    executor.update_parameters(**given, slurm_additional_parameters=additional)
    singletons = Singleton.get_state()
    batches = [
        Batch(sweep, [job.overrides for job in pack.jobs], launch, _lock(sweep, launch, pack), singletons)
        for pack in packs
    ]
    jobs = _patiently(lambda: _as_array(executor, batches), say)
    for job, pack in zip(jobs, packs, strict=True):
        points = tuple(point.name for point in pack.jobs)
        write_record(sweep.directory, JobRecord(job.job_id, launch, points, str(job.paths.stderr)))
    return {job.job_id: (pack, job.paths.stderr) for job, pack in zip(jobs, packs, strict=True)}


def _as_array(executor: Any, batches: Sequence[Batch]) -> list[Any]:
    # submitit prints what sbatch says, and raises it too.
    with contextlib.redirect_stderr(io.StringIO()), executor.batch():
        return [executor.submit(batch) for batch in batches]


def _lock(sweep: Sweep, launch: str, pack: Pack) -> Path:
    names = "\n".join(job.name for job in pack.jobs)
    digest = hashlib.sha256(names.encode()).hexdigest()[:12]
    return (sweep.directory / RECORDS / f"{launch}_{digest}").absolute()


def _patiently(submit_all: Callable[[], list[Any]], say: Callable[[str], None]) -> list[Any]:
    """Try until the controller is there."""
    from submitit.core.utils import FailedJobError

    deadline = time.monotonic() + PATIENCE_S
    wait_s = 2.0
    while True:
        try:
            return submit_all()
        except FailedJobError as error:
            reason = " ".join(str(error).split())
            if not any(symptom in reason for symptom in CONTROLLER_AWAY) or time.monotonic() > deadline:
                raise UserError(f"Slurm took no job: {reason}") from None
            say(f"slurm: the controller does not answer; trying again in {wait_s:.0f} s")
            time.sleep(wait_s)
            wait_s = min(60.0, 2 * wait_s)
