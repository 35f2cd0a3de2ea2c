"""Experiment trackers, such as MLflow and W&B: each point is a run there, below or beside the run of its sweep.

A tracker is a function without arguments that returns a `Tracker`: `connect` of a module here, or in another package
an entry point of the group `overlap_sweep.trackers`. `runs` says what is logged, `tracking` when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from overlap_sweep.errors import UsageError, UserError, first_line, nearest
from overlap_sweep.report.numbers import shortened
from overlap_sweep.results.identity import installed_version
from overlap_sweep.results.measured import Scalar

NONE = "none"
"""The value of `tracker` that logs nothing."""
GROUP = "overlap_sweep.trackers"
"""Entry point group for trackers of other packages."""
BUILT_IN = {"mlflow": "mlflow-skinny", "wandb": "wandb"}
"""The distribution that each of ours needs, by the name of its module."""
PROJECT = "overlap_sweep"
"""MLflow's experiment, or W&B's project, if the environment names none."""
LONGEST_REASON = 200
"""Longest reason of a tracker's library that is shown, in characters."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is logged of a point or of a sweep."""

    key: str
    """32 hexadecimal digits. A tracker has one run of each key, which later calls change."""
    name: str
    ok: bool = True
    """Whether it is to be shown as a run that succeeded."""
    params: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    """What else is known, such as `status` and `error`, by name."""
    about: str = ""
    """Sentences for people."""
    files: tuple[Path, ...] = ()
    started_s: float | None = None
    """Start and end of the measurement, Unix time."""
    ended_s: float | None = None


class Tracker(Protocol):
    """A connection to a tracker. It raises whatever its library raises."""

    @property
    def place(self) -> str:
        """Returns where the runs are, in words."""

    def start_sweep(self, sweep: Run) -> None:
        """Is called before the points of a sweep are logged, with its key and name alone."""

    def log_point(self, point: Run, sweep: Run | None) -> None:
        """Logs a point that has ended. `sweep`: as it was started; None for a point that ran alone."""

    def finish_sweep(self, sweep: Run) -> None:
        """Logs what is known of the sweep in the end. More points may follow where it is resumed."""


def names() -> tuple[str, ...]:
    """Returns the names of all trackers, built-in and of other distributions."""
    return (*BUILT_IN, *sorted(entry.name for entry in entry_points(group=GROUP)))


def check(name: str) -> None:
    """Raises UserError if the tracker is unknown or not installed. Imports nothing of it, which may take seconds."""
    if name not in names():
        near = nearest(name, names())
        mend = f"Did you mean {near}?" if near else f"Choose from {', '.join(names())}."
        raise UsageError(f"Unknown tracker {name}. {mend}")
    # Not its module: the folder wandb/ of earlier runs would be taken for one.
    if name in BUILT_IN and installed_version(BUILT_IN[name]) is None:
        raise UserError(f"{BUILT_IN[name]} is not installed; pip install 'overlap-sweep[{name}]'.")


@cache
def load(name: str) -> Callable[[], Tracker]:
    """Returns what connects to the tracker of that name, which `check` accepts."""
    if name in BUILT_IN:
        return cast(Callable[[], Tracker], import_module(f"{__name__}.{name}").connect)
    (entry,) = entry_points(group=GROUP, name=name)
    return cast(Callable[[], Tracker], entry.load())


def called(name: str, call: Callable[..., None], *arguments: object) -> None:
    """Calls a function of the tracker. UserError for whatever its library raises."""
    try:
        call(*arguments)
    except UserError:
        raise
    except Exception as error:
        # A server that is not there, a full disk, a missing login: each library has exceptions of its own.
        reason = shortened(f"{type(error).__name__}: {first_line(error)}", LONGEST_REASON)
        raise UserError(f"{name} failed ({reason}); check its variables of the environment and its server.") from error
