"""How a run begins: where its results go, and what is left when it is refused before anything was measured: nothing."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import LOCK_FILE
from overlap_sweep.runtime.lock import refuse_if_read_only
from overlap_sweep.runtime.mistakes import one_line
from overlap_sweep.runtime.outcome import outcomes

HYDRA_FOLDER = ".hydra"
"""What Hydra writes for a point before the point is looked at."""
_WRITTEN_FIRST = (HYDRA_FOLDER, "multirun.yaml", LOCK_FILE)


@dataclass(frozen=True)
class Beginning:
    """What was there before a run."""

    directory: Path
    """Of the run or the sweep."""
    names: frozenset[str]
    """Of what the directory held."""
    missing: tuple[Path, ...]
    """The directory and those above it that were not there, from below."""

    @classmethod
    def of(cls, directory: Path) -> Beginning:
        names = frozenset(path.name for path in directory.iterdir()) if directory.is_dir() else frozenset()
        missing = tuple(path for path in (directory, *directory.parents) if not path.exists())
        return cls(directory, names, missing)

    def restore(self) -> None:
        """Removes what was added, except where it holds more than what Hydra and we write before a point runs."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if path.name not in self.names and _is_of_a_start(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.missing:
            if not path.exists() or any(path.iterdir()):
                return
            path.rmdir()


def _is_of_a_start(path: Path) -> bool:
    if path.name in _WRITTEN_FIRST:
        return True
    # Points of a sweep may lie deeper, by their hydra.sweep.subdir.
    files = (file.relative_to(path) for file in path.rglob("*") if not file.is_dir())
    return path.is_dir() and all(HYDRA_FOLDER in file.parts for file in files)


_beginning: list[Beginning] = []
"""Of this process: one, once Hydra has begun."""


class Start(Callback):
    """Called by Hydra before it writes anything, whatever launcher and sweeper there are."""

    def __init__(self, fixed_keys: str) -> None:
        """Hydra has found `fixed_keys` for this, by the whole sweep's configuration; points have it from the cache."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _begin(config, "run")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _begin(config, "sweep")


def _begin(config: DictConfig, kind: str) -> None:
    """Exits with one line where the directory cannot be written to: of an exception Hydra would make a warning."""
    try:
        directory = Path(str(config.hydra[kind].dir))
        refuse_if_read_only(directory, kind)
        _beginning[:] = [Beginning.of(directory)]
    except UserError as error:
        sys.exit(f"error: {error}")
    except OmegaConfBaseException as error:
        sys.exit(f"error: {one_line(error)}")
    except OSError as error:
        sys.exit(f"error: {error}")
    outcomes.root = directory


def remove_leftovers() -> None:
    """Removes what a refused start has written, where nothing was measured."""
    for beginning in _beginning:
        beginning.restore()
