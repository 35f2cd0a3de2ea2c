"""From command lines to configurations: registration with Hydra, fast composition of points, and their names."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from overlap_sweep import backends, workloads
from overlap_sweep.declared import has_key, short_key, spellings, verbatim_options
from overlap_sweep.errors import UsageError
from overlap_sweep.options import options_of
from overlap_sweep.results.identity import HOW_TO_RUN
from overlap_sweep.results.points import fitting
from overlap_sweep.results.run_directory import last_sweep
from overlap_sweep.runtime.mistakes import exists_already, one_line, to_be_added, unknown_option, wrong_value
from overlap_sweep.runtime.numbered import as_choice, as_typed, choice_of, is_choice, sets_only_its_number
from overlap_sweep.runtime.placement import requested
from overlap_sweep.workloads import Config

_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_HYDRAS = re.compile(rf"(?:null|{_QUOTED}(?:,{_QUOTED})*)?", re.DOTALL)
"""Values of verbatim options that are Hydra's: null, and one or several in quotes, to be swept."""
_NOT_ESCAPED = r"(?<!\\)((?:\\\\)*)\$\{"
_ESCAPED = r"\1\\${"


def quoted_for_hydra(words: Sequence[str]) -> list[str]:
    """Returns the command line with quotes for Hydra around values that are taken as they were typed, such as those of
    `job.command`, and around numbers that are choices of a group. What this returned once is left as it is."""
    verbatim = {name for workload in workloads.names() for name in verbatim_options(workloads.schema(workload))}

    def quoted(word: str) -> str:
        key, _, value = word.partition("=")
        if key.lstrip("+") not in verbatim:
            return as_choice(word)
        # OmegaConf would take ${name} for an option, unless an odd number of backslashes stands before it.
        if _HYDRAS.fullmatch(value):
            return f"{key}={re.sub(_NOT_ESCAPED, _ESCAPED, value)}"
        value = re.sub(r"(\\*)\$\{", rf"\1{_ESCAPED}", value)
        return f"{key}={QuotedString(value, Quote.double).with_quotes()}"

    return list(map(quoted, words))


def register() -> None:
    """Registers the workloads' schemas and config groups with Hydra, and the resolvers that conf/ and the launchers'
    options use. Calling it again changes nothing."""
    store = ConfigStore.instance()
    for name in workloads.names():
        schema = workloads.schema(name)
        store.store(name=f"{name}_options", node=schema)
        for group, options in schema.groups.items():
            _register_group(group, options)
    _register_group("backend", {name: {"backend": name} for name in ("auto", *backends.names())})
    resolvers: dict[str, Any] = {
        "point_name": lambda *, _root_: point_name(
            _root_, list(map(as_typed, _root_.hydra.overrides.task)), _root_.hydra.callbacks.start.fixed_keys.split(",")
        ),
        "nodes_of_point": _nodes_of_point,
        "gpus_of_point": lambda *, _root_: (
            None if _root_.runtime.device == "cpu" else _of_a_node(workloads.gpus(_root_), _root_)
        ),
        "cpus_of_point": lambda *, _root_: _of_a_node(
            2 * workloads.world_size(_root_) * int(_root_.runtime.threads_per_rank), _root_
        ),
        "output_dir": lambda *, _root_: output_dir(_root_),
        "run_dir": _run_dir,
        "help_text": _help_text,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    cached: dict[str, Callable[..., Any]] = {"sweep_dir": _sweep_dir, "fixed_keys": _fixed_keys}
    for name, resolver in cached.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True, use_cache=True)


def _register_group(group: str, options: Any) -> None:
    for name, node in options.items():
        ConfigStore.instance().store(group=group, name=name, node=dict(node), package="_global_")


def _nodes_of_point(*, _root_: DictConfig) -> int:
    return requested(_root_, _root_.hydra.launcher)


