"""The workload protocol and the registry of workloads. No other shared module names a workload.

A workload is a package with an object `WORKLOAD`. Other distributions register theirs as entry points of the group
`overlap_sweep.workloads`, with their YAML files in a folder `conf` in the same package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Required, TypedDict, cast

from omegaconf import DictConfig
from typing_extensions import TypeVar

from overlap_sweep import backends
from overlap_sweep.config import AnalysisConfig, PointConfig, ResolvedPoint, TensorParallelConfig
from overlap_sweep.errors import UsageError
from overlap_sweep.gpus import all_ranks
from overlap_sweep.keeper import Start
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.report.section import Analysis, Section, Sources
from overlap_sweep.results import registry
from overlap_sweep.results.measured import Measured
from overlap_sweep.results.points import Point, Reading, read_points
from overlap_sweep.results.records import Records, read_records
from overlap_sweep.results.registry import BUILT_IN, names
from overlap_sweep.workloads.memory import Memory
from overlap_sweep.workloads.profilers import Wrapper

if TYPE_CHECKING:
    from overlap_sweep.measure import Ranks
    from overlap_sweep.overlap.overlap_cfg import OverlapConfig
    from overlap_sweep.report.comparison import Comparing
    from overlap_sweep.results.run_directory import Result

Config = Mapping[str, Any]
"""A point by the names of its options, as every configuration can be read."""
A = TypeVar("A", bound=PointConfig | DictConfig)
C = TypeVar("C", bound=PointConfig, default=Any)
"""A workload's `Config`, or its `Asked`."""
P = TypeVar("P", bound=ResolvedPoint, default=Any)
"""A workload's `Resolved`."""


class MeasuredFields(TypedDict, total=False):
    """Fields of a `Result` that running the point measures."""

    measured: Required[Measured]
    objective_us: float
    relative_error: dict[str, float | None]
    launch_bound: bool
    traces: list[str]
    warnings: list[str]


Run = Callable[[P, Path, "Ranks"], MeasuredFields]


@dataclass(frozen=True, kw_only=True)
class Here:
    """Environment, limits and machines for a workload that starts its own processes."""

    environment: Mapping[str, str]
    """Environment of its processes."""
    limit_s: float
    """Time limit in seconds."""
    give_up_us: float | None = None
    """Time of a step above which the point need not be measured to its end; None: measured whatever it takes."""
    inspects: bool = False
    """Whether to find out what could be changed in the point, if the workload can."""
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


RunHere = Callable[[P, Path, Here], dict[str, Any]]


def run_of(package: str, module: str = "run") -> Callable[[Any, Path, Any], Any]:
    """Returns a function that imports the package's module when called, and calls its `run`."""
    return lambda point, directory, where: import_module(f"{package}.{module}").run(point, directory, where)


MOST_TP = 8
"""Most tensor-parallel ranks, which must be within a node."""


