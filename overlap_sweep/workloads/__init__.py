"""The protocol that every workload keeps, and the registry of them: the only place that knows which there are.

A workload is a package with an object `WORKLOAD`. Those of other distributions are entry points of the group
`overlap_sweep.workloads`, and have their YAML files in a folder `conf` beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from overlap_sweep import backends
from overlap_sweep.config import PointConfig
from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    from overlap_sweep.measure import Ranks
    from overlap_sweep.overlap.overlap_cfg import OverlapConfig
    from overlap_sweep.report.comparison import Comparing
    from overlap_sweep.results.measured import Measured
    from overlap_sweep.results.run_directory import Result

Config = Mapping[str, Any]
"""The configuration of one point as plain data: as it was asked for, or after `complete` as it is measured."""


Run = Callable[[Config, Path, "Ranks"], dict[str, Any]]


def run_of(package: str) -> Run:
    """Returns a function that imports the package's module `run` when called, and calls its `run`."""
    return lambda point, directory, ranks: import_module(f"{package}.run").run(point, directory, ranks)


def _tp_size(config: Config) -> int:
    return int(config["tp_size"])


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What a point requires of its worker processes. Points with equal requirements can share them."""

    max_connections: int = 1
    """CUDA_DEVICE_MAX_CONNECTIONS, unless `runtime.max_connections` is given."""
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    """What the command line of the processes begins with, such as a profiler."""
    wrapper_missing: str = ""
    """The error where the wrapper's program is not in PATH."""
    company: str = ""
    """What else must be equal for points to share processes."""


def _usual_workers(config: Config, directory: Path) -> Workers:
    return Workers(max_connections=backends.max_connections(config["backend"]))


@dataclass(frozen=True)
class Sample:
    """One point as a search over knobs compares it: times in microseconds, whose i-th entries were taken side by
    side."""

    times_us: tuple[float, ...]
    beside_us: tuple[float, ...] = ()
    """Of something that all points of the same `work` have in common: it tells how fast the machine was just then."""
    none_us: tuple[float, ...] = ()
    """The same without overlap."""
    work: str = ""
    """Equal for points that compute the same."""
    amount: float = 1.0
    """How much work that was: points are compared by the time of equal amounts."""

    def scaled(self, factor: float) -> Sample:
        """Returns the sample for `factor` times as much work."""
        point_us, beside_us, none_us = (
            tuple(factor * time_us for time_us in times_us)
            for times_us in (self.times_us, self.beside_us, self.none_us)
        )
        return Sample(point_us, beside_us, none_us, self.work, factor * self.amount)


@dataclass(frozen=True, kw_only=True)
class Searchable:
    """What `hydra/sweeper=knobs` needs of a workload whose points have one time each."""

    sample: Callable[[Result], Sample]
    """Of a result that is ok."""
    same_point: Callable[[Config], str]
    """Returns what is equal for completed points that run the same, whatever idle options say."""
    options: tuple[str, ...] = ()
    """How the options begin that are searched wherever several values are given; others are if the sweeper's `params`
    name them."""
    cases: tuple[str, ...] = ()
    """Those of them whose values are searched apart."""
    of_gpus: tuple[str, ...] = ()
    """How the options begin that say nothing on a CPU."""
    experiment: str | None = None
    """One that does nothing but search: a run of what it found does without."""
    example: str = "runtime.max_connections=1,8"
    """How a knob is given several values."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A kind of work for points. Only its module `run` imports torch, and `section` the analysis."""

    name: str
    package: str
    """Of its modules: `config` with its options, `run` with what the workers run, `result` with what it measures,
    `section` with the table of its points and what is said of them, `compare` with how it takes part in comparisons."""
    complete: Callable[[Config], dict[str, Any]]
    """Returns the point with what its configuration only names filled in: the backend, knobs, the content of files.
    What comes after reads nothing else. UserError when something of the user's cannot be understood."""
    run: Run
    """Called on every rank of the group: writes what belongs into the run directory, and returns the measured fields of
    the point's `Result`. `Refused` from it skips the point with that reason, `WrongNumbers` fails it."""
    subject: Callable[[Config], str]
    """Returns what is measured, in a word: `fc1`, `8192 GEMM`."""
    words: Callable[[Config, Sequence[str]], list[str]]
    """Returns the words of the run directory's name, of which the first is the model, or what stands for one; the
    command line's overrides are given, for what is named only if asked for."""
    named: Collection[str]
    """The options that those words show, or that are no part of what is measured: others that are given on the command
    line are appended to the name."""
    refusal: Callable[[Config], str | None] = lambda config: None
    """Returns why a completed point makes no sense, or None."""
    overlap_configs: Callable[[Config], dict[str, OverlapConfig]] = lambda config: {}
    """Returns by variant, or for the whole point under "", what the backend is given, for the run directory."""
    world_size: Callable[[Config], int] = _tp_size
    """Returns the ranks that a point runs on."""
    idle_gpus: Callable[[Config], int] = lambda config: 0
    """Returns how many GPUs it needs beside those of its ranks."""
    fewer_gpus: Callable[[Config], tuple[str, str]] = lambda config: (
        f"tp_size={config['tp_size']}",
        "a smaller tp_size",
    )
    """Returns what asks for so many GPUs, and what would ask for fewer."""
    cost: Callable[[Config], tuple[Any, ...]] = lambda config: ()
    """Returns what decides, beside model, ranks, backend, precision, tokens and repeats, how long a point takes."""
    workers: Callable[[Config, Path], Workers] = _usual_workers
    """Returns what a completed point wants of its worker processes; its run directory is given for what they write.
    UserError where they cannot be started so."""
    backend: Callable[[str], Any] = backends.load
    """Returns the module of the backend of that name. UserError where there is none, or it cannot run this."""
    output_option: str | None = None
    """The option, with dots, that names the directory of the results instead of multirun/."""
    names_in_output: bool = False
    """Whether a single point's results go into a folder of its own there, as those of a sweep do."""
    is_told_when_measured: bool = True
    """Whether launch.py prints what is said of the points: little enough to be read at once."""
    searchable: Searchable | None = None
    """None: `hydra/sweeper=knobs` refuses it."""

    def module(self, name: str) -> Any:
        """Returns one of the package's modules, imported on first use."""
        return import_module(f"{self.package}.{name}")


