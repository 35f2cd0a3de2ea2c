"""Packs points into a cluster's jobs and submits them."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.cluster import Cluster
from overlap_sweep.runtime.cluster.batch import Batch
from overlap_sweep.runtime.cluster.records import JobRecord, forget, write_record
from overlap_sweep.runtime.group_config import shared_by
from overlap_sweep.runtime.jobs import Job, Sweep


class CommonOptions(NamedTuple):
    """The options that launchers of all clusters have."""

    points_per_job: int
    max_jobs: int | None
    poll_s: float


LEAST = {"points_per_job": 1, "max_jobs": 1, "poll_s": 0.1}


@dataclass(frozen=True)
class Pack:
    """Points for one job."""

    options: Mapping[str, object]
    """The cluster's options."""
    jobs: list[Job]


@dataclass
class Submitted:
    """A submitted job."""

    pack: Pack
    log: Path
    seen_ended: int = 0
    has_others: bool = False
    """Whether it also measures points that this launch does not request."""


def pack(cluster: Cluster, jobs: Sequence[Job]) -> list[Pack]:
    """Returns packs of points with the same options of the cluster and group of workers, in order and evenly sized:
    `points_per_job` in each, and more if there would be more than `max_jobs` packs."""
    alike: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        alike[json.dumps([shared_by(job.point), options_of(cluster, job)], sort_keys=True)].append(job)
    packs = []
    for group in alike.values():
        common, own = options_of(cluster, group[0])
        wanted = math.ceil(len(group) / common.points_per_job)
        count = min(wanted, common.max_jobs or wanted)
        packs += [Pack(own, list(part)) for part in _evenly(group, count)]
    return packs


def options_of(cluster: Cluster, job: Job) -> tuple[CommonOptions, dict[str, object]]:
    """Returns the launcher's options that all clusters have, and the cluster's own, resolved for this point, since they
    may depend on `tp_size`. UserError if they are out of range or contradict one another."""
    own: dict[str, Any] = OmegaConf.to_container(job.config.hydra.launcher, resolve=True)  # type: ignore[assignment]
    del own["_target_"]
    common = CommonOptions(**{name: own.pop(name) for name in LEAST})
    for name, value in common._asdict().items():
        if value is not None and value < LEAST[name]:
            raise UserError(f"hydra.launcher.{name}={value} is out of range; give {LEAST[name]} or more.")
    return common, cluster.options(own)


def _evenly(items: Sequence[Job], count: int) -> list[Sequence[Job]]:
    """Returns the items in `count` parts, the longer ones first."""
    shortest, longer = divmod(len(items), count)
    ends = [(index + 1) * shortest + min(index + 1, longer) for index in range(count)]
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def submit(cluster: Cluster, sweep: Sweep, packs: Sequence[Pack]) -> dict[str, Submitted]:
    """Submits a job for each pack, those with the same options at once, and records them; returns them by id.
    UserError if the cluster refuses; then all of them are cancelled."""
    alike: dict[str, list[Pack]] = defaultdict(list)
    for pack in packs:
        alike[json.dumps(pack.options, sort_keys=True)].append(pack)
    singletons = Singleton.get_state()
    submitted: dict[str, Submitted] = {}
    try:
        for group in alike.values():
            batches = [Batch(cluster.name, sweep, pack.jobs, singletons) for pack in group]
            for pack, (job_id, log) in zip(group, cluster.submit(batches, group[0].options), strict=True):
                points = {job.name: job.key for job in pack.jobs}
                write_record(cluster, sweep.directory, JobRecord(job_id, points, str(log)))
                submitted[job_id] = Submitted(pack, log)
    except UserError:
        # If they cannot be cancelled either, the next launch finds them by their records.
        if submitted and cluster.cancel(list(submitted)):
            for job_id in submitted:
                forget(cluster, sweep.directory, job_id)
        raise
    return submitted
