"""The workload protocol and the registry of workloads. No other shared module names a workload.

A workload is a package with an object `WORKLOAD`. Other distributions register theirs as entry points of the group
`overlap_sweep.workloads`, with their YAML files in a folder `conf` in the same package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from overlap_sweep import backends
from overlap_sweep.config import PointConfig, ResolvedPoint
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.gpus import all_ranks
from overlap_sweep.keeper import Start
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.workloads.memory import Memory

if TYPE_CHECKING:
    from overlap_sweep.measure import Ranks
    from overlap_sweep.overlap.overlap_cfg import OverlapConfig
    from overlap_sweep.report.comparison import Comparing
    from overlap_sweep.results.measured import Measured
    from overlap_sweep.results.run_directory import Result

Config = Mapping[str, Any]
"""The configuration of one point as plain data: as Hydra composed it, or after `complete` as it is measured."""


Run = Callable[[Config, Path, "Ranks"], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Here:
    """Environment, limits and machines for a workload that starts its own processes."""

    environment: Mapping[str, str]
    """Environment of its processes."""
    limit_s: float
    """Time limit in seconds."""
    host: str = "localhost"
    """Address of this machine, the first of the point, as its other machines reach it."""
    port: int = 0
    """A free port of this machine."""
    start_on_others: Sequence[Start] = ()
    """For each other machine of the point what starts processes there, in the order of ranks."""
    host_names: Sequence[str] = ("localhost",)
    """Names of the point's machines, this one first."""
    interfaces: Sequence[str | None] = (None,)
    """Network interface by which the point's other machines reach each, if it is known and there are others."""


RunHere = Callable[[Config, Path, Here], dict[str, Any]]


def run_of(package: str) -> Run:
    """Returns a function that imports the package's module `run` when called, and calls its `run`."""
    return lambda point, directory, ranks: import_module(f"{package}.run").run(point, directory, ranks)


def _tp_size(config: Config) -> int:
    return int(config["tp_size"])


MOST_TP = 8
"""Most tensor-parallel ranks, which must be within a node."""


