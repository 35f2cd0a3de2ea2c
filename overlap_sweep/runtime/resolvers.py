"""What Hydra asks while it composes a point: names and directories, and what a cluster's job requests for it."""

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache

from omegaconf import DictConfig, OmegaConf

from overlap_sweep import backends, trackers, workloads
from overlap_sweep.config import NO_PART_OF_A_POINT, PointConfig
from overlap_sweep.declared import decode, short_key, spelled, spellings
from overlap_sweep.hydra_adapter.composition import plain
from overlap_sweep.hydra_adapter.overrides import as_typed, fixed_keys
from overlap_sweep.hydra_adapter.overrides import register as register_options
from overlap_sweep.results.identity import HOW_TO_RUN
from overlap_sweep.results.points import fitting
from overlap_sweep.results.run_directory import last_sweep
from overlap_sweep.runtime.nodes import requested


@cache
def register() -> None:
    """Registers the workloads' schemas and config groups with Hydra, and the resolvers that conf/ and the launchers'
    options use. Calling it again changes nothing."""
    own_backends = {name: {"backend": name} for name in ("auto", *backends.names())}
    own_trackers = {name: {"tracker": name} for name in (trackers.NONE, *trackers.names())}
    groups = {"backend": own_backends, "tracker": own_trackers}
    register_options({name: workloads.schema(name) for name in workloads.names()}, groups)
    resolvers: dict[str, Callable[..., object]] = {
        "point_name": lambda *, _root_: point_name(
            _root_, list(map(as_typed, _root_.hydra.overrides.task)), _root_.hydra.callbacks.start.fixed_keys.split(",")
        ),
        "nodes_of_point": lambda *, _root_: requested(_composed(_root_), _root_.hydra.launcher),
        "gpus_of_point": lambda *, _root_: (
            None if _root_.runtime.device == "cpu" else _of_a_node(workloads.gpus(_composed(_root_)), _root_)
        ),
        "cpus_of_point": lambda *, _root_: _of_a_node(
            2 * _composed(_root_).world_size * _root_.runtime.threads_per_rank, _root_
        ),
        "output_dir": lambda *, _root_: output_dir(_root_),
        "run_dir": _run_dir,
        "help_text": _help_text,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    # Called first with the whole sweep's configuration, whose cache Hydra passes on to every point: a point's own
    # overrides don't show what varies.
    cached: dict[str, Callable[..., object]] = {"sweep_dir": _sweep_dir, "fixed_keys": fixed_keys}
    for name, resolver in cached.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True, use_cache=True)


def _composed(root: DictConfig) -> PointConfig:
    schema = workloads.schema(root.workload.name)
    return workloads.with_ranks(decode(spelled(plain(root), schema), schema))


def _of_a_node(total: int, root: DictConfig) -> int:
    """Returns the share of a node in what all ranks of a point need."""
    return -(-total // requested(_composed(root), root.hydra.launcher))


def output_dir(config: DictConfig) -> str | None:
    """Returns the output directory that the workload's own option sets instead of multirun/; None if it is not set."""
    option = workloads.load(config.workload.name).output_option
    return OmegaConf.select(config, option) if option else None


def _run_dir(date: str, time: str, name: str, *, _root_: DictConfig) -> str:
    """Returns the directory of a single point."""
    directory = output_dir(_root_)
    if directory and not workloads.load(_root_.workload.name).names_in_output:
        return directory
    return f"{directory or f'multirun/{date}/{time}'}/{name}"


def _sweep_dir(resume: str | None, date: str, time: str, given: str | None) -> str:
    """Returns the directory of a sweep: that of the sweep it resumes, else a new one."""
    if resume is None:
        return given or f"multirun/{date}/{time}"
    return str(last_sweep()) if resume == "last" else resume


def _help_text(*, _root_: DictConfig) -> str:
    # Only needed for --help.
    from overlap_sweep.hydra_adapter.help import help_text

    return help_text(_root_)


_NOT_NAMED = {"hydra", "experiment", *NO_PART_OF_A_POINT, *(f"runtime.{name}" for name in HOW_TO_RUN)}
"""Options that don't change what is measured, and groups of them, which are not part of a name."""
_ALWAYS_NAMED = {"workload", "model", "model.name"}
_UNUSABLE = re.compile(r"[^A-Za-z0-9_.=,+-]+")
"""What names of run directories don't have."""


def point_name(config: DictConfig | PointConfig, overrides: Sequence[str], fixed: Collection[str] = ()) -> str:
    """Returns the name of a point's run directory: short, stable, and different for every point of a sweep.

    The name has the workload's words, the other command-line `overrides` that vary over the sweep, and a digest of
    those with `fixed` keys, and of those with characters that no name can have.
    """
    workload, config = workloads.load(config.workload.name), workloads.with_ranks(config)
    schema: type = workloads.schema(workload.name)
    named = _ALWAYS_NAMED | {*workload.named}
    varying, rest, also = [], [], spellings(schema)
    for override in (override.lstrip("+~") for override in overrides):
        key, equals, value = override.partition("=")
        if key in named or {key, re.split("[./]", key)[0]} & _NOT_NAMED:
            continue
        # A sweeper's params have Python's spelling.
        value = value.lower() if value in ("True", "False") else also.get(key, {}).get(value, value)
        if key not in fixed:
            varying.append(f"{short_key(key, schema)}{equals}{value}")
        if key in fixed or _UNUSABLE.search(varying[-1]):
            rest.append(f"{key}{equals}{value}")
    digest = [hashlib.sha256("\n".join(sorted(rest)).encode()).hexdigest()[:6]] if rest else []
    words = "_".join([*workload.words(config, overrides), *varying, *digest])
    return fitting(_UNUSABLE.sub("-", words).removesuffix(".json"))
