"""From the configured command to the one that is run: placeholders, words, and the recorder in front of the script."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from string import Formatter
from typing import Any

from overlap_sweep.errors import UserError, nearest

ATTACH = "overlap_sweep.attach"
"""The module that runs a script with the recorder."""

_TORCHRUN_FLAGS = {
    *("-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path", "--standalone"),
    *("--virtual-local-rank", "--virtual_local_rank"),
}
"""Options of torchrun without a value. All others take one."""
_TORCHRUN_MODULES = {"torch.distributed.run", "torch.distributed.launch"}
_PYTHON_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}
"""Options of Python with a value in the next word."""


def completed(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a point adds to the configured job: a working folder that depends on nothing. UserError if the
    command cannot be understood."""
    job = dict(point["job"])
    arguments({**point, "job": job}, Path("run"))
    environment({**point, "job": job}, Path("run"))
    return {"job": job}


def arguments(point: Mapping[str, Any], directory: Path) -> list[str]:
    """Returns the words of the command that is run, with the recorder in front of the script where that is possible.
    UserError if the command cannot be understood."""
    job = point["job"]
    words = split(filled(job["command"], placeholders(point, directory), "job.command"))
    return attached(words) or words if job["attach"] else words


def working_folder(point: Mapping[str, Any], directory: Path) -> Path:
    """Returns the folder in which the command is run."""
    return Path(filled(point["job"]["directory"], placeholders(point, directory), "job.directory"))


def environment(point: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Returns the variables that the point sets for the command."""
    values = placeholders(point, directory)
    return {
        name: filled(in_words(value), values, f"job.env.{name}")
        for name, value in point["job"]["env"].items()
        if value is not None
    }


def amount(point: Mapping[str, Any], option: str) -> float | None:
    """Returns the work per step that `samples_per_step` or `tokens_per_step` gives; None if it is not given. UserError
    if that is not a product of numbers."""
    template = point["job"][option]
    if template is None:
        return None
    # The folder is no number.
    text = filled(template, placeholders(point, Path("run")), f"job.{option}")
    try:
        product = math.prod(float(factor.replace(",", "").replace("_", "")) for factor in text.split("*"))
    except ValueError:
        product = math.nan
    if not 0 < product < 1e18:
        raise UserError(
            f"job.{option}={template} is {text}, which is no amount of work; give a product of positive numbers, such "
            "as '{batch} * {ranks}'."
        )
    return product


def placeholders(point: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Returns the text of every placeholder."""
    job = point["job"]
    values = {name: in_words(value) for name, value in job["values"].items()}
    own = {"ranks": str(job["ranks"]), "repetition": str(point["repetition"]), "run": str(directory.resolve())}
    return {**values, **own}


def in_words(value: Any) -> str:
    """Returns a value as it is typed on a command line."""
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def filled(template: str, values: Mapping[str, str], option: str) -> str:
    """Returns the text with its placeholders filled in. UserError for one without a value."""
    return "".join(_parts(template, values, option))


def _parts(template: str, values: Mapping[str, str], option: str) -> Iterator[str]:
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"{option} has unbalanced braces ({error}); write {{{{ and }}}} for braces.") from None
    for text, name, _, _ in parsed:
        yield text
        if name is not None:
            if name not in values:
                near = nearest(name, list(values))
                mend = f"did you mean {{{near}}}?" if near else f"give +job.values.{name or '<name>'}=..."
                raise UserError(f"{option} has the placeholder {{{name}}} without a value; {mend}")
            yield values[name]


def split(command: str) -> list[str]:
    """Returns the words of a command line, by the quoting of shells. UserError if there are none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"job.command cannot be split ({error}); close its quotes.") from None
    if not words:
        raise UserError("job.command is empty; give a command line, such as 'torchrun train.py'.")
    return words


def attached(words: Sequence[str]) -> list[str] | None:
    """Returns the command with the recorder in front of the script; None if it has the recorder already, or is neither
    python nor torchrun."""
    place = script_place(words)
    if ATTACH in words or place is None:
        return None
    before, after = list(words[:place]), list(words[place:])
    return [*before, "-m", ATTACH, *after]


def script_place(words: Sequence[str]) -> int | None:
    """Returns the index of the script, or of its `-m`, in a command of python or torchrun; None for other commands."""
    program = PurePath(words[0]).name
    if program == "torchrun":
        return _place_for_torchrun(words, 1)
    if not program.startswith("python"):
        return None
    i = 1
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "-c", "-"):
        i += 2 if words[i] in _PYTHON_WITH_VALUE else 1
    if i >= len(words) or words[i] in ("-c", "-"):
        return None
    if words[i] == "-m" and words[i + 1 : i + 2] and words[i + 1] in _TORCHRUN_MODULES:
        return _place_for_torchrun(words, i + 2)
    return i


def _place_for_torchrun(words: Sequence[str], i: int) -> int | None:
    module = None
    while i < len(words) and words[i].startswith("-"):
        if words[i] in ("-m", "--module"):
            module = i
        i += 1 if words[i] in _TORCHRUN_FLAGS or "=" in words[i] else 2
    return (i if module is None else module) if i < len(words) else None


def script_name(template: str) -> str:
    """Returns a short name of what the configured command runs: the script without its folder, or the program."""
    try:
        words = shlex.split(template)
    except ValueError:
        words = template.split()
    place = script_place(words) if words else None
    if place is None:
        return PurePath(words[0]).name if words else "job"
    after = [word for word in words[place:] if word not in ("-m", "--module", ATTACH)]
    return PurePath(after[0]).name if after else "job"


def same_point(point: Mapping[str, Any]) -> str:
    """Returns a key that is equal for completed points that run the same."""
    return json.dumps([arguments(point, Path("run")), environment(point, Path("run"))])
