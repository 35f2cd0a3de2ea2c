"""One-line messages about wrong command lines, in place of Hydra's and OmegaConf's, which describe their internals."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from overlap_sweep import workloads
from overlap_sweep.declared import has_key
from overlap_sweep.errors import UsageError, UserError, end, in_words, is_of_users_system, nearest
from overlap_sweep.options import Option, listed, options_of
from overlap_sweep.program import launch_program
from overlap_sweep.report.numbers import visible
from overlap_sweep.runtime.numbered import NUMBERED, as_typed
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.plugin_options import LAUNCHERS
from overlap_sweep.runtime.spellings import hint

_NO_NAME = "Config group override must be a string or a list."
"""Hydra's ValueError about a number as the choice of a config group."""
_KINDS = {"Integer": "not a whole number", "Float": "not a number", "Boolean": "neither true nor false"}
"""What is wrong with a value, by the OmegaConf type of its option."""
_GROUPS = ("+experiment", "hydra/launcher", "hydra/sweeper")
"""Groups that have no option of the same name."""


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
    parsed, unknown = parser.parse_known_args(ordered)
    if flag := next((word for word in unknown if word.startswith("-")), None):
        near = nearest(flag, flags)
        raise UsageError(f"Unknown flag {flag}. {f'Did you mean {near}?' if near else _see_help()}")
    if unknown:
        raise UsageError(_unreadable(next(word for word in (*parsed.overrides, *unknown) if "=" not in word)))
    return ordered


def _refuse_flags_of_others(arguments: Sequence[str], own: Sequence[str]) -> None:
    """Raises UsageError for the first flag that another tool has."""
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in own:
            continue
        values = (
            [value] if equals else list(takewhile(lambda one: "=" not in one and one[:1] != "-", arguments[i + 1 :]))
        )
        if instead := hint(flag, values):
            raise UsageError(f"Unknown flag {flag}. {instead}")


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message}. {_see_help()}")


def check_keys(overrides: Iterable[str]) -> None:
    """Raises UsageError for the first option that neither a workload nor Hydra has."""
    schemas = [workloads.schema(name) for name in workloads.names()]
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if "/" in key or key == "experiment":
            continue
        if override.is_hydra_override():
            # With a + Hydra would take it and ignore it.
            is_known = has_key(HydraConf, key.removeprefix("hydra."))
        else:
            is_known = any(has_key(schema, key) for schema in schemas)
        if not is_known:
            raise UsageError(unknown_option(key))


def warn_of_single_values(overrides: Iterable[str]) -> None:
    """Warns of each value in a sweep that was probably meant to be several: one in quotes with commas inside."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value()
        if (
            isinstance(value, str)
            and "," in value
            and not override.is_sweep_override()
            and _is_in_map(override.key_or_group)
        ):
            key, text = str(override.input_line).partition("=")[0], visible(value)
            print(f"warning: {key} has one value, {text}; {_quoted_each(key, value)}.", file=sys.stderr)


def _is_in_map(key: str) -> bool:
    return any(option.is_map and key.startswith(f"{option.name}.") for option in _options())


def _quoted_each(key: str, value: str) -> str:
    """Returns how the values between the commas are swept, as it is typed."""
    each = ",".join(QuotedString(one.strip(), Quote.double).with_quotes() for one in value.split(","))
    return f"to sweep over several, quote each: {shlex.quote(f'{key}={each}')}"


def unknown_option(key: str, schema: type | None = None) -> str:
    """Returns the error about a dotted key that the workload lacks: the workloads that have it, or the nearest key."""
    schemas = {name: workloads.schema(name) for name in workloads.names()}
    owners = [name for name, each in schemas.items() if has_key(each, key)]
    if owners:
        instead = hint(key)
        return f"{key} requires workload={listed(owners)}.{f' {instead}' if instead else ''}"
    if key.startswith("hydra."):
        known = [f"hydra.{option.name}" for option in options_of(HydraConf)]
        known += [f"hydra.launcher.{option.name}" for option in options_of(type(LAUNCHERS["slurm"]))]
        near = nearest(key, known)
        return f"Unknown option {key}. {f'Did you mean {near}?' if near else f'See {launch_program()} --cfg hydra.'}"
    if instead := hint(key):
        return f"Unknown option {key}. {instead}"
    own = [option.name for option in options_of(schema)] if schema else []
    everyones = [option.name for each in schemas.values() for option in options_of(each)]
    near = _nearest(key, [*own, *_GROUPS]) or _nearest(key, [*everyones, *_GROUPS])
    listing = f"See {launch_program()} workload={schema().workload.name if schema else '<name>'} --help."
    return f"Unknown option {key}. {f'Did you mean {near}?' if near else listing}"


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Returns the known option that a wrong one was probably meant to be; below a map, with the wrong one's last
    part."""
    near = nearest(key, known)
    maps = {option.name for option in _options() if option.is_map}
    below = key.split(".")[near.count(".") + 1 :] if near else []
    return f"+{near}.{'.'.join(below)}" if below and near in maps else near


