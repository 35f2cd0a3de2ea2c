"""Options of programs, which are recognised from the words of a command, given in the way that each program takes them.

Pure functions of a command's words and of the texts of the files that these name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import yaml

from overlap_sweep.program import ATTACH

if TYPE_CHECKING:
    from overlap_sweep.levers import Lever, Value

OVERLAP_OPTION = "--tp-comm-overlap"
"""Megatron-LM's, whose lever takes none, default or a tp_comm_overlap_cfg file."""

_OPTION = re.compile(r"--?[A-Za-z]")
_NOTHING = re.compile("(?!)")
_SCRIPTS = (".py", ".sh")
_ACCELERATE = "accelerate.commands.launch"
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", _ACCELERATE, ATTACH)
"""Modules that run a script."""
_CONFIG_OPTION = "--config-file"
_JSON_OPTIONS = ("--deepspeed-config", "--deepspeed-config-file", "--ds-config", "--deepspeed")


@dataclass(frozen=True)
class Program:
    """A program that takes options."""

    title: str
    wanted: str
    """By what it is recognised in a command."""
    boolean: Literal["flag", "negated", "word"] = "word"
    """How it takes booleans: by an option that is there or not, by `--x.no-y` for false, or as true or false."""
    script: re.Pattern[str] = _NOTHING
    """Matches the word that is its script or module."""
    source: re.Pattern[str] = _NOTHING
    """Is found in the text of its scripts, where that is known."""
    any_script: bool = False
    """Whether scripts with other names are recognised by their text."""


PROGRAMS = {
    "megatron": Program(
        "Megatron-LM", "pretrain_*.py", "flag", re.compile(r"(.*/)?pretrain_\w+\.py"), re.compile("megatron")
    ),
    "torchtitan": Program(
        "torchtitan",
        "-m torchtitan.train or run_train.sh",
        "negated",
        re.compile(r"torchtitan\.train|(.*/)?torchtitan/train\.py|(.*/)?run_train\.sh"),
        re.compile("torchtitan"),
    ),
    "accelerate": Program("accelerate", "accelerate launch"),
    "deepspeed": Program("DeepSpeed's configuration", "a file in JSON after --deepspeed_config or --deepspeed"),
    "transformers": Program(
        "Hugging Face's TrainingArguments",
        "a script with HfArgumentParser or TrlParser, or trl",
        script=re.compile(r"(.*/)?trl|trl\.\S+"),
        source=re.compile(r"\b(HfArgumentParser|TrlParser)\b"),
        any_script=True,
    ),
}


@dataclass(frozen=True)
class Command:
    """A command line."""

    words: Sequence[str]
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files of `files_of` that can be read, by name."""


@dataclass(frozen=True)
class Change:
    """What a lever changes in a command."""

    lever: Lever
    value: Value
    words: tuple[str, ...]
    """Words to add; none for DeepSpeed."""
    replaced: tuple[str, ...]
    """Plain names of the options that it replaces."""

    @property
    def program(self) -> str:
        return self.lever.program

    @property
    def settings(self) -> dict[str, str]:
        """Returns the values of the options by their plain names."""
        if self.program == "deepspeed":
            return {plain(self.lever.argument): text(self.value)}
        return _settings(self.words)


def change(lever: Lever, value: Value) -> Change:
    """Returns what the lever changes in a command of its program."""
    option, boolean = lever.argument, PROGRAMS[lever.program].boolean
    words: tuple[str, ...] = (option, text(value))
    others: tuple[str, ...] = ()
    if lever.program == "deepspeed":
        words = ()
    elif option == OVERLAP_OPTION:
        others = (f"{option}-cfg",)
        words = {"none": (), "default": (option,)}.get(str(value), (option, *others, str(value)))
    elif isinstance(value, bool) and boolean != "word":
        others = (re.sub(r"(.*\.)", r"\1no-", option),) if boolean == "negated" else ()
        words = (option,) if value else others
    return Change(lever, value, words, tuple(map(plain, (option, *others))))


def written(lever: Lever, value: Value) -> str:
    """Returns what the user writes into the command, or into DeepSpeed's JSON file."""
    made = change(lever, value)
    if lever.program == "deepspeed":
        return json_to_write([made])
    return " ".join(made.words) or f"no {lever.argument}"


def json_to_write(changes: Iterable[Change]) -> str:
    """Returns what the user writes into DeepSpeed's JSON file, in one line."""
    return json.dumps(json.loads(changed_json("{}", changes)))


def script_of(words: Sequence[str]) -> str:
    """Returns the first word of a command that looks like a script or follows `-m`; empty if none does."""
    modules = (after for word, after in pairwise(words) if word in ("-m", "--module"))
    names = {module for module in modules if not module.startswith("-")} - {*_LAUNCHERS}
    return next((word for word in words if word in names or word.endswith(_SCRIPTS)), "")


def files_of(words: Sequence[str]) -> list[str]:
    """Returns the files whose texts say which programs a command starts, and which options they have."""
    config = _settings(words[_place("accelerate", words)]).get(_CONFIG_OPTION, "")
    return [name for name in (script_of(words), config, json_file(words)) if name]


def json_file(words: Sequence[str]) -> str:
    """Returns the name of DeepSpeed's JSON file; empty if the command names none."""
    names = map(_settings(words).get, _JSON_OPTIONS)
    return next((name for name in names if name and name.endswith(".json")), "")


