"""The words of a command line, in Hydra's grammar, and the options of all workloads that they may set.

Config groups of numbers take every whole number: `num_sm=37` is a choice, with or without a file in conf/num_sm/. Hydra
itself takes only texts as choices, so that a number is given to it in quotes: `num_sm='37'`. Everything of ours that
reads a command line has it as it was typed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import has_key, verbatim_options
from overlap_sweep.errors import UsageError
from overlap_sweep.options import Option, options_of, sections_of

NUMBERED = ("tp_size", "num_sm")
"""Groups that set the option of the same name."""
GROUPS = ["workload", "model", "experiment", "tp_size", "operator", "method", "num_sm", "layer", "backend", "tracker"]
GROUPS += ["hydra/launcher", "hydra/sweeper"]

_NUMBER = re.compile(r"-?\d+|null")
_CHOICE = re.compile(rf"""(?:\+\+)?(\+?(?:{"|".join(NUMBERED)}))=(['"]?)([^'"\\]*)\2""")
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_HYDRAS = re.compile(rf"(?:null|{_QUOTED}(?:,{_QUOTED})*)?", re.DOTALL)
"""Values of verbatim options that are Hydra's: null, and one or several in quotes, to be swept."""
_NOT_ESCAPED = r"(?<!\\)((?:\\\\)*)\$\{"
_ESCAPED = r"\1\\${"


Groups = Mapping[str, Mapping[str, Mapping[str, object]]]
"""Options that a config group sets, by group and choice."""

SCHEMAS: dict[str, type[PointConfig]] = {}
"""Options by workload, as `register` got them."""


def register(schemas: Mapping[str, type[PointConfig]], groups: Groups) -> None:
    """Registers the workloads' options, their config groups and further ones with Hydra."""
    SCHEMAS.update(schemas)
    store = ConfigStore.instance()
    for name, each in schemas.items():
        options: DictConfig = OmegaConf.structured(each)
        for key in each.known_keys:
            OmegaConf.set_struct(OmegaConf.select(options, key), False)
        store.store(name=f"{name}_options", node=options)
    for some in (groups, *(each.groups for each in schemas.values())):
        for group, choices in some.items():
            for name, node in choices.items():
                store.store(group=group, name=name, node=dict(node), package="_global_")


def all_options() -> Iterator[Option]:
    """Yields the options of every workload."""
    return (option for each in SCHEMAS.values() for option in options_of(each))


def option_named(name: str) -> Option | None:
    return next((option for option in all_options() if option.name == name), None)


def known_keys() -> list[str]:
    """Returns the dotted keys that workloads know in their maps."""
    maps = (item for each in SCHEMAS.values() for item in each.known_keys.items())
    return [f"{key}.{name}" for key, names in maps for name in names()]


def workloads_with(key: str) -> list[str]:
    """Returns the workloads that have the dotted key, which may be below a map such as distributed.env."""
    return [name for name, each in SCHEMAS.items() if has_key(each, key)]


def is_in_map(key: str) -> bool:
    """Returns whether the dotted key is one that users choose, directly below a map such as distributed.env."""
    return key.rpartition(".")[0] in _maps(tuple(SCHEMAS))


@cache
def _maps(_workloads: tuple[str, ...]) -> frozenset[str]:
    return frozenset(option.name for option in all_options() if option.is_map)


@cache
def workloads_with_section(section: type) -> tuple[str, ...]:
    """Returns the workloads that have the dataclass's options."""
    return tuple(name for name, each in SCHEMAS.items() if section in sections_of(each))


def parsed(words: Iterable[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Returns the overrides. `loader`: with it, choices of groups may be globs, such as `model=llama*`."""
    return [_parsed(word, loader) for word in words]


@lru_cache(maxsize=4096)
def _parsed(word: str, loader: ConfigLoader | None) -> Override:
    # The points of a sweep have most words in common, and parsing one takes a third of a millisecond.
    (override,) = OverridesParser.create(config_loader=loader).parse_overrides([word])
    return override


def texts(override: Override) -> Iterator[str]:
    """Yields each value as it is typed. UsageError for a continuous range."""
    if not override.is_sweep_override():
        yield override.get_value_element_as_str()
    elif override.is_discrete_sweep():
        yield from override.sweep_string_iterator()
    else:
        raise UsageError(f"{override.input_line}: a search needs discrete values; list them.")


def in_quotes(text: str) -> str:
    """Returns a text as Hydra takes it for one value, whatever is in it."""
    return str(QuotedString(text, Quote.double).with_quotes())


def override_value(value: object) -> str:
    """Returns the value in the spelling of Hydra's overrides."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{override_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(override_value, value))}]"
    if isinstance(value, str):
        return in_quotes(value)
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def quoted_for_hydra(words: Sequence[str]) -> list[str]:
    """Returns the command line with quotes for Hydra around values that are taken as they were typed, such as those of
    `job.command`, and around numbers that are choices of a group. What this returned once is left as it is."""
    schemas: Iterable[type] = SCHEMAS.values()
    verbatim = {name for schema in schemas for name in verbatim_options(schema)}

    def quoted(word: str) -> str:
        key, _, value = word.partition("=")
        if key.lstrip("+") not in verbatim:
            return as_choice(word)
        # OmegaConf would take ${name} for an option, unless an odd number of backslashes stands before it.
        if _HYDRAS.fullmatch(value):
            return f"{key}={re.sub(_NOT_ESCAPED, _ESCAPED, value)}"
        value = re.sub(r"(\\*)\$\{", rf"\1{_ESCAPED}", value)
        return f"{key}={in_quotes(value)}"

    return list(map(quoted, words))


def fixed_keys(overrides: Sequence[str], params: Mapping[str, object] | None) -> str:
    """Returns the comma-separated keys with the same value in all points of the sweep; for a single point, all
    overridden keys. `params`: the sweeper's own overrides."""
    typed = [*(f"{key}={value}" for key, value in (params or {}).items()), *overrides]
    last = {override.key_or_group: override for override in parsed(typed)}
    return ",".join(sorted(key for key, override in last.items() if not override.is_sweep_override()))


class NumberSource(ConfigSource):
    """Hydra's source of the whole numbers, and null, for which no folder has a file."""

    @staticmethod
    def scheme() -> str:
        return "numbers"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in NUMBERED

    def is_config(self, config_path: str) -> bool:
        group, _, choice = config_path.removesuffix(".yaml").partition("/")
        return group in NUMBERED and is_number(choice)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Returns nothing: what --help and completion offer are the files."""
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, choice = config_path.removesuffix(".yaml").partition("/")
        config = OmegaConf.create({group: _as_number(choice)})
        return ConfigResult(self.provider, self.full_path(), config, header={"package": "_global_"})


def as_choice(word: str) -> str:
    """Returns the override for Hydra: a number that a group takes in quotes. Anything else, also several numbers to be
    swept, is left as it is."""
    key = word.partition("=")[0]
    if key.lstrip("+") not in NUMBERED:
        return word
    try:
        (override,) = parsed([word])
    except HydraException:
        # Hydra says so itself.
        return word
    if override.is_sweep_override() or override.is_delete():
        return word
    # Hydra takes no ++ before a group, where it means the same.
    return f"{key.removeprefix('++')}='{choice_of(override)}'"


def as_typed(word: str) -> str:
    """Returns the override without the quotes of `as_choice`, and without ++."""
    found = _CHOICE.fullmatch(word)
    return f"{found[1]}={found[3]}" if found else word


def choice_of(override: Override) -> str:
    """Returns the name of the choice."""
    value = override.value()
    return value if isinstance(value, str) else str(override.input_line).partition("=")[2]


def is_choice(override: Override) -> bool:
    """Returns whether the override chooses a number."""
    is_set = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD) and not override.is_sweep_override()
    return override.key_or_group in NUMBERED and is_set


def is_number(choice: str) -> bool:
    """Returns whether the choice is a whole number or null."""
    return _NUMBER.fullmatch(choice) is not None


def _as_number(choice: str) -> int | None:
    return None if choice == "null" else int(choice)


@lru_cache(maxsize=64)
def sets_only_numbers(loader: ConfigLoader, group: str) -> bool:
    """Returns whether each choice of the group sets the option of the same name to that number and does nothing else,
    as all do that the user has not changed."""
    names = [str(name) for name in loader.get_group_options(group, ObjectType.CONFIG)]
    return all(is_number(name) and _sets_only(loader, group, name) for name in names)


def _sets_only(loader: ConfigLoader, group: str, choice: str) -> bool:
    path = f"{group}/{choice}"
    loaded = next(each for each in loader.get_sources() if each.is_config(path)).load_config(path)
    return loaded.header["package"] == "_global_" and loaded.config == {group: _as_number(choice)}