def _see_help() -> str:
    return f"See {launch_program()} --help."


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
    if found := re.search(r"could not be converted to (\w+)|not a valid (bool)\b", reason):
        problem = _KINDS.get(found[1] or "Boolean")
        option = next((option for option in _options() if option.name == key), None)
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
        end(of_hydra(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        if is_of_users_system(error):
            # Hydra's files of the sweep's directory have no name in the error.
            error.filename = error.filename or outcomes.root
            sys.exit(f"error: {in_words(error)}")
        sys.exit(f"error: {error.filename} cannot be used ({error.strerror}); give another directory or file.")
    except ValueError as error:
        if not str(error).startswith(_NO_NAME):
            raise
        end(UsageError(one_line(error)))
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def of_hydra(error: Exception) -> UserError:
    """Returns Hydra's or OmegaConf's error as ours: a UsageError, unless it is about the machine or its files."""
    return (UserError if "UserError raised while resolving" in str(error) else UsageError)(one_line(error))


def one_line(error: Exception) -> str:
    """Returns Hydra's or OmegaConf's error as a one-line message."""
    text = str(error)
    if isinstance(error.__cause__, GrammarParseError):
        reason = _first_line(error.__cause__)
        return f"A value has ${{...}} that cannot be parsed ({reason}); write \\${{ if it is text."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, error.options or [])
    if found := re.search(r"Error resolving interpolation '\$\{(\w+)\}'", text):
        return f"{found[1]} cannot be deleted; leave out ~{found[1]}."
    if text.endswith("INTERVAL_SWEEP"):
        return "interval(...) requires hydra/sweeper=optuna; list the values or use range(...)."
    if found := re.search(
        r"(?:Ambiguous value for argument|Sweep parameters|not supported :) '(.+)'(?:$| req)", text, re.M
    ):
        return _several_values(found[1])
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if text.startswith(_NO_NAME):
        return f"This config group takes a name, not a number ({text})."
    if found := re.search(r"Missing mandatory value: (\S+)", f"{text} {error.__cause__}"):
        return f"{found[1]} has no value; give {found[1]}=... ."
    if found := re.search(r"(?:User|Usage)Error raised while resolving interpolation: (.*)", text):
        return found[1]
    if found := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return exists_already(found[1])
    if found := re.search(r"Could not delete from config\. '([^']+)' does not exist", text):
        return unknown_option(found[1])
    if found := re.search(r"Could not (?:override|append|delete|add|find)[^']*'([^'@]+)", text):
        key = found[1]
        # In a map with free keys, such as distributed.env, all but the last part exists.
        if "." in key and getattr(error.__cause__, "full_key", None) == key and _is_free(key):
            return to_be_added(key)
        return unknown_option(key)
    if found := re.search(r"raised while resolving interpolation: Key '(\w+)' not in", text):
        return f"workload.name does not match the configuration, which has no {found[1]}; set workload=... instead."
    if found := re.search(
        r"(?:Multiple values for )?\b(\w+)(?: appears more than once in the final defaults|\. To override a value use)",
        text,
    ):
        return exists_already(found[1])
    if found := re.search(r"In '(\w+)/(\S+)': ValidationError .*Incompatible value 'None'", text, re.DOTALL):
        return wrong_value(f"{found[1]}={found[2]}", "could not be converted to Integer")
    if found := re.search(r"In '(.+?)': Config(?:Attribute|Key)Error .*full_key: (\S+)", text, re.DOTALL):
        of_choice = found[1].startswith(f"{found[2]}/")
        return unknown_option(found[2]) if of_choice else f"{found[1]}: {unknown_option(found[2])}"
    if found := re.match(r"Error merging override (.*)", text):
        return wrong_value(found[1], _first_line(error.__cause__ or error))
    return " ".join(line.strip() for line in text.splitlines()[:2])


def _unknown_choice(file: str, choices: Sequence[str]) -> str:
    group, _, name = file.rpartition("/")
    if near := nearest(name, [each for each in choices if not each.isdigit()]):
        return f"Unknown {group} {name}. Did you mean {near}?"
    if group in NUMBERED:
        return wrong_value(f"{group}={name}", "could not be converted to Integer")
    if not choices:
        near = nearest(group, ["experiment", "hydra/launcher", "hydra/sweeper"])
        return f"Unknown group {group}. {f'Did you mean {near}?' if near else _see_help()}"
    return f"{group}={name} is not known; choose one of {', '.join(choices)}."


def _several_values(override: str) -> str:
    """Returns the error about an option with several values where it takes one."""
    key, _, values = override.partition("=")
    if key.lstrip("+").startswith("hydra."):
        return f"{override}: {key} takes one value; quote a value with commas, as in '{key}=\"a,b\"'."
    takes_list = any(option.name == key and option.values == "list" for option in _options())
    as_list = f", or give one list: {key}=[{values}]" if takes_list else ""
    command = shlex.join([*launch_program().split(), "-m", *map(as_typed, sys.argv[1:])])
    return f"{override} has several values; add -m to sweep over them{as_list}: {command}"


def _options() -> Iterator[Option]:
    return (option for name in workloads.names() for option in options_of(workloads.schema(name)))


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if equals and _is_in_map(key.lstrip("+")) and not re.search(r"""["'()\[\]]|\{[^{}]*,""", value):
        whole = shlex.quote(f"{key}={QuotedString(value, Quote.double).with_quotes()}")
        several = f" {_quoted_each(key, value)}; for one value:" if "," in value else " quote it:"
        return f"{override} cannot be parsed;{several} {whole}."
    if equals:
        return f"{override} cannot be parsed; quote values with commas, brackets or spaces, as in '{key}=\"a,b\"'."
    known = any(has_key(workloads.schema(name), key) for name in workloads.names())
    return f"{key} has no value; give {key}=... ." if known else f"{key} is not of the form option=value. {_see_help()}"


def _is_free(key: str) -> bool:
    return any(has_key(workloads.schema(name), key) for name in workloads.names())


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
