"""The start of a run: its directory, and the removal of what was written if the run is refused before it measures."""

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
"""Folder that Hydra writes for a point before the point is checked."""
_WRITTEN_FIRST = (HYDRA_FOLDER, "multirun.yaml", LOCK_FILE)


@dataclass(frozen=True)
class Beginning:
    """The state of the directory before a run."""

    directory: Path
    """Directory of the run or sweep."""
    names: frozenset[str]
    """Names in the directory."""
    missing: tuple[Path, ...]
    """The directory and its parents that did not exist, innermost first."""

    @classmethod
    def of(cls, directory: Path) -> Beginning:
        names = frozenset(path.name for path in directory.iterdir()) if directory.is_dir() else frozenset()
        missing = tuple(path for path in (directory, *directory.parents) if not path.exists())
        return cls(directory, names, missing)

    def restore(self) -> None:
        """Removes what was added, except entries with files of points that ran."""
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
    # Points of a sweep may be nested deeper, by hydra.sweep.subdir.
    files = (file.relative_to(path) for file in path.rglob("*") if not file.is_dir())
    return path.is_dir() and all(HYDRA_FOLDER in file.parts for file in files)


_beginning: list[Beginning] = []
"""The beginning of this process's run; empty until Hydra starts it."""


class Start(Callback):
    """Hydra's callback before it writes anything, with any launcher and sweeper."""

    def __init__(self, fixed_keys: str) -> None:
        """Ignores `fixed_keys`: the parameter makes Hydra resolve and cache it with the whole sweep's configuration."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _begin(config, "run")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _begin(config, "sweep")


def _begin(config: DictConfig, kind: str) -> None:
    """Exits with one line if the directory cannot be written to; Hydra would turn an exception into a warning."""
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
    """Removes what a refused run has written, if nothing was measured."""
    for beginning in _beginning:
        beginning.restore()