def is_recognised(name: str, command: Command) -> bool:
    """Returns whether the command starts the program."""
    if name == "accelerate":
        return _launch(command.words) > 0
    if name == "deepspeed":
        return _json(command) is not None
    program, script = PROGRAMS[name], script_of(command.words) or command.words[0]
    text = command.texts.get(script)
    if program.script.fullmatch(script):
        return text is None or bool(program.source.search(text))
    return program.any_script and bool(program.source.search(text or ""))


def refusal(changes: Mapping[str, Change], command: Command, *, override: bool) -> str:
    """Returns which change cannot be made, and why; empty if all can. `changes`: by names for people. `override`: what
    the command gives itself is replaced."""
    options: dict[str, dict[str, str]] = {}
    for name, one in changes.items():
        program = PROGRAMS[one.program]
        if not is_recognised(one.program, command):
            return f"{name} cannot be applied: {program.title} is not found in the command ({program.wanted})"
        found = options.setdefault(one.program, options_of(one.program, command))
        own = {option: found[option] for option in one.replaced if option in found}
        if not override and any(_value(text) != _value(one.settings.get(option)) for option, text in own.items()):
            return (
                f"{name} cannot be applied: the command gives {one.lever.argument} itself ({', '.join(own.values())}); "
                "add job.levers_override=true to replace it"
            )
        options[one.program] = {option: text for option, text in found.items() if option not in own} | one.settings
    for name, one in changes.items():
        # What turns something off needs nothing.
        for wanted in one.lever.requires if one.settings else ():
            if _holds(wanted.removeprefix("!"), options[one.program]) == wanted.startswith("!"):
                which = f"does not go with {wanted[1:]}" if wanted.startswith("!") else f"needs {wanted}"
                return f"{name} cannot be applied: it {which}"
    return ""


def changed(words: Sequence[str], changes: Iterable[Change], json_name: str = "") -> list[str]:
    """Returns the words with all changes. `json_name`: path of DeepSpeed's changed file; empty: the command's own."""
    found = list(words)
    for one in changes:
        if one.program == "deepspeed":
            own, given = json_file(words), json_name or json_file(words)
            found = [
                given if word == own else word.removesuffix(own) + given if word.endswith(f"={own}") else word
                for word in found
            ]
        else:
            place = _place(one.program, found)
            kept = _without(found[place], one.replaced)
            # What accelerate has before the script may end with the `-m` of the script.
            found[place] = [*one.words, *kept] if one.program == "accelerate" else [*kept, *one.words]
    return found


def changed_json(text: str, changes: Iterable[Change]) -> str:
    """Returns the text of DeepSpeed's JSON file with all changes."""
    found = json.loads(text)
    for one in changes:
        *sections, key = one.lever.argument.split(".")
        section = found
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = one.value
    return json.dumps(found, indent=2) + "\n"


def _place(program: str, words: Sequence[str]) -> slice:
    """Returns where the options of a program are: after the script, those of `accelerate launch` before it."""
    script, end = script_of(words), len(words)
    if program != "accelerate":
        return slice(words.index(script) + 1 if script else 1, end)
    if start := _launch(words):
        return slice(start, words.index(script, start) if script in words[start:] else end)
    return slice(0)


def _launch(words: Sequence[str]) -> int:
    """Returns where the options of `accelerate launch` begin; 0 if it is not in the command."""
    for i, word in enumerate(words):
        if word == _ACCELERATE or PurePath(word).name == "accelerate-launch":
            return i + 1
        if PurePath(word).name == "accelerate" and [*words[i + 1 : i + 2]] == ["launch"]:
            return i + 2
    return 0


def options_of(program: str, command: Command) -> dict[str, str]:
    """Returns the options that a command gives a program, also by the program's file, by their plain names."""
    if program == "deepspeed":
        return {plain(path): text for path, text in _flat(_json(command) or {})}
    own = _settings(command.words[_place(program, command.words)])
    if program != "accelerate":
        return own
    try:
        config = yaml.safe_load(command.texts.get(own.get(_CONFIG_OPTION, ""), "")) or {}
    except yaml.YAMLError:
        # accelerate itself says what is wrong with it.
        config = {}
    in_file = {f"--{plain(name.rpartition('.')[2])}": text for name, text in _flat(config)}
    return in_file | {"--use-fsdp": text(config.get("distributed_type") == "FSDP")} | own


def _json(command: Command) -> dict[str, Any] | None:
    """Returns what DeepSpeed's file has; None if there is none, or none in plain JSON."""
    try:
        found = json.loads(command.texts.get(json_file(command.words), "null"))
    except ValueError:
        # DeepSpeed itself says what is wrong with it.
        return None
    return found if isinstance(found, dict) else None


def _flat(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields a file's values by their paths, without those that it leaves to others."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        elif value not in ("auto", None):
            yield f"{path}{name}", text(value)


def text(value: object) -> str:
    """Returns the value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain(option: str) -> str:
    """Returns the option with dashes, since most programs take them for underscores."""
    return option.replace("_", "-")


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yields the plain name of each option, its value, and its words; for other words no name."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if not _OPTION.match(word):
            yield "", "", [word]
        elif has_value or not rest or _OPTION.match(rest[0]):
            yield plain(name), value if has_value else "true", [word]
        else:
            yield plain(name), rest[0], [word, rest.pop(0)]


def _settings(words: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value, _ in _options(words) if name}


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    return [word for name, _, own in _options(words) if name not in options for word in own]


def _value(text: str | None) -> object:
    try:
        return float(text or "")
    except ValueError:
        return text and text.lower()


def _holds(condition: str, options: Mapping[str, str]) -> bool:
    name, _, wanted = condition.partition("=")
    own = options.get(plain(name), "false").lower()
    return own == wanted if wanted else own not in ("false", "0")
