"""Points of workload=job, composed from a command line in this process."""

from __future__ import annotations

from functools import cache
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.hydra_adapter.composition import compose_point
from overlap_sweep.hydra_adapter.overrides import quoted_for_hydra
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.resolvers import register
from tests.sweeps import ROOT

COMMAND = "job.command=python t.py"


@cache
def _sweep() -> tuple[ConfigLoader, DictConfig]:
    """What Hydra gives to launchers of `launch.py -m workload=job`."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra
        given = ["workload=job", "runtime.device=cpu"]
        config = hydra.compose_config("config", given, RunMode.MULTIRUN, with_log_configuration=False)
        return hydra.config_loader, config


def composed(*typed: str) -> DictConfig:
    return compose_point(*_sweep(), ["workload=job", "runtime.device=cpu", *quoted_for_hydra(typed)])


def point(*typed: str) -> dict[str, Any]:
    """The completed point."""
    return resolve(composed(*typed))


def refusal(*typed: str) -> str | None:
    found = point(*typed)
    return workloads.of(found).refusal(found)
