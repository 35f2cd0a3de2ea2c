"""From overrides to the configurations of points, as Hydra composes them, only faster."""

import pickle
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from overlap_sweep.errors import UsageError
from overlap_sweep.hydra_adapter.mistakes import exists_already, one_line, unknown_key, wrong_value
from overlap_sweep.hydra_adapter.overrides import (
    as_choice,
    as_typed,
    choice_of,
    is_choice,
    is_in_map,
    is_number,
    parsed,
    sets_only_numbers,
)


def compose_point(loader: ConfigLoader, sweep: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration of one point of the sweep, equal to Hydra's `load_sweep_config`. UsageError for a wrong
    override.

    Hydra composes once for each choice of config groups, which takes 0.1 s; plain values, and choices that are numbers,
    are set in copies of that.
    """

    def needs_hydra(override: Override) -> bool:
        group = override.key_or_group
        return group in sweep.hydra.runtime.choices and not (is_choice(override) and sets_only_numbers(loader, group))

    try:
        all_overrides = parsed(map(as_typed, overrides))
        by_hydra = [override for override in all_overrides if needs_hydra(override)]
        values = [override for override in all_overrides if override not in by_hydra]
        if not all(map(_is_plain, values)) or any(override.is_hydra_override() for override in by_hydra):
            return as_was_typed(loader.load_sweep_config(sweep, list(map(as_choice, overrides))))
        sweep_overrides: Any = OmegaConf.to_container(sweep.hydra.overrides.hydra)
        chosen = [as_choice(str(override.input_line)) for override in by_hydra]
        config: DictConfig = pickle.loads(_composed(loader, sweep.hydra.job.config_name, (*sweep_overrides, *chosen)))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UsageError(one_line(error)) from error
    OmegaConf.copy_cache(from_config=sweep, to_config=config)
    for override in values:
        _set(config, override)
        if is_choice(override):
            config.hydra.runtime.choices[override.key_or_group] = choice_of(override)
    config.hydra.overrides.hydra += [override.input_line for override in all_overrides if _names_folder(override)]
    _record(config, [override for override in all_overrides if not _names_folder(override)])
    return config


@lru_cache(maxsize=256)
def _composed(loader: ConfigLoader, config_name: str, overrides: tuple[str, ...]) -> bytes:
    """Returns a pickled configuration, which is several times faster to copy than by `deepcopy`."""
    return pickle.dumps(loader.load_configuration(config_name, list(overrides), RunMode.RUN))


@cache
def read_files_once() -> None:
    """Has Hydra, whose plugins are loaded, parse each configuration file once in this process: for a sweep it composes
    three times."""
    # Hydra imports its plugins anew, so that this is another class than the one that one would import.
    source: Any = SourcesRegistry.instance().resolve("file")
    load = source.load_config

    @lru_cache(maxsize=1024)
    def pickled(provider: str, folder: str, name: str, changed_ns: int) -> bytes:
        return pickle.dumps(load(source(provider, folder), name))

    def load_config(self: Any, config_path: str) -> Any:
        file = Path(self.path, self._normalize_file_name(config_path))
        return pickle.loads(pickled(self.provider, self.path, config_path, file.stat().st_mtime_ns))

    source.load_config = load_config


def run_as_typed(arguments: Sequence[str]) -> None:
    """Spares a sweep a composition: where -m says that there are many points, Hydra need not ask the configuration."""
    if {"-m", "--multirun"} & {*arguments}:
        Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]


def as_was_typed(config: DictConfig) -> DictConfig:
    """Changes and returns what Hydra composed: numbers are recorded without quotes, and win over an experiment's."""
    overrides = parsed(map(as_typed, config.hydra.overrides.task))
    for override in overrides:
        if is_choice(override) and is_number(choice_of(override)):
            _set(config, override)
    _record(config, overrides)
    return config


def _record(config: DictConfig, overrides: Sequence[Override]) -> None:
    config.hydra.overrides.task = [override.input_line for override in overrides]
    separators = config.hydra.job.config.override_dirname
    config.hydra.job.override_dirname = get_overrides_dirname(
        list(overrides), list(separators.exclude_keys), separators.item_sep, separators.kv_sep
    )


def _is_plain(override: Override) -> bool:
    """Returns whether the override only sets an existing value, or adds one to a map."""
    if _names_folder(override):
        return True
    if override.is_hydra_override() or override.package is not None:
        return False
    is_added = override.type == OverrideType.ADD and is_in_map(override.key_or_group)
    return override.type == OverrideType.CHANGE or is_added


def _names_folder(override: Override) -> bool:
    """Returns whether it is the only option of Hydra's own that a search gives single points."""
    return override.key_or_group == "hydra.sweep.subdir" and override.type == OverrideType.CHANGE


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
        raise UsageError(unknown_key(key, config.workload.name)) from error
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(wrong_value(str(override.input_line), reason)) from error


def plain(config: DictConfig) -> dict[str, Any]:
    """Returns the configuration without Hydra's part. UserError if a value is missing."""
    missing = sorted(key for key in _missing(config) if not key.startswith("model_preset."))
    if missing:
        raise UsageError(f"{missing[0]} has no value; give {missing[0]}=... .")
    nodes = {str(key): config[key] for key in config if key != "hydra"}
    is_config = OmegaConf.is_config
    return {key: OmegaConf.to_container(node, resolve=True) if is_config(node) else node for key, node in nodes.items()}


def _missing(node: DictConfig, where: str = "") -> Iterator[str]:
    # OmegaConf's own missing_keys would resolve Hydra's part.
    for key in map(str, node):
        if OmegaConf.is_missing(node, key):
            yield f"{where}{key}"
        elif key != "hydra" and isinstance(below := node._get_node(key), DictConfig):
            yield from _missing(below, f"{where}{key}.")