def tp_ranks(config: Config, others: int = 1, ranks: int | None = None) -> dict[str, int]:
    """Returns `tp_size` as a number where it is null: `ranks`, else one for each GPU, over `others`, such as
    data-parallel ones."""
    if config.get("tp_size", 1) is not None:
        return {}
    if others < 1:
        # Refused by its range, after the point has got its name.
        return {"tp_size": 1}
    if ranks and ranks % others:
        raise UsageError(f"ranks={ranks} is not divisible by dp_size={others}; give a multiple.")
    return {"tp_size": min(ranks // others if ranks else all_ranks(config, "tp_size", others), MOST_TP)}


def _on_one_node(config: Config) -> str:
    return f"workload={config['workload']['name']} runs on one node; leave out runtime.nodes"


class Wrapper(NamedTuple):
    """A program that starts the processes, such as a profiler (`profilers.py`)."""

    words: tuple[str, ...]
    """Program and arguments."""
    missing: str
    """Error message if the program is not in PATH."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """A point's requirements on its worker processes. Points with equal requirements can share them."""

    max_connections: int | None = 1
    """CUDA_DEVICE_MAX_CONNECTIONS, unless `runtime.max_connections` is given. None: as the launcher has it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""
    wrapper: Wrapper | None = None
    company: str = ""
    """Any further string that must be equal for points to share processes."""
    first_gpu: int = 0
    """Number of the ranks' first GPU among the visible ones."""


def usual_workers(config: Config, directory: Path) -> Workers:
    """Returns the requirements of a point that its backend alone decides."""
    return Workers(max_connections=backends.max_connections(config["backend"]))


@dataclass(frozen=True)
class Sample:
    """The times of one point, in microseconds, as a search over knobs compares them. The i-th samples of all fields
    were taken in the same round."""

    times_us: tuple[float, ...]
    """Times of the point itself."""
    beside_us: tuple[float, ...] = ()
    """Times of a reference that all points with equal `work` share: dividing by them cancels drift of the machine."""
    none_us: tuple[float, ...] = ()
    """Times of the same work with no overlap."""
    work: str = ""
    """Key that is equal for points that compute the same."""
    amount: float = 1.0
    """Amount of work, such as samples per step: points are compared by time per amount."""
    by_mean: bool = False
    """Whether the mean of `times_us` counts instead of the median."""

    def scaled(self, factor: float) -> Sample:
        """Returns the sample for `factor` times as much work."""
        point_us, beside_us, none_us = (
            tuple(factor * time_us for time_us in times_us)
            for times_us in (self.times_us, self.beside_us, self.none_us)
        )
        return Sample(point_us, beside_us, none_us, self.work, factor * self.amount, self.by_mean)


@dataclass(frozen=True, kw_only=True)
class Searchable:
    """How `hydra/sweeper=knobs` searches a workload whose points have one time each."""

    sample: Callable[[Result], Sample]
    """Returns the sample of an `ok` result."""
    same_point: Callable[[Config], str]
    """Returns a key that is equal for completed points that run the same, ignoring options without effect."""
    options: tuple[str, ...] = ()
    """Prefixes of the options that are searched if several values are given. Others must be in the sweeper's
    `params`."""
    cases: tuple[str, ...] = ()
    """Options whose values are separate searches, although they are among those or in `params`."""
    of_gpus: tuple[str, ...] = ()
    """Prefixes of the options that have no effect on a CPU."""
    rivals: Callable[[Config], str] | None = None
    """Returns a key that is equal for completed points that compete with each other although they are of different
    cases. The best settings of such cases are measured again side by side, and compared by time per amount. For
    workloads whose times are of whole steps."""
    deviation: Callable[[Result, Result], str] = lambda result, reference: ""
    """Returns how an `ok` result computes something else than another one should have computed alike, in a few words;
    empty if it doesn't. Such a setting of a case has failed."""
    experiment: str | None = None
    """Experiment that only configures the search. The command that runs the best setting leaves it out."""
    example: str = "runtime.max_connections=1,8"
    """Example of a knob with several values, for error messages."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A kind of work that points measure. Only its module `run` imports torch, and only `section` the analysis."""

    name: str
    package: str
    """Package with the modules `config` (options), `run` (code of the workers), `result` (measured fields), and `study`
    (what is compared); or instead of `study` `section` (table of points, report, and its part in comparisons,
    which may also be in `compare`)."""
    complete: Callable[[Config], dict[str, Any]]
    """Returns the point with all references resolved: backend, knobs, contents of files. Later stages read nothing
    else. UserError if an input cannot be understood."""
    subject: Callable[[Config], str]
    """Returns a short name of what is measured: `fc1`, `8192 GEMM`."""
    words: Callable[[Config, Sequence[str]], list[str]]
    """Returns the words of the run directory's name, the model or its substitute first. The second argument are the
    command line's overrides, for words that appear only if an option was given."""
    named: Collection[str]
    """Options that these words show, or that do not affect the measurement. Other options of the command line are
    appended to the name."""
    run: Run | None = None
    """Runs on every rank of the group: writes files into the run directory and returns the measured fields of the
    point's `Result`. If it raises `Refused`, the point is skipped with that reason; if `WrongNumbers`, it fails."""
    run_here: RunHere | None = None
    """Instead of `run`: runs in the launcher's process and starts processes of its own. They have ended when it returns
    or raises. Returns fields of the `Result` like `run`, with `environment` for what it learnt of the machine.
    `Refused` as in `run`; `PointFailed` if nothing was measured."""
    refusal: Callable[[Config], str | None] = lambda config: None
    """Returns why a completed point cannot be measured, or None."""
    on_one_node: Callable[[Config], str | None] = _on_one_node
    """Returns why all ranks of a completed point must be on one machine, in one line; None if they need not."""
    overlap_configs: Callable[[Config], dict[str, OverlapConfig]] = lambda config: {}
    """Returns the overlap configurations that the backend gets, by variant, or under "" for the whole point. They are
    written into the run directory."""
    ranks: Callable[[Config], Mapping[str, Any]] = tp_ranks
    """Returns for a composed point the options that say how many ranks there are, where they are null: as numbers."""
    world_size: Callable[[Config], int] = _tp_size
    """Returns the number of ranks of a point."""
    idle_gpus: Callable[[Config], int] = lambda config: 0
    """Returns the number of GPUs it needs in addition to those of its ranks."""
    fewer_gpus: Callable[[Config], tuple[str, str]] = lambda config: (
        f"tp_size={config['tp_size']}",
        "a smaller tp_size",
    )
    """Returns, for the error about missing GPUs, the options that determine their number, and what to use instead."""
    memory: Callable[[Config], Memory | None] = lambda config: None
    """Returns an estimate of the memory of each rank of a completed point, which its model decides. None: little."""
    less_memory: str = "a smaller model"
    """What needs less, for the error about missing memory."""
    cost: Callable[[Config], tuple[Any, ...]] = lambda config: ()
    """Returns the values that a point's duration depends on, besides model, ranks, backend, precision, tokens and
    repeats."""
    workers: Callable[[Config, Path], Workers] = usual_workers
    """Returns the requirements of a completed point on its worker processes, which may write into its run directory.
    UserError if they cannot be started."""
    backend: Callable[[str], Any] = backends.load
    """Returns the module of a backend by name. UserError if there is none, or it does not support this workload."""
    output_option: str | None = None
    """Option, with dots, that replaces multirun/ as the directory of the results."""
    names_in_output: bool = False
    """Whether a single point gets its own folder in that directory, as the points of a sweep do."""
    files_of_points: bool = False
    """Whether its section has files of single points, which launch.py writes."""
    is_told_when_measured: bool = True
    """Whether launch.py prints the report after measuring, since it is short."""
    searchable: Searchable | None = None
    """None: `hydra/sweeper=knobs` refuses it."""

    def module(self, name: str) -> Any:
        """Returns one of the package's modules, imported on first use."""
        return import_module(f"{self.package}.{name}")


GROUP = "overlap_sweep.workloads"
"""Entry point group for workloads of other packages."""
BUILT_IN = ("operator", "layer", "kernel", "fsdp", "copy_engine", "tp_training", "job")


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
        raise UsageError(f"workload={name} is not known; choose one of {', '.join(names())}.")
    try:
        return cast(Workload, entry.load())
    except Exception as error:
        # Importing another package's code can raise anything.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"workload={name} cannot be loaded from {entry.value} ({reason}); fix or uninstall that package."
        ) from error


def config_folders() -> list[str]:
    """Returns the folders `conf` of other packages, with the YAML files of their workloads."""
    packages = [import_module(load(name).package) for name in names()[len(BUILT_IN) :]]
    return [str(Path(str(package.__file__)).parent / "conf") for package in packages]


def of(config: Config) -> Workload:
    """Returns the workload that a point runs."""
    return load(config["workload"]["name"])


def with_ranks(config: Config) -> Config:
    """Returns a composed point with numbers for ranks that are null."""
    return {**config, **found} if (found := of(config).ranks(config)) else config


def world_size(config: Config) -> int:
    """Returns the number of ranks that a point runs on."""
    return of(config).world_size(with_ranks(config))


def gpus(config: Config) -> int:
    """Returns the number of GPUs that a point needs: one for each rank, plus idle ones."""
    return world_size(config) + of(config).idle_gpus(config)


def nodes(config: Config) -> int:
    """Returns the number of machines that a resolved point's ranks are spread over."""
    return int(config["runtime"].get("nodes") or 1)


def process_wide(config: Config) -> str:
    """Returns what a point sets for whole processes, which no file for Megatron-LM can set, as it is spelled there:
    `CUDA_DEVICE_MAX_CONNECTIONS=8, with_cublasmp=True`. Empty if that is as usual."""
    connections = config["runtime"].get("max_connections") if config["runtime"]["device"] != "cpu" else None
    usual = connections in (None, backends.max_connections(config["backend"]))
    found = [] if usual else [f"{overlap_cfg.CONNECTIONS}={connections}"]
    return ", ".join([*found, *([overlap_cfg.CUBLASMP] if config.get("with_cublasmp") else [])])


def ranks_per_node(config: Config) -> int:
    """Returns the number of ranks that a resolved point has on each machine."""
    return world_size(config) // nodes(config)


def tp_groups_on_nodes(config: Config) -> str | None:
    """Returns why a resolved point's tensor-parallel groups of neighbouring ranks don't fit on a machine each, or
    None."""
    tp_size, of_node = int(config["tp_size"]), ranks_per_node(config)
    if of_node % tp_size == 0:
        return None
    of_each = f"{of_node} ranks" if of_node > 1 else "single rank"
    return (
        f"tp_size={tp_size} does not fit the {of_each} of a node with runtime.nodes={nodes(config)}; "
        "use a tp_size that divides the ranks of a node"
    )


def section_module(name: str) -> Any:
    """Returns what reports the workload's results: `section(sources)`, and its tables `TABLE` of points and, if it has
    them, `ANSWERS`. Its module `section`, or the report of the study in its module `study`."""
    workload = load(name)
    if find_spec(f"{workload.package}.study") is None:
        return workload.module("section")
    from overlap_sweep.study.section import as_module

    return as_module(workload.module("study").STUDY)


class PointTypes(NamedTuple):
    """The types of a workload's points."""

    options: type[PointConfig]
    """As Hydra composes them."""
    asked: type[ResolvedPoint]
    """As composed, with what the workload fills in whatever the machine; `Resolved` if there is no `Asked`."""
    resolved: type[ResolvedPoint]
    """As completed and recorded."""
    measured: type[Measured]


def types_of(name: str) -> PointTypes:
    """Returns the types of the workload's points: of its module `config`, and `MEASURED` of `result`. UserError if
    there is no such workload."""
    config = load(name).module("config")
    asked = getattr(config, "Asked", config.Resolved)
    return PointTypes(config.Config, asked, config.Resolved, load(name).module("result").MEASURED)


def comparing(name: str) -> Comparing | None:
    """Returns how the workload takes part in comparisons and histories: `COMPARED` of its module `compare`, else
    `COMPARING` of what reports its results. None if neither has it. UserError if there is no such workload."""
    workload = load(name)
    if find_spec(f"{workload.package}.compare") is None:
        return getattr(section_module(name), "COMPARING", None)
    compared: Comparing = workload.module("compare").COMPARED
    return compared


def schema(name: str) -> type[PointConfig]:
    """Returns the dataclass of the workload's configuration: `Config` in its module `config`. UserError if there is no
    such workload."""
    config: type[PointConfig] = load(name).module("config").Config
    return config