def _of_a_node(total: int, root: DictConfig) -> int:
    """Returns the share of a node in what all ranks of a point need."""
    return -(-total // requested(root, root.hydra.launcher))


def output_dir(config: DictConfig) -> str | None:
    """Returns the output directory that the workload's own option sets instead of multirun/; None if it is not set."""
    option = workloads.of(config).output_option
    return OmegaConf.select(config, option) if option else None


def _run_dir(date: str, time: str, name: str, *, _root_: DictConfig) -> str:
    """Returns the directory of a single point."""
    directory = output_dir(_root_)
    if directory and not workloads.of(_root_).names_in_output:
        return directory
    return f"{directory or f'multirun/{date}/{time}'}/{name}"


def _sweep_dir(resume: str | None, date: str, time: str, given: str | None) -> str:
    """Returns the directory of a sweep: that of the sweep it resumes, else a new one."""
    if resume is None:
        return given or f"multirun/{date}/{time}"
    return str(last_sweep()) if resume == "last" else resume


def _fixed_keys(overrides: Sequence[str], params: Mapping[str, Any] | None) -> str:
    """Returns the comma-separated keys with the same value in all points of the sweep; for a single point, all
    overridden keys.

    First called with the whole sweep's overrides, and cached: Hydra passes the cache on to every point, whose own
    overrides don't show what varies."""
    typed = [*(f"{key}={value}" for key, value in (params or {}).items()), *overrides]
    last = {override.key_or_group: override for override in OverridesParser.create().parse_overrides(typed)}
    return ",".join(sorted(key for key, override in last.items() if not override.is_sweep_override()))


def _help_text(*, _root_: DictConfig) -> str:
    # Only needed for --help.
    from overlap_sweep.runtime.help import help_text

    return help_text(_root_)


def compose_point(loader: ConfigLoader, sweep: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration of one point of the sweep, equal to Hydra's `load_sweep_config`. UsageError for a wrong
    override.

    Hydra composes once for each choice of config groups, which takes 0.1 s; plain values, and choices that are numbers,
    are set in copies of that.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(map(as_typed, overrides)))
        of_others = [one for one in parsed if one.key_or_group in sweep.hydra.runtime.choices and not is_choice(one)]
        values = [override for override in parsed if override not in of_others]
        if not all(map(_is_plain, values)) or any(override.is_hydra_override() for override in of_others):
            config = loader.load_sweep_config(sweep, list(map(as_choice, overrides)))
            return as_was_typed(config, loader)
        config = _with_groups(loader, sweep, of_others)
        numbers = [override for override in values if is_choice(override)]
        if any(_changes_more(loader, config, override) for override in numbers):
            values = [override for override in values if override not in numbers]
            config = _with_groups(loader, sweep, [*of_others, *numbers])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UsageError(one_line(error)) from error
    OmegaConf.copy_cache(from_config=sweep, to_config=config)
    for override in values:
        _set(config, override)
    for override in numbers:
        config.hydra.runtime.choices[override.key_or_group] = choice_of(override)
    _record(config, parsed)
    return config


def _with_groups(loader: ConfigLoader, sweep: DictConfig, choices: Sequence[Override]) -> DictConfig:
    """Returns the configuration with these choices of config groups."""
    of_hydra: Any = OmegaConf.to_container(sweep.hydra.overrides.hydra)
    chosen = [as_choice(str(override.input_line)) for override in choices]
    composed: DictConfig = pickle.loads(_composed(loader, sweep.hydra.job.config_name, (*of_hydra, *chosen)))
    return composed


def _changes_more(loader: ConfigLoader, config: DictConfig, override: Override) -> bool:
    """Returns whether the choice of a number, instead of the one in `config`, changes more than that number."""
    group, choice = override.key_or_group, choice_of(override)
    replaced = config.hydra.runtime.choices.get(group) or choice
    return not all(sets_only_its_number(loader, group, each) for each in (choice, replaced))


def as_was_typed(config: DictConfig, loader: ConfigLoader) -> DictConfig:
    """Changes and returns what Hydra composed: numbers are recorded without quotes, and win over an experiment's."""
    parsed = OverridesParser.create().parse_overrides(list(map(as_typed, config.hydra.overrides.task)))
    for override in parsed:
        if is_choice(override) and sets_only_its_number(loader, override.key_or_group, choice_of(override)):
            _set(config, override)
    _record(config, parsed)
    return config


def _record(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Records the overrides in the configuration, as Hydra does."""
    config.hydra.overrides.task = [override.input_line for override in overrides]
    separators = config.hydra.job.config.override_dirname
    config.hydra.job.override_dirname = get_overrides_dirname(
        list(overrides), list(separators.exclude_keys), separators.item_sep, separators.kv_sep
    )


def _is_plain(override: Override) -> bool:
    """Returns whether the override only sets an existing value, or adds one to a map."""
    if override.is_hydra_override() or override.package is not None:
        return False
    is_added = override.type == OverrideType.ADD and override.key_or_group.rpartition(".")[0] in _maps()
    return override.type == OverrideType.CHANGE or is_added


@cache
def _maps() -> frozenset[str]:
    """Returns the options that take keys of the user's."""
    schemas = [workloads.schema(name) for name in workloads.names()]
    return frozenset(option.name for schema in schemas for option in options_of(schema) if option.is_map)


@lru_cache(maxsize=256)
def _composed(loader: ConfigLoader, config_name: str, overrides: tuple[str, ...]) -> bytes:
    """Returns a pickled configuration, which is several times faster to copy than by `deepcopy`."""
    return pickle.dumps(loader.load_configuration(config_name, list(overrides), RunMode.RUN))


def _set(config: DictConfig, override: Override) -> None:
    key = override.key_or_group
    is_added = override.type == OverrideType.ADD
    if is_added and OmegaConf.select(config, key) is not None:
        raise UsageError(exists_already(key))
    # None: the workload has no such map.
    adds = is_added and OmegaConf.select(config, key.rpartition(".")[0]) is not None
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=adds)
    except (ConfigAttributeError, ConfigKeyError) as error:
        schema = workloads.schema(config.workload.name)
        free = has_key(schema, key)
        raise UsageError(to_be_added(key) if free else unknown_option(key, schema)) from error
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(wrong_value(str(override.input_line), reason)) from error


_NOT_NAMED = (
    *("hydra", "experiment=", "search.", "tuner.", "max_tp_size=", "resume=", "store=", "reuse=", "report="),
    *(f"runtime.{name}=" for name in HOW_TO_RUN),
)
"""Prefixes of overrides that don't change what is measured and are not part of a name."""
_ALWAYS_NAMED = {"workload", "model", "model.name"}
_UNUSABLE = re.compile(r"[^A-Za-z0-9_.=,+-]+")
"""What names of run directories don't have."""


def point_name(config: Config, overrides: Sequence[str], fixed: Collection[str] = ()) -> str:
    """Returns the name of a point's run directory: short, stable, and different for every point of a sweep.

    The name has the workload's words, the other command-line `overrides` that vary over the sweep, and a digest of
    those with `fixed` keys, and of those with characters that no name can have.
    """
    workload, config = workloads.of(config), workloads.with_ranks(config)
    schema, named = workloads.schema(workload.name), _ALWAYS_NAMED | {*workload.named}
    varying, rest, also = [], [], spellings(schema)
    for override in (override.lstrip("+~") for override in overrides):
        key, equals, value = override.partition("=")
        if key in named or override.startswith(_NOT_NAMED):
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