def tp_ranks(config: PointConfig, others: int = 1, ranks: int | None = None) -> dict[str, int]:
    """Returns `tp_size` as a number where it is null: `ranks`, else one for each GPU, over `others`, such as
    data-parallel ones."""
    if getattr(config, "tp_size", 1) is not None:
        return {}
    if others < 1:
        # Refused by its range, after the point has got its name.
        return {"tp_size": 1}
    if ranks and ranks % others:
        raise UsageError(f"ranks={ranks} is not divisible by dp_size={others}; give a multiple.")
    return {"tp_size": min(ranks // others if ranks else all_ranks(config, "tp_size", others), MOST_TP)}


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


def usual_workers(config: PointConfig, directory: Path) -> Workers:
    """Returns the requirements of a point that its backend alone decides."""
    return Workers(max_connections=overlap_cfg.USUAL_CONNECTIONS.get(config.backend, 1))


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
class UsersCommand:
    """The user's own command that a point runs, without its levers."""

    template: str
    """As it was configured, with its placeholders."""
    words: Sequence[str]
    texts: Mapping[str, str]
    """Texts of the files that say which programs it starts, as far as they can be read (`levers.programs.files_of`)."""
    elsewhere: Mapping[str, str]
    """Options of the point that set the same as a lever, by its name."""
    number_of_levers: int


@dataclass(frozen=True, kw_only=True)
class Searchable(Generic[P]):
    """How `hydra/sweeper=knobs` searches a workload whose points have one time each."""

    sample: Callable[[Result], Sample]
    """Returns the sample of an `ok` result."""
    same_point: Callable[[P], str]
    """Returns a key that is equal for completed points that run the same, ignoring options without effect."""
    options: tuple[str, ...] = ()
    """Prefixes of the options that are searched if several values are given. Others must be in the sweeper's
    `params`."""
    cases: tuple[str, ...] = ()
    """Options whose values are separate searches, although they are among those or in `params`."""
    of_gpus: tuple[str, ...] = ()
    """Prefixes of the options that have no effect on a CPU."""
    rivals: Callable[[P], str] | None = None
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
class Workload(Generic[C, P]):
    """A kind of work that points measure. Only its module `run` imports torch, and only `section` the analysis."""

    name: str
    package: str
    """Package with the modules `config` (options), `run` (code of the workers), `result` (measured fields), and `study`
    (what is compared); or instead of `study` `section` (table of points, report, and its part in comparisons,
    which may also be in `compare`)."""
    complete: Callable[[C], Mapping[str, object]]
    """Returns the point with all references resolved: backend, knobs, contents of files. Later stages read nothing
    else. Gets the workload's `Config`, whose `model` is a `ResolvedModel`; `run` and the functions below that take a
    completed point get the workload's `Resolved`, the others either. UserError if an input cannot be understood."""
    subject: Callable[[P], str]
    """Returns a short name of what is measured: `fc1`, `8192 GEMM`."""
    words: Callable[[C, Sequence[str]], list[str]]
    """Returns the words of the run directory's name, the model or its substitute first. The second argument are the
    command line's overrides, for words that appear only if an option was given."""
    named: Collection[str]
    """Options that these words show, or that do not affect the measurement. Other options of the command line are
    appended to the name."""
    run: Run[P] | None = None
    """Runs on every rank of the group: writes files into the run directory and returns the measured fields of the
    point's `Result`. If it raises `Refused`, the point is skipped with that reason; if `WrongNumbers`, it fails."""
    run_here: RunHere[P] | None = None
    """Instead of `run`: runs in the launcher's process and starts processes of its own. They have ended when it returns
    or raises. Returns fields of the `Result` like `run`, with `environment` for what it learnt of the machine.
    `Refused` as in `run`; `PointFailed` if nothing was measured."""
    refusal: Callable[[P], str | None] = lambda config: None
    """Returns why a completed point cannot be measured, or None."""
    on_one_node: Callable[[P], str | None] = lambda config: (
        f"workload={config.workload.name} runs on one node; leave out runtime.nodes"
    )
    """Returns why all ranks of a completed point must be on one machine, in one line; None if they need not."""
    overlap_configs: Callable[[P], dict[str, OverlapConfig]] = lambda config: {}
    """Returns the overlap configurations that the backend gets, by variant, or under "" for the whole point. They are
    written into the run directory."""
    ranks: Callable[[C], Mapping[str, int]] = tp_ranks
    """Returns for a composed point the options that say how many ranks there are, where they are null: numbers, by name
    with dots. `Config.world_size` in the module `config` is the number of ranks that follows."""
    idle_gpus: Callable[[C], int] = lambda config: 0
    """Returns the number of GPUs it needs in addition to those of its ranks."""
    fewer_gpus: Callable[[C], tuple[str, str]] = lambda config: (
        f"tp_size={config.world_size}",
        "a smaller tp_size",
    )
    """Returns, for the error about missing GPUs, the options that determine their number, and what to use instead."""
    memory: Callable[[P], Memory | None] = lambda config: None
    """Returns an estimate of the memory of each rank of a completed point, which its model decides. None: little."""
    less_memory: str = "a smaller model"
    """What needs less, for the error about missing memory."""
    cost: Callable[[P], tuple[object, ...]] = lambda config: ()
    """Returns the values that a point's duration depends on, besides model, ranks, backend, precision, tokens and
    repeats."""
    workers: Callable[[P, Path], Workers] = usual_workers
    """Returns the requirements of a completed point on its worker processes, which may write into its run directory.
    UserError if they cannot be started."""
    backend: Callable[[str], object] = backends.load
    """Returns the module of a backend by name. UserError if there is none, or it does not support this workload."""
    output_option: str | None = None
    """Option, with dots, that replaces multirun/ as the directory of the results."""
    names_in_output: bool = False
    """Whether a single point gets its own folder in that directory, as the points of a sweep do."""
    files_of_points: bool = False
    """Whether its section has files of single points, which launch.py writes."""
    is_told_when_measured: bool = True
    """Whether launch.py prints the report after measuring, since it is short."""
    searchable: Searchable[P] | None = None
    """None: `hydra/sweeper=knobs` refuses it."""
    users_command: Callable[[P], UsersCommand] | None = None
    """Returns the command of a recorded point, for `analyze.py levers`. None: points run no command of the user's."""

    def module(self, name: str) -> ModuleType:
        """Returns one of the package's modules, imported on first use."""
        return import_module(f"{self.package}.{name}")


def load(name: str) -> Workload:
    """Returns the workload of that name. UserError if there is none."""
    return cast(Workload, registry.load(name))


def config_folders() -> list[str]:
    """Returns the folders `conf` of other packages, with the YAML files of their workloads."""
    packages = [import_module(load(name).package) for name in names()[len(BUILT_IN) :]]
    return [str(Path(str(package.__file__)).parent / "conf") for package in packages]


def of(config: PointConfig) -> Workload:
    """Returns the workload that a point runs."""
    return load(config.workload.name)


def completed(config: PointConfig) -> ResolvedPoint:
    """Returns the completed point. `config`: as composed, with values that depend on the machine. UserError for a value
    out of range."""
    return registry.decoded_point(of(config).complete(config))


def with_ranks(config: A) -> A:
    """Returns a composed point with numbers for ranks that are null."""
    if found := load(config.workload.name).ranks(config):
        config = deepcopy(config)
        for option, value in found.items():
            *parents, leaf = option.split(".")
            setattr(reduce(getattr, parents, config), leaf, value)
    return config


def gpus(config: PointConfig) -> int:
    """Returns the number of GPUs that a point needs: one for each rank, plus idle ones."""
    return config.world_size + of(config).idle_gpus(config)


def tp_groups_on_nodes(config: TensorParallelConfig) -> str | None:
    """Returns why a resolved point's tensor-parallel groups of neighbouring ranks don't fit on a machine each, or
    None."""
    tp_size, of_node = config.tp_size, config.ranks_per_node
    assert tp_size
    if of_node % tp_size == 0:
        return None
    of_each = f"{of_node} ranks" if of_node > 1 else "single rank"
    return (
        f"tp_size={tp_size} does not fit the {of_each} of a node with runtime.nodes={config.nodes}; "
        "use a tp_size that divides the ranks of a node"
    )


def section_module(name: str) -> ModuleType | SimpleNamespace:
    """Returns what reports the workload's results: `section(sources)`, and its tables `TABLE` of points and, if it has
    them, `ANSWERS`. Its module `section`, or the report of the study in its module `study`."""
    workload = load(name)
    if find_spec(f"{workload.package}.study") is None:
        return workload.module("section")
    from overlap_sweep.study.section import as_module

    return as_module(workload.module("study").STUDY)


def comparing(name: str) -> Comparing | None:
    """Returns how the workload takes part in comparisons and histories: `COMPARED` of its module `compare`, else
    `COMPARING` of what reports its results. None if neither has it. UserError if there is no such workload."""
    workload = load(name)
    if find_spec(f"{workload.package}.compare") is None:
        return getattr(section_module(name), "COMPARING", None)
    compared: Comparing = workload.module("compare").COMPARED
    return compared


def read_sources(root: Path, config: AnalysisConfig, command: str = "") -> Sources:
    """Reads everything at or below `root`; `command` is the user's command line. UserError if there is nothing."""
    return Sources(read_points(root), read_records(root), config, command)


def analyse(root: Path, config: AnalysisConfig, command: str = "") -> Analysis:
    """Reads and judges everything at or below `root`. UserError if there is nothing."""
    sources = read_sources(root, config, command)
    return Analysis(sources, sections_of(sources))


def sections_of(sources: Sources) -> list[Section]:
    """Returns the section of each workload that has points."""
    found = (section_module(name).section(sources) for name in names())
    return [section for section in found if section]


def sections_of_points(points: Sequence[Point]) -> list[Section]:
    """Returns the sections of the workloads of these points alone."""
    root = Path(os.path.commonpath([point.directory for point in points]))
    records = Records(tuners={}, searches={}, knobs={}, problems=[])
    return sections_of(Sources(Reading(root, list(points), problems=[]), records, AnalysisConfig()))


def schema(name: str) -> type[PointConfig]:
    """Returns the dataclass of the workload's configuration: `Config` in its module `config`. UserError if there is no
    such workload."""
    config: type[PointConfig] = load(name).module("config").Config
    return config
