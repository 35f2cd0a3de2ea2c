"""Where in a command line of python or torchrun the script begins, so that the recorder can be put in front of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

ATTACH = "overlap_sweep.attach"
"""The module that runs a script with the recorder."""

_PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?")
_PYTHON_WITH_VALUE = "WX"
"""Python's options of one letter with a value, except those that name the program."""
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_MODULE = ("-m", "--module")
_NO_PYTHON = ("--no-python", "--no_python")
_RUN_PATH = ("--run-path", "--run_path")
TORCHRUN_FLAGS = (
    *(*_MODULE, *_NO_PYTHON, *_RUN_PATH, "-h", "--help", "--standalone"),
    *("--virtual-local-rank", "--virtual_local_rank", "--use-env", "--use_env"),
)
"""Options of torchrun without a value. All others take one."""


@dataclass(frozen=True)
class Started:
    """A command line in two parts."""

    starter: tuple[str, ...]
    """python or torchrun with their options, except those that say that a module follows."""
    script: tuple[str, ...]
    """The script, or `-m` and the module, with its arguments."""

    @property
    def name(self) -> str:
        """Returns the script without its folder, or the module."""
        return PurePath(self._run).name

    @property
    def file(self) -> str | None:
        """Returns the script as it is given; None for a module."""
        place = self.script.index(self._run)
        return None if place and self.script[place - 1] == "-m" else self._run

    @property
    def _run(self) -> str:
        return next((word for word in self.script if word not in ("-m", ATTACH)), ATTACH)


def attached(words: Sequence[str]) -> list[str] | None:
    """Returns the command with the recorder in front of the script; None if it has the recorder already, or does not
    start a script by python or torchrun."""
    found = None if ATTACH in words else started(words)
    return [*found.starter, "-m", ATTACH, *found.script] if found else None


def started(words: Sequence[str]) -> Started | None:
    """Returns the parts of a command of python or torchrun; None for other commands."""
    program, rest = words[0], words[1:]
    name = PurePath(program).name
    if name == "torchrun":
        return _by_torchrun((program,), rest)
    found = _by_python((program,), rest) if _PYTHON.fullmatch(name) else None
    if found and found.script[0] == "-m" and found.script[1] in _TORCHRUN_MODULES:
        return _by_torchrun((*found.starter, *found.script[:2]), found.script[2:])
    if found and PurePath(found.script[0]).name == "torchrun":
        return _by_torchrun((*found.starter, found.script[0]), found.script[1:])
    return found


def _by_python(starter: tuple[str, ...], words: Sequence[str]) -> Started | None:
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-", "--"):
        end = i + 1
        if words[i].startswith("--"):
            end += words[i] == "--check-hash-based-pycs"
        else:
            # Options of one letter may be joined: `-um train`.
            for place, letter in enumerate(words[i][1:], 1):
                flags, joined = words[i][:place], words[i][place + 1 :]
                if letter == "c":
                    return None
                if letter == "m":
                    module = (*([joined] if joined else []), *words[end:])
                    return Started((*starter, *([flags] if place > 1 else [])), ("-m", *module)) if module else None
                if letter in _PYTHON_WITH_VALUE:
                    end += not joined
                    break
        starter += tuple(words[i:end])
        i = end
    return _script(starter, words[i:])


def _by_torchrun(starter: tuple[str, ...], words: Sequence[str]) -> Started | None:
    seen: set[str] = set()
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-", "--"):
        # As argparse, which torchrun uses, takes them: `--standalo`, `--max-restarts=3`, `-r3`.
        is_long = words[i].startswith("--")
        flag = next(
            (flag for flag in TORCHRUN_FLAGS if flag.startswith(words[i]) and (is_long or flag == words[i])), ""
        )
        has_value = "=" in words[i] if is_long else len(words[i]) > 2
        end = i + (1 if flag or has_value else 2)
        seen.add(flag)
        starter += () if flag in _MODULE else tuple(words[i:end])
        i = end
    if seen & {*_RUN_PATH}:
        return None
    script = _script(starter, words[i:])
    if script and seen & {*_NO_PYTHON}:
        inner = started(script.script)
        return Started((*starter, *inner.starter), inner.script) if inner else None
    return Started(starter, ("-m", *script.script)) if script and seen & {*_MODULE} else script


def _script(starter: tuple[str, ...], words: Sequence[str]) -> Started | None:
    script = tuple(words[1:] if words[:1] == ["--"] else words)
    return Started(starter, script) if script and script[0] != "-" else None
