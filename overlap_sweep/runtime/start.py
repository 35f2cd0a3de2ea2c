"""The start of a run: its directory, which no other run has, and the removal of what was written if the run is refused
before it measures."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from overlap_sweep import trackers
from overlap_sweep.errors import UsageError, UserError, end, in_words, is_of_users_system
from overlap_sweep.hydra_adapter.composition import as_was_typed
from overlap_sweep.hydra_adapter.mistakes import as_user_error
from overlap_sweep.results.run_directory import LOCK_FILE, last_sweep
from overlap_sweep.runtime.group import GROUP_LOG
from overlap_sweep.runtime.lock import CLAIM_FILE, hold, refuse_if_read_only
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.resolvers import output_dir

T = TypeVar("T")

HYDRA_FOLDER = ".hydra"
"""Folder that Hydra writes for a point before the point is checked."""
_WRITTEN_FIRST = (HYDRA_FOLDER, "multirun.yaml", GROUP_LOG)
FEWEST_FILES = 64
"""Open files that a launch, its agent and a rank need with room to spare."""
ATTEMPTS = 100
"""How often a directory is made while other launches remove its parents."""
_LOCKS = {"sweep": LOCK_FILE, "run": CLAIM_FILE}
"""The lock of the directory, which is a point's in a run without -m."""


@dataclass(frozen=True)
class Beginning:
    """The state of the directory before a run, which this process has locked: nobody else writes there."""

    directory: Path
    """Directory of the run or sweep."""
    names: frozenset[str]
    """Names in the directory."""
    made: tuple[Path, ...]
    """The directory and its parents that this process made, outermost first."""
    lock: Path | None
    """The lock's file, if nobody held it before."""

    @classmethod
    def of(cls, directory: Path, lock: str, made: Sequence[Path] = ()) -> Beginning:
        """Makes the directory and locks it. UserError if another process holds it. `made`: directories that were made
        for it before, outermost first."""
        made = [*made]

        def make() -> bool:
            made.extend(_make(directory))
            return hold(directory, lock)

        try:
            is_new = _persistently(make)
        except (UserError, OSError):
            remove_empty(made)
            raise
        names = frozenset(path.name for path in directory.iterdir())
        return cls(directory, names, tuple(made), directory / lock if is_new else None)

    def restore(self) -> None:
        """Removes what was added, except entries with files of points that ran."""
        for path in self.directory.iterdir():
            if path.name not in self.names and _is_of_a_start(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self.lock and self.names >= {path.name for path in self.directory.iterdir()}:
            self.lock.unlink()
        remove_empty(self.made)


def _persistently(make: Callable[[], T]) -> T:
    """Returns what `make` returns; tries again where a launch that is refused removes its directories meanwhile."""
    for _ in range(ATTEMPTS - 1):
        try:
            return make()
        except FileNotFoundError:
            pass
    return make()


def _make(directory: Path) -> list[Path]:
    """Makes the directory and its parents; returns those that did not exist, outermost first."""
    made = []
    for path in reversed((directory, *directory.parents)):
        if not path.is_dir():
            try:
                path.mkdir()
                made.append(path)
            except FileExistsError:
                pass
    return made


def make_new(directory: Path) -> list[Path]:
    """Makes a directory that did not exist: the given one, or its name followed by `_2`, `_3` and so on. Returns it
    after those of its parents that did not exist either."""
    made: list[Path] = []

    def make(path: Path) -> None:
        made.extend(_make(path.parent))
        path.mkdir()
        made.append(path)

    names = chain([directory.name], (f"{directory.name}_{number}" for number in count(2)))
    for path in map(directory.with_name, names):
        try:
            _persistently(lambda: make(path))  # noqa: B023
            break
        except FileExistsError:
            pass
    return made


def remove_empty(made: Sequence[Path]) -> None:
    """Removes the directories, given outermost first, that are empty."""
    for path in reversed(made):
        try:
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return


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

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        _begin(config, "run")

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        _begin(config, "sweep")


def _begin(config: DictConfig, kind: str) -> None:
    """Makes and locks the run's directory. Exits with one line if that cannot be; Hydra would turn an exception into a
    warning."""
    try:
        _check_open_files()
        _check_resumed(config, kind)
        _check_tracker(config)
        as_was_typed(config)
        directory = Path(str(config.hydra[kind].dir))
        refuse_if_read_only(directory, kind)
        made = []
        if _is_by_time(config, kind):
            made = make_new(directory if kind == "sweep" else directory.parent)
            directory = made[-1] if kind == "sweep" else made[-1] / directory.name
            _set_directory(config, kind, directory)
        _beginning[:] = [Beginning.of(directory, _LOCKS[kind], made)]
        common = str(directory) if kind == "sweep" else output_dir(config)
    except UserError as error:
        end(error)
    except OmegaConfBaseException as error:
        end(as_user_error(error))
    except OSError as error:
        if is_of_users_system(error) or not error.filename:
            end(UserError(in_words(error)))
        why = f"cannot be written to ({error.strerror}); give another directory, as in hydra.{kind}.dir=DIR"
        end(UserError(f"{error.filename} {why}."))
    outcomes.root, outcomes.common = directory, Path(common) if common else None
    outcomes.wants_report = kind == "sweep" and bool(config.get("report"))
    if config.get("tracker", trackers.NONE) != trackers.NONE:
        from overlap_sweep.trackers.tracking import LaunchTracking, Tracking

        outcomes.tracking = LaunchTracking(Tracking(config.tracker, directory))


def _check_open_files() -> None:
    """Raises UserError if this process may open too few files for workers, which would be waited for in vain."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < FEWEST_FILES:
        raise UserError(f"Only {limit} files may be open at once; raise the limit: ulimit -n 1024.")


def _check_resumed(config: DictConfig, kind: str) -> None:
    """Raises UserError if the run resumes a sweep that does not exist."""
    if not config.resume:
        return
    if kind == "run":
        raise UsageError("resume= requires -m.")
    earlier = last_sweep() if config.resume == "last" else Path(config.resume)
    if Path(config.hydra.sweep.dir) != earlier:
        raise UsageError(f"resume={config.resume} and hydra.sweep.dir={config.hydra.sweep.dir}: give only one.")
    if not earlier.is_dir():
        raise UserError(f"{earlier} does not exist; give the directory of an earlier sweep, or resume=last.")


def _check_tracker(config: DictConfig) -> None:
    """Raises UserError if the tracker cannot be used. Where its server is, it is asked only after the first point."""
    if config.get("tracker", trackers.NONE) != trackers.NONE:
        trackers.check(config.tracker)


def _is_by_time(config: DictConfig, kind: str) -> bool:
    """Returns whether the directory's name is the time, since the user gave none."""
    written: Any = OmegaConf.to_container(config.hydra[kind], resolve=False)
    is_default = str(written["dir"]).startswith(f"${{{kind}_dir:")
    return is_default and not config.resume and not output_dir(config)


def _set_directory(config: DictConfig, kind: str, directory: Path) -> None:
    """Sets the directory of the run, also for the points of a sweep, which are composed anew."""
    if str(directory) != config.hydra[kind].dir:
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra[kind].dir = str(directory)
            config.hydra.overrides.hydra.append(f"hydra.{kind}.dir={directory}")


def remove_leftovers() -> None:
    """Removes what a refused run has written, if nothing was measured."""
    for beginning in _beginning:
        beginning.restore()
