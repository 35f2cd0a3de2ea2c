"""Shell completion: Hydra's, for config groups and options, extended by the values of options."""

from __future__ import annotations

import os
import re
import shlex

from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from overlap_sweep import workloads
from overlap_sweep.options import NOT_GIVEN, options_of
from overlap_sweep.runtime.composition import quoted_for_hydra
from overlap_sweep.runtime.help import GROUPS, choices
from overlap_sweep.runtime.mistakes import flags_first

COMMANDS = re.compile(r"\s*(?:\S*/)?overlap-sweep\s+(?:launch|tune)\s")
"""Start of a command line that is not `python launch.py`."""


def answer(plugin: CompletionPlugin, config_name: str | None) -> None:
    """Prints the completions of the shell's command line; replaces `query` of Hydra's plugin."""
    line = os.environ["COMP_LINE"]
    named = COMMANDS.match(line)
    arguments = line[named.end() :] if named else plugin.strip_python_or_app_name(line)
    try:
        words, word = shlex.split(arguments), ""
    except ValueError:
        # Inside of quotes.
        return
    if words and not arguments.endswith(" "):
        word = words.pop()
    words = flags_first(quoted_for_hydra(words))
    # Hydra splits the line again.
    line = " ".join([*(each for each in words if " " not in each), word])
    found = _values(plugin, config_name, words, word) or plugin._query(config_name, line)
    print(" ".join(one for one in found if not one.startswith(tuple(NOT_GIVEN))))


def _values(plugin: CompletionPlugin, config_name: str | None, words: list[str], word: str) -> list[str]:
    """Returns the word completed by each value of its option, after the values that it lists already."""
    key, equals, begun = word.partition("=")
    if not equals:
        return []
    *before, last = begun.rpartition(",")
    name = key.lstrip("+")
    group_choices = choices(plugin.config_loader, name) if name in GROUPS else []
    values = group_choices or _choices(name, _workload(plugin, config_name, words))
    return [f"{key}={''.join(before)}{value}" for value in values if value.startswith(last)]


def _choices(name: str, workload: str | None) -> tuple[str, ...]:
    """Returns the option's values in the workload, or in the first workload that has the option."""
    for each in (*filter(None, [workload]), *workloads.names()):
        for option in options_of(workloads.schema(each)):
            if option.name == name:
                return option.choices
    return ()


def _workload(plugin: CompletionPlugin, config_name: str | None, words: list[str]) -> str | None:
    overrides = [word for word in words if "=" in word]
    try:
        return str(plugin.config_loader.load_configuration(config_name, overrides, RunMode.MULTIRUN).workload.name)
    except (HydraException, OmegaConfBaseException):
        # The command line is not complete yet.
        return None