GROUP = "overlap_sweep.workloads"
"""The group of other packages' entry points."""
BUILT_IN = ("operator", "layer", "kernel", "fsdp", "copy_engine", "tp_training")


@cache
def names() -> tuple[str, ...]:
    """Returns the names of all workloads, built-in and of other distributions."""
    return (*BUILT_IN, *sorted(entry.name for entry in entry_points(group=GROUP)))


@cache
def load(name: str) -> Workload:
    """Returns the workload of that name. UserError if there is none."""
    if name in BUILT_IN:
        return cast(Workload, import_module(f"{__name__}.{name}").WORKLOAD)
    entry = next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)
    if entry is None:
        raise UserError(f"workload={name} is not known; choose one of {', '.join(names())}.")
    try:
        return cast(Workload, entry.load())
    except Exception as error:
        # Of somebody else's code, whatever it fails with when it is run for the first time.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"workload={name} cannot be loaded from {entry.value} ({reason}); mend or uninstall it."
        ) from error


def config_folders() -> list[str]:
    """Returns the folders in which other packages have the YAML files of their workloads: `conf` beside `WORKLOAD`."""
    packages = [import_module(load(name).package) for name in names()[len(BUILT_IN) :]]
    return [str(Path(str(package.__file__)).parent / "conf") for package in packages]


def of(config: Config) -> Workload:
    """Returns the workload that a point runs."""
    return load(config["workload"]["name"])


def world_size(config: Config) -> int:
    """Returns the number of ranks that a point runs on."""
    return of(config).world_size(config)


def gpus(config: Config) -> int:
    """Returns the number of GPUs that a point needs: one for each rank, and those beside them."""
    return world_size(config) + of(config).idle_gpus(config)


def section_module(name: str) -> Any:
    """Returns the module with `section(sources)`, which reports the workload's results, and its TABLE of points."""
    return load(name).module("section")


def measured_type(name: str) -> type[Measured]:
    """Returns the type of what the workload's points measure. UserError if there is no such workload."""
    measured: type[Measured] = load(name).module("result").MEASURED
    return measured


def comparing(name: str) -> Comparing | None:
    """Returns how the workload takes part in comparisons and histories: `COMPARED` in its module `compare`. None if it
    has no such module. UserError if there is no such workload."""
    workload = load(name)
    if find_spec(f"{workload.package}.compare") is None:
        return None
    compared: Comparing = workload.module("compare").COMPARED
    return compared


def schema(name: str) -> type[PointConfig]:
    """Returns the dataclass of the workload's configuration: `Config` in its module `config`. UserError if there is no
    such workload."""
    config: type[PointConfig] = load(name).module("config").Config
    return config
