"""Handing jobs to Slurm, through submitit."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.jobs import Sweep
from overlap_sweep.runtime.slurm.batch import Batch, BatchPoint
from overlap_sweep.runtime.slurm.packing import Pack
from overlap_sweep.runtime.slurm.records import JobRecord, forget, write_record

OF_EVERY_EXECUTOR = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout"),
)
"""submitit's options that are not Slurm's own."""
CONTROLLER_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes")
PATIENCE_S = 600.0
"""How long sbatch is tried again while the controller is away."""


def check_slurm() -> None:
    """UserError when there is none here."""
    if not shutil.which("sbatch"):
        raise UserError(
            "there is no sbatch here; run this where Slurm jobs are submitted, or leave out hydra/launcher."
        )


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
    # A new one for every launch: jobs load what they find there by the name of their number.
    folder = Path(options.pop("submitit_folder").replace("%j", f"{launch}/%j")).absolute()
    executor = submitit.AutoExecutor(
        folder=folder, cluster="slurm", slurm_max_num_timeout=options.pop("max_num_timeout")
    )
    # A job that may not be queued again loses its node for good, and Slurm's default is the administrator's.
    additional = {"requeue": True}
    additional |= {name.replace("_", "-"): value for name, value in options.pop("additional_parameters").items()}
    if additional.get("no-requeue"):
        del additional["requeue"]
    additional = {name: value for name, value in additional.items() if value is not False}
    given = {key if key in OF_EVERY_EXECUTOR else f"slurm_{key}": value for key, value in options.items()}
    executor.update_parameters(**given, slurm_additional_parameters=additional)
    singletons = Singleton.get_state()
    batches = [Batch(sweep, [BatchPoint.of(job) for job in pack.jobs], launch, singletons) for pack in packs]
    jobs = _patiently(lambda: _as_array(executor, batches), say)
    logs = {job.job_id: job.paths.stdout if options["stderr_to_stdout"] else job.paths.stderr for job in jobs}
    for (job_id, log), pack in zip(logs.items(), packs, strict=True):
        points = {job.name: job.key for job in pack.jobs}
        write_record(sweep.directory, JobRecord(job_id, launch, points, str(log)))
    return {job_id: (pack, log) for (job_id, log), pack in zip(logs.items(), packs, strict=True)}


def _as_array(executor: Any, batches: Sequence[Batch]) -> list[Any]:
    # submitit prints what sbatch says, and raises it too.
    with contextlib.redirect_stderr(io.StringIO()), executor.batch():
        return [executor.submit(batch) for batch in batches]


def _patiently(submit_all: Callable[[], list[Any]], say: Callable[[str], None]) -> list[Any]:
    """Try until the controller is there."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    deadline = time.monotonic() + PATIENCE_S
    wait_s = 2.0
    while True:
        try:
            return submit_all()
        except (FailedJobError, FailedSubmissionError) as error:
            reason = " ".join(str(error).split())
            if not any(symptom in reason for symptom in CONTROLLER_AWAY) or time.monotonic() > deadline:
                raise UserError(f"Slurm took no job: {reason}") from None
            say(f"slurm: the controller does not answer; trying again in {wait_s:.0f} s")
            time.sleep(wait_s)
            wait_s = min(60.0, 2 * wait_s)
