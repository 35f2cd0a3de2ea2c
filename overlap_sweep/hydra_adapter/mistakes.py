"""One-line messages about wrong command lines, in place of Hydra's and OmegaConf's, which describe their internals."""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from overlap_sweep.config import NO_PART_OF_A_POINT
from overlap_sweep.declared import has_key
from overlap_sweep.errors import UsageError, UserError, end, nearest
from overlap_sweep.hydra_adapter.overrides import (
    GROUPS,
    NUMBERED,
    SCHEMAS,
    all_options,
    as_typed,
    in_quotes,
    is_in_map,
    known_keys,
    option_named,
    parsed,
    quoted_for_hydra,
    workloads_with,
)
from overlap_sweep.hydra_adapter.plugins import LAUNCHERS
from overlap_sweep.options import listed, options_of
from overlap_sweep.program import launch_program

_NO_NAME = "Config group override must be a string or a list."
"""Hydra's ValueError about a number as the choice of a config group."""
_ONE_FLAG = "Only one of --run"
"""Its ValueError about flags that exclude each other."""
_KINDS = {"Integer": "not a whole number", "Float": "not a number", "Boolean": "neither true nor false"}
"""What is wrong with a value, by the OmegaConf type of its option."""
_GROUPS = ("+experiment", "hydra/launcher", "hydra/sweeper")
"""Groups that have no option of the same name."""


def checked(arguments: Sequence[str]) -> list[str]:
    """Returns the command line as Hydra takes it. UsageError for a flag or an option that there is not."""
    ordered = flags_first(quoted_for_hydra(arguments))
    known = get_args_parser().parse_args(ordered)
    # With -sc the overrides are those of shell completion, such as query=bash.
    if not known.shell_completion:
        check_keys(known.overrides)
    return ordered


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Returns the command line with its overrides last, since Hydra's parser does not take `tp_size=4 -m num_sm=1,2`.
    UsageError for an unknown flag."""
    ordered = sorted(arguments, key=lambda word: word.startswith("~") or ("=" in word and not word.startswith("-")))
    parser = get_args_parser()
    # argparse would print eight lines of usage.
    parser.error = _refuse  # type: ignore[method-assign]
    flags = [name for action in parser._actions for name in action.option_strings]
    # First, since argparse takes --config for the start of one of Hydra's flags.
    _refuse_flags_of_others(arguments, flags)
    known, unknown = parser.parse_known_args(ordered)
    if flag := next((word for word in unknown if word.startswith("-")), None):
        near = nearest(flag, flags)
        raise UsageError(f"Unknown flag {flag}. {f'Did you mean {near}?' if near else _see_help()}")
    if unknown:
        raise UsageError(_unreadable(next(word for word in (*known.overrides, *unknown) if "=" not in word)))
    return ordered


def _refuse_flags_of_others(arguments: Sequence[str], own: Sequence[str]) -> None:
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in own:
            following = takewhile(lambda one: "=" not in one and one[:1] != "-", arguments[i + 1 :])
            if instead := _instead_of(flag, [value] if equals else list(following)):
                raise UsageError(f"Unknown flag {flag}. {instead}")


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message}. {_see_help()}")


def _see_help() -> str:
    return f"See {launch_program()} --help."


@cache
def spellings() -> dict[str, dict[str, str]]:
    """Returns for each other tool what its flags and keys are here."""
    found: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("spellings.yaml").read_text())
    return found


def _instead_of(name: str, values: Sequence[str] = ()) -> str | None:
    """Returns a sentence on what to type instead of another tool's flag or key; None if no tool has it. Of a dotted key
    the last part is looked up."""
    wanted = _without_dashes(name).rpartition(".")[2]
    same = [(theirs, ours) for tool_spellings in spellings().values() for theirs, ours in tool_spellings.items()]
    found = dict.fromkeys(ours for theirs, ours in same if _without_dashes(theirs) == wanted and ours != f"{name}=")
    if "" in found:
        return f"Leave out {name}: options are given as option=value."
    value = ",".join(values) or "..."
    typed = [f"{ours}{value}" if ours.endswith("=") else ours for ours in found]
    return f"Did you mean {listed(typed)}?" if typed else None


def _without_dashes(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def check_keys(overrides: Iterable[str]) -> None:
    """Raises UsageError for the first option that neither a workload nor Hydra has, for a group that is deleted, and
    for values of a sweep that would be lost without a word."""
    swept: dict[str, str] = {}
    for override in parsed(overrides):
        key = override.key_or_group
        if override.is_sweep_override():
            if key in NO_PART_OF_A_POINT:
                raise UsageError(_of_whole_sweep(key, as_typed(override.input_line or "")))
            swept.setdefault(key, as_typed(override.input_line or ""))
        if key in swept and (typed := as_typed(override.input_line or "")) != swept[key]:
            # All its points would be those of the last one.
            raise UsageError(f"{typed} replaces all values of {swept[key]}; give {key} once.")
        if "/" in key or key == "experiment":
            continue
        # With a + Hydra would take an unknown option of its own and ignore it.
        is_hydras = override.is_hydra_override()
        if not (has_key(HydraConf, key.removeprefix("hydra.")) if is_hydras else workloads_with(key)):
            raise UsageError(unknown_option(key))
        if key in ("hydra.sweep.dir", "hydra.run.dir") and override.value() == "":
            # Results would lie among the files of the current folder, and all below it would be analysed.
            raise UsageError(f"{key} is empty; give a directory.")
        if override.is_delete() and key in GROUPS:
            # Without the group Hydra would take the option's default, which is not what was typed.
            raise UsageError(_not_deletable(key))


def _of_whole_sweep(key: str, typed: str) -> str:
    # Of text, which a folder's name may be, a comma can be part.
    quoted = f", or quote one with commas, as in '{key}=\"a,b\"'" if key in ("store", "resume") else ""
    return f"{typed}: {key} is of the whole sweep, not of its points; give one value{quoted}."


def _not_deletable(group: str) -> str:
    return f"{group} cannot be deleted; leave out ~{group}."


def unknown_key(key: str, workload: str) -> str:
    """Returns the error about a dotted key that the workload's configuration lacks, or lacks until it is added."""
    return to_be_added(key) if has_key(SCHEMAS[workload], key) else unknown_option(key, workload)


