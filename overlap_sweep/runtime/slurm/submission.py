"""Packs points into Slurm jobs and submits them through submitit."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.group_config import shared_by
from overlap_sweep.runtime.jobs import Job, Sweep
from overlap_sweep.runtime.slurm.batch import Batch
from overlap_sweep.runtime.slurm.queue import JobRecord, forget, write_record

OURS = ("_target_", "points_per_job", "max_jobs", "poll_s")
"""The launcher's options that are not submitit's."""
LEAST = {"points_per_job": 1, "max_jobs": 1, "poll_s": 0.1}

OF_EVERY_EXECUTOR = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout"),
)
"""submitit's options that are not Slurm's own."""

CONTROLLER_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes")

STRAGGLERS_S = 30
"""Time that a job's other tasks have to end after the first of them has."""

PATIENCE_S = 600.0
"""How long to retry sbatch while the controller does not answer."""


@dataclass(frozen=True)
class Pack:
    """Points for one job."""

    options: Mapping[str, Any]
    """submitit's options."""
    jobs: list[Job]


@dataclass
class Submitted:
    """A submitted job."""

    pack: Pack
    log: Path
    seen_ended: int = 0
    has_others: bool = False
    """Whether it also measures points that this launch does not request."""


def pack(jobs: Sequence[Job]) -> list[Pack]:
    """Returns packs of points with the same Slurm options and group of workers, in order and evenly sized:
    `points_per_job` in each, and more if there would be more than `max_jobs` packs."""
    alike: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        options = launcher_options(job)
        alike[json.dumps([shared_by(job.point), options], sort_keys=True)].append(job)
    packs = []
    for group in alike.values():
        options = launcher_options(group[0])
        most, of_submitit = options["max_jobs"], {key: value for key, value in options.items() if key not in OURS}
        wanted = math.ceil(len(group) / options["points_per_job"])
        count = min(wanted, most) if most is not None else wanted
        packs += [Pack(of_submitit, list(part)) for part in _evenly(group, count)]
    return packs


def launcher_options(job: Job) -> dict[str, Any]:
    """Returns the launcher's options, resolved for this point, since they may depend on `tp_size`."""
    options: dict[str, Any] = OmegaConf.to_container(job.config.hydra.launcher, resolve=True)  # type: ignore[assignment]
    for name, least in LEAST.items():
        if options[name] is not None and options[name] < least:
            raise UserError(f"hydra.launcher.{name}={options[name]} is out of range; give {least} or more.")
    if options["tasks_per_node"] != 1:
        raise UserError(
            f"hydra.launcher.tasks_per_node={options['tasks_per_node']}: a job has one task on each node, which starts "
            "the ranks there; leave it out."
        )
    if options["signal_delay_s"] >= 60 * options["timeout_min"]:
        raise UserError(
            f"hydra.launcher.signal_delay_s={options['signal_delay_s']} is not shorter than timeout_min="
            f"{options['timeout_min']}, so jobs would stop at once; decrease it, or increase timeout_min."
        )
    # GPUs and CPUs must not be requested in two ways.
    if options["gres"] or options["gpus_per_task"]:
        options["gpus_per_node"] = None
    if options["cpus_per_gpu"]:
        options["cpus_per_task"] = None
    return options


def _evenly(items: Sequence[Job], count: int) -> list[Sequence[Job]]:
    """Returns the items in `count` parts, the longer ones first."""
    shortest, longer = divmod(len(items), count)
    ends = [(index + 1) * shortest + min(index + 1, longer) for index in range(count)]
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def check_slurm() -> None:
    """Raises UserError if Slurm is not installed."""
    if not shutil.which("sbatch"):
        raise UserError(
            "sbatch is not installed; run this where Slurm jobs can be submitted, or leave out hydra/launcher."
        )


def submit(sweep: Sweep, packs: Sequence[Pack]) -> dict[str, Submitted]:
    """Submits a job for each pack, as an array if several have the same options, and records them; returns them by id.
    UserError if Slurm refuses; then all of them are cancelled."""
    alike: dict[str, list[Pack]] = defaultdict(list)
    for pack in packs:
        alike[json.dumps(pack.options, sort_keys=True)].append(pack)
    submitted: dict[str, Submitted] = {}
    try:
        for group in alike.values():
            submitted |= _submit_array(sweep, group)
    except UserError:
        _take_back(sweep, list(submitted))
        raise
    return submitted


def _take_back(sweep: Sweep, job_ids: Sequence[str]) -> None:
    """Cancels the jobs; if scancel fails too, the next launch finds them by their records."""
    if job_ids and not subprocess.run(["scancel", *job_ids], capture_output=True, check=False).returncode:
        for job_id in job_ids:
            forget(sweep.directory, job_id)


def _submit_array(sweep: Sweep, packs: Sequence[Pack]) -> dict[str, Submitted]:
    # Slow to import, and only needed here.
    import submitit

    options = dict(packs[0].options)
    # A new folder every time, since jobs load files there by job number. Not one for each job: Slurm fails a job whose
    # log has no folder, and jobs may start before their numbers are known here.
    new = uuid.uuid4().hex[:12]
    folder = Path(re.sub("%[jAat]", new, options.pop("submitit_folder"))).absolute()
    executor = submitit.AutoExecutor(
        folder=folder, cluster="slurm", slurm_max_num_timeout=options.pop("max_num_timeout")
    )
    # A job that may not be requeued is lost with its node, and Slurm's default depends on the site.
    additional = {"requeue": True}
    additional |= {name.replace("_", "-"): value for name, value in options.pop("additional_parameters").items()}
    if additional.get("no-requeue"):
        del additional["requeue"]
    additional = {name: value for name, value in additional.items() if value is not False}
    if options["nodes"] > 1:
        # Where the first task dies before the others know how to reach it, they would wait in vain.
        options["srun_args"] = [f"--wait={STRAGGLERS_S}", *(options.get("srun_args") or [])]
    parameters = {key if key in OF_EVERY_EXECUTOR else f"slurm_{key}": value for key, value in options.items()}
    executor.update_parameters(**parameters, slurm_additional_parameters=additional)
    singletons = Singleton.get_state()
    batches = [Batch(sweep, pack.jobs, singletons) for pack in packs]
    submitted = {}
    try:
        jobs = _patiently(executor, batches)
    except UserError:
        if new in folder.name:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for job, pack in zip(jobs, packs, strict=True):
        log = job.paths.stdout if options["stderr_to_stdout"] else job.paths.stderr
        write_record(sweep.directory, JobRecord(job.job_id, {one.name: one.key for one in pack.jobs}, str(log)))
        submitted[job.job_id] = Submitted(pack, log)
    return submitted


def _patiently(executor: Any, batches: Sequence[Batch]) -> list[Any]:
    """Submits the batches as an array; retries while the controller does not answer."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    deadline = time.monotonic() + PATIENCE_S
    wait_s = 2.0
    while True:
        try:
            # submitit prints sbatch's message and raises it too.
            with contextlib.redirect_stderr(io.StringIO()), executor.batch():
                return [executor.submit(batch) for batch in batches]
        except (FailedJobError, FailedSubmissionError) as error:
            reason = " ".join(str(error).split())
            if not any(symptom in reason for symptom in CONTROLLER_AWAY) or time.monotonic() > deadline:
                raise UserError(f"Slurm refused the job: {reason}") from None
            print(f"slurm: the controller does not answer; trying again in {wait_s:.0f} s", flush=True)
            time.sleep(wait_s)
            wait_s = min(60.0, 2 * wait_s)
