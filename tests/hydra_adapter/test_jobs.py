"""Jobs run as Hydra's `run_job` runs them."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict, read_write

from overlap_sweep.hydra_adapter.jobs import prepare, run
from tests.composed import configuration, hydra

Task = Callable[[DictConfig], Any]


def composed(directory: Path, **of_job: object) -> DictConfig:
    config = configuration("operator=fc2", "method=pipeline", "num_sm=3", "runtime.device=cpu")
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(directory), "point"
        config.hydra.job.update({"id": "1", "num": 1, "name": "launch", **of_job})
    return config


def context() -> HydraContext:
    setup_globals()
    return HydraContext(config_loader=hydra().config_loader, callbacks=Callbacks())


def by_us(config: DictConfig, directory: Path, task: Task) -> JobReturn:
    return run(prepare(config, directory / "point"), context(), task)


def by_hydra(config: DictConfig, _: Path, task: Task) -> JobReturn:
    return run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", context())


@pytest.mark.parametrize("of_job", [{}, {"chdir": True}, {"env_set": {"OVERLAP_SWEEP_SEEN": "1"}}])
def test_files_and_what_tasks_see_are_hydras(tmp_path: Path, of_job: dict[str, object]) -> None:
    seen: list[Any] = []

    def task(config: DictConfig) -> float:
        own: Any = HydraConfig.get()
        here = (Path.cwd(), os.environ.get("OVERLAP_SWEEP_SEEN"), own.runtime.output_dir, own.job.num)
        seen.append((copy.deepcopy(config), here, "hydra" in config))
        return 4.0

    files, returns = [], []
    for each in (by_us, by_hydra):
        returns.append(each(composed(tmp_path, **of_job), tmp_path, task))
        files.append({path.name: path.read_text() for path in (tmp_path / "point" / ".hydra").iterdir()})
    assert seen[0] == seen[1]
    assert files[0] == files[1]
    ours, hydras = returns
    assert ours == hydras
    assert ours.return_value == 4.0
    assert "OVERLAP_SWEEP_SEEN" not in os.environ


@pytest.mark.parametrize("each", [by_us, by_hydra])
def test_what_a_task_raises_is_kept(tmp_path: Path, each: Callable[..., JobReturn]) -> None:
    error, before = OSError("full"), HydraConfig.instance().cfg

    def task(_: DictConfig) -> float:
        raise error

    returned = each(composed(tmp_path), tmp_path, task)
    assert (returned.status.name, returned._return_value) == ("FAILED", error)
    assert HydraConfig.instance().cfg is before


def test_a_prepared_job_has_written_nothing_and_changed_nothing(tmp_path: Path) -> None:
    before = HydraConfig.instance().cfg
    prepare(composed(tmp_path), tmp_path / "point")
    assert HydraConfig.instance().cfg is before
    assert not list(tmp_path.iterdir())