def unknown_option(key: str, workload: str | None = None) -> str:
    """Returns the error about a dotted key that the workload lacks: the workloads that have it, or the nearest key."""
    instead, owners = _instead_of(key), workloads_with(key)
    if owners:
        return f"{key} requires workload={listed(owners)}.{f' {instead}' if instead else ''}"
    if key.startswith("hydra."):
        known = [f"hydra.{option.name}" for option in options_of(HydraConf)]
        launcher_options = (option.name for launcher in LAUNCHERS.values() for option in options_of(launcher.__class__))
        known += [f"hydra.launcher.{name}" for name in dict.fromkeys(launcher_options)]
        near, listing = nearest(key, known), f"See {launch_program()} --cfg hydra."
    elif instead:
        return f"Unknown option {key}. {instead}"
    else:
        own = [option.name for option in options_of(SCHEMAS[workload])] if workload else []
        everyones, inner = [option.name for option in all_options()], known_keys()
        near = _ending_alike(key, inner) or _nearest(key, [*own, *_GROUPS])
        near = near or _nearest(key, [*everyones, *_GROUPS, *inner])
        listing = f"See {launch_program()} workload={workload or '<name>'} --help."
    return f"Unknown option {key}. {f'Did you mean {near}?' if near else listing}"


def _ending_alike(key: str, known: Iterable[str]) -> str | None:
    """Returns the known key whose last two parts, or more, a wrong one has, too."""
    last = ".".join(key.split(".")[-2:])
    return next((one for one in known if one.endswith(f".{last}")), None) if "." in last else None


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Returns the known option that a wrong one was probably meant to be; below a map, with the wrong one's last
    part."""
    near = nearest(key, known)
    below = key.split(".")[near.count(".") + 1 :] if near else []
    return f"+{near}.{'.'.join(below)}" if below and is_in_map(f"{near}.") else near


def to_be_added(key: str) -> str:
    """Returns the error about a new key in a map, such as distributed.env."""
    parent, _, name = key.rpartition(".")
    return f"{parent} has no {name}; add it with +{key}=... ."


def exists_already(key: str) -> str:
    """Returns the error about a + in front of an option that has a value."""
    return f"{key} exists already; give {key}=... without the +."


def wrong_value(override: str, reason: str) -> str:
    """Returns the error about a value of the wrong type, from OmegaConf's `reason`."""
    key, _, value = override.lstrip("+").partition("=")
    if (option := option_named(key)) and option.is_map:
        return f"{key}={value} is not a map; give +{key}.<name>=... ."
    if found := re.search(r"could not be converted to (\w+)|not a valid (bool)\b", reason):
        problem = _KINDS.get(found[1] or "Boolean")
        if problem and option:
            allowed = listed(option.choices) if option.choices else f"a value from {option.values}"
            return f"{key}={value} is {problem}; give {allowed}."
    return f"{override}: {reason}."


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exits with a one-line message if Hydra refuses a configuration, unless HYDRA_FULL_ERROR is set."""
    if os.environ.get("HYDRA_FULL_ERROR"):
        yield
        return
    # Makes Hydra raise instead of printing its own lines and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except UserError as error:
        end(error)
    except (HydraException, OmegaConfBaseException) as error:
        end(as_user_error(error))
    except ValueError as error:
        if not str(error).startswith((_NO_NAME, _ONE_FLAG)):
            raise
        end(as_user_error(error))
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def as_user_error(error: Exception) -> UserError:
    """Returns Hydra's or OmegaConf's error as ours: a UsageError, unless it is about the machine or its files."""
    return (UserError if "UserError raised while resolving" in str(error) else UsageError)(one_line(error))


def one_line(error: Exception) -> str:
    """Returns Hydra's or OmegaConf's error as a one-line message."""
    text = str(error)
    if isinstance(error.__cause__, GrammarParseError):
        reason = str(error.__cause__).partition("\n")[0]
        return f"A value has ${{...}} that cannot be parsed ({reason}); write \\${{ if it is text."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, error.options or [])
    if found := re.search(r"Error resolving interpolation '\$\{(\w+)\}'", text):
        return _not_deletable(found[1])
    if text.endswith("INTERVAL_SWEEP"):
        return "interval(...) requires hydra/sweeper=optuna; list the values or use range(...)."
    if found := re.search(
        r"(?:Ambiguous value for argument|Sweep parameters|not supported :) '(.+)'(?:$| req)", text, re.M
    ):
        return _several_values(found[1])
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if text.startswith(_ONE_FLAG):
        return f"{text[: -len('can be specified')]}can be given."
    if text.startswith(_NO_NAME):
        return f"This config group takes a name, not a number ({text})."
    if found := re.search(r"Missing mandatory value: (\S+)", f"{text} {error.__cause__}"):
        return f"{found[1]} has no value; give {found[1]}=... ."
    if found := re.search(r"(?:User|Usage)Error raised while resolving interpolation: (.*)", text):
        return found[1]
    if found := re.search(
        r"Could not append to config\. An item is already at '([^']+)'"
        r"|\b(\w+)(?: appears more than once in the final defaults|\. To override a value use)",
        text,
    ):
        return exists_already(found[1] or found[2])
    if found := re.search(r"Could not (?:override|append|delete|add|find)[^']*'([^'@]+)", text):
        key = found[1]
        # In a map with free keys, such as distributed.env, all but the last part exists.
        is_free = "." in key and getattr(error.__cause__, "full_key", None) == key and workloads_with(key)
        return to_be_added(key) if is_free else unknown_option(key)
    if found := re.search(r"raised while resolving interpolation: Key '(\w+)' not in", text):
        return f"workload.name does not match the configuration, which has no {found[1]}; set workload=... instead."
    if found := re.search(r"In '(\w+)/(\S+)': ValidationError .*Incompatible value 'None'", text, re.DOTALL):
        return wrong_value(f"{found[1]}={found[2]}", "could not be converted to Integer")
    if found := re.search(r"In '(.+?)': Config(?:Attribute|Key)Error .*full_key: (\S+)", text, re.DOTALL):
        is_choice = found[1].startswith(f"{found[2]}/")
        return unknown_option(found[2]) if is_choice else f"{found[1]}: {unknown_option(found[2])}"
    if found := re.match(r"Error merging override (.*)", text):
        return wrong_value(found[1], str(error.__cause__ or error).partition("\n")[0])
    return " ".join(line.strip() for line in text.splitlines()[:2])


def _unknown_choice(file: str, choices: Sequence[str]) -> str:
    group, _, name = file.rpartition("/")
    if near := nearest(name, [each for each in choices if not each.isdigit()]):
        return f"Unknown {group} {name}. Did you mean {near}?"
    if group in NUMBERED:
        return wrong_value(f"{group}={name}", "could not be converted to Integer")
    if not choices:
        near = nearest(group, [each.lstrip("+") for each in _GROUPS])
        return f"Unknown group {group}. {f'Did you mean {near}?' if near else _see_help()}"
    return f"{group}={name} is not known; choose one of {', '.join(choices)}."


def _several_values(override: str) -> str:
    key, _, values = override.partition("=")
    if key.lstrip("+").startswith("hydra."):
        return f"{override}: {key} takes one value; quote a value with commas, as in '{key}=\"a,b\"'."
    option = option_named(key)
    takes_list = option is not None and option.values == "list"
    as_list = f", or give one list: {key}=[{values}]" if takes_list else ""
    command = shlex.join([*launch_program().split(), "-m", *map(as_typed, sys.argv[1:])])
    return f"{override} has several values; add -m to sweep over them{as_list}: {command}"


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if equals and is_in_map(key.lstrip("+")) and not re.search(r"""["'()\[\]]|\{[^{}]*,""", value):
        whole = shlex.quote(f"{key}={in_quotes(value)}")
        each = shlex.quote(f"{key}={','.join(in_quotes(one.strip()) for one in value.split(','))}")
        several = f" to sweep over several, quote each: {each}; for one value:" if "," in value else " quote it:"
        return f"{override} cannot be parsed;{several} {whole}."
    if equals:
        return f"{override} cannot be parsed; quote values with commas, brackets or spaces, as in '{key}=\"a,b\"'."
    if workloads_with(key):
        return f"{key} has no value; give {key}=... ."
    return f"{key} is not of the form option=value. {_see_help()}"
