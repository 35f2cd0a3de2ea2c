"""Points of workload=job, composed from a command line in this process."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.hydra_adapter.composition import compose_point
from overlap_sweep.hydra_adapter.overrides import quoted_for_hydra
from overlap_sweep.runtime.point import resolve
from tests.workloads.fsdp.points import base_sweep

COMMAND = "job.command=python t.py"


def composed(*typed: str) -> DictConfig:
    return compose_point(*base_sweep(), ["workload=job", "runtime.device=cpu", *quoted_for_hydra(typed)])


def point(*typed: str) -> dict[str, Any]:
    """The completed point."""
    return resolve(composed(*typed))


def refusal(*typed: str) -> str | None:
    found = point(*typed)
    return workloads.of(found).refusal(found)
