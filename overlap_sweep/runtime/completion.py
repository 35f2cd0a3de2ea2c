"""Shell completion: Hydra's, which knows config groups and options, and the values that an option takes."""

from __future__ import annotations

import os
import re

from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from overlap_sweep import workloads
from overlap_sweep.options import NOT_GIVEN, options_of
from overlap_sweep.runtime.help import GROUPS, choices
from overlap_sweep.runtime.mistakes import flags_first

COMMANDS = re.compile(r"\s*(?:\S*/)?overlap-sweep\s+(?:launch|tune)\s")
"""What the line begins with, where it is not `python launch.py`."""


def answer(plugin: CompletionPlugin, config_name: str | None) -> None:
    """Prints what the line that the shell hands over may go on with; in the place of Hydra's plugin's `query`."""
    line = os.environ["COMP_LINE"]
    named = COMMANDS.match(line)
    arguments = line[named.end() :] if named else plugin.strip_python_or_app_name(line)
    given, word = arguments.split(), ""
    if given and not arguments.endswith(" "):
        word = given.pop()
    given = flags_first(given)
    found = _values(plugin, config_name, given, word) or plugin._query(config_name, " ".join([*given, word]))
    print(" ".join(one for one in found if not one.startswith(tuple(NOT_GIVEN))))


def _values(plugin: CompletionPlugin, config_name: str | None, given: list[str], word: str) -> list[str]:
    """Returns the word with each value that its option takes, after those that it has already."""
    key, equals, begun = word.partition("=")
    if not equals:
        return []
    *before, last = begun.rpartition(",")
    name = key.lstrip("+")
    of_group = choices(plugin.config_loader, name) if name in GROUPS else []
    values = of_group or _choices(name, _workload(plugin, config_name, given))
    return [f"{key}={''.join(before)}{value}" for value in values if value.startswith(last)]


def _choices(name: str, workload: str | None) -> tuple[str, ...]:
    """Returns the option's values in the workload, or where that has none such in whichever has."""
    for each in (*filter(None, [workload]), *workloads.names()):
        for option in options_of(workloads.schema(each)):
            if option.name == name:
                return option.choices
    return ()


def _workload(plugin: CompletionPlugin, config_name: str | None, given: list[str]) -> str | None:
    overrides = [word for word in given if "=" in word]
    try:
        return str(plugin.config_loader.load_configuration(config_name, overrides, RunMode.MULTIRUN).workload.name)
    except (HydraException, OmegaConfBaseException):
        # Not a whole command line yet.
        return None
