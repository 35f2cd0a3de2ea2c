"""Config groups whose choices are numbers: `num_sm=37` is a choice, with or without a file in conf/num_sm/.

Hydra itself takes only texts as choices, so that a number is given to it in quotes: `num_sm='37'`. Everything of ours
that reads a command line has it as it was typed.
"""

from __future__ import annotations

import re
from functools import lru_cache

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

NUMBERED = ("tp_size", "num_sm")
"""Groups that set the option of the same name."""

_SERVED = re.compile(rf"({'|'.join(NUMBERED)})/(-?\d+|null)(?:\.yaml)?")
_CHOICE = re.compile(rf"""(?:\+\+)?(\+?(?:{"|".join(NUMBERED)}))=(['"]?)([^'"\\]*)\2""")


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
        return _SERVED.fullmatch(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Returns nothing: what --help and completion offer are the files."""
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        found = _SERVED.fullmatch(config_path)
        assert found
        config = OmegaConf.create({found[1]: None if found[2] == "null" else int(found[2])})
        return ConfigResult(self.provider, self.full_path(), config, header={"package": "_global_"})


def as_choice(word: str) -> str:
    """Returns the override for Hydra: a number that a group takes in quotes. Anything else, also several numbers to be
    swept, is left as it is."""
    key = word.partition("=")[0]
    if key.lstrip("+") not in NUMBERED:
        return word
    try:
        override = OverridesParser.create().parse_override(word)
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


@lru_cache(maxsize=1024)
def sets_only_its_number(loader: ConfigLoader, group: str, choice: str) -> bool:
    """Returns whether a choice sets the option of the same name to that number and does nothing else, as all do that no
    file changes. True if there is no such choice."""
    name = f"{group}/{choice}"
    source = next((each for each in loader.get_sources() if each.is_config(name)), None)
    if source is None:
        return True
    loaded = source.load_config(name)
    return loaded.header["package"] == "_global_" and loaded.config == {group: yaml.safe_load(choice)}
