"""Which points share a Slurm job."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.group import shared_by
from overlap_sweep.runtime.jobs import Job

OURS = ("_target_", "points_per_job", "max_jobs", "poll_s")
"""Of the launcher's options, those that are not submitit's."""
LEAST = {"points_per_job": 1, "max_jobs": 1, "poll_s": 0.1}


@dataclass(frozen=True)
class Pack:
    """Points for one job."""

    options: Mapping[str, Any]
    """submitit's."""
    jobs: list[Job]


def pack(jobs: Sequence[Job]) -> list[Pack]:
    """Points of the same Slurm options that one group of workers can run together, in their order and as evenly as can
    be: `points_per_job` in each, and more where that would make more than `max_jobs`."""
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
        packs += [Pack(of_submitit, list(part)) for part in evenly(group, count)]
    return packs


def launcher_options(job: Job) -> dict[str, Any]:
    """The launcher's, resolved for this point: those that name `tp_size` differ from point to point.
    UserError when one is out of range."""
    options: dict[str, Any] = OmegaConf.to_container(job.config.hydra.launcher, resolve=True)  # type: ignore[assignment]
    for name, least in LEAST.items():
        if options[name] is not None and options[name] < least:
            raise UserError(f"hydra.launcher.{name}={options[name]} is out of range; give {least} or more.")
    for name in ("nodes", "tasks_per_node"):
        if options[name] != 1:
            raise UserError(
                f"hydra.launcher.{name}={options[name]}: a point runs in one task on one node; leave it out."
            )
    if options["signal_delay_s"] >= 60 * options["timeout_min"]:
        raise UserError(
            f"hydra.launcher.signal_delay_s={options['signal_delay_s']} is no shorter than timeout_min="
            f"{options['timeout_min']}: jobs would stop at once; give a shorter one, or more time."
        )
    # What is asked for in another way is not asked for twice.
    if options["gres"] or options["gpus_per_task"]:
        options["gpus_per_node"] = None
    if options["cpus_per_gpu"]:
        options["cpus_per_task"] = None
    return options


def evenly(items: Sequence[Job], count: int) -> list[Sequence[Job]]:
    """In so many parts, the longer ones first."""
    shortest, longer = divmod(len(items), count)
    ends = [(index + 1) * shortest + min(index + 1, longer) for index in range(count)]
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
