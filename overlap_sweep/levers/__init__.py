"""What can be changed in a training without changing its script: the entries of levers.yaml and of other packages.

A lever is one entry. It says what it is, which values are worth trying, which causes of exposed communication it can
mend, whether results stay equal, in which way it is applied, and the line to write into one's own script.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import msgspec

from overlap_sweep.diagnosis import Finding, Role
from overlap_sweep.errors import UsageError, UserError, nearest
from overlap_sweep.levers import programs
from overlap_sweep.scopes import parts_of

GROUP = "overlap_sweep.levers"
"""Entry point group for levers of other packages: each a function that returns the path of a YAML file of entries."""

OPTION = "job.levers."
"""Beginning of a lever's name as an option."""

PLACEHOLDER = "VALUE"
"""What stands for a value in a line to write, where several are worth trying."""
Value = str | int | float | bool
Results = Literal["exact", "rounding", "trains differently"]
Way = Literal["environment", "constructor", "call", "argument"]
Kind = Literal["integer", "number", "boolean", "text"]

_TYPES: dict[Kind, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "text": (str, int, float, bool),
}
_KIND_OF: dict[type, Kind] = {int: "integer", float: "number", bool: "boolean", str: "text"}


class Constructor(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An argument of classes or functions that a script calls by its own hand."""

    of: list[str]
    """`module:Class` or `module:function`, where it is defined."""
    argument: str
    make: str = ""
    """`module:function` that is given the lever's value and all arguments of the call by name, and returns the
    argument's value; it raises NotHere if the lever is not for this call, or NotApplicable. Without it the value is
    that of the lever."""
    extends: bool = False
    """Whether `make` keeps what the script gives and adds to it, or raises NotApplicable where both set the same."""


class Lever(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An entry of levers.yaml, whose head explains the fields."""

    what: str
    values: list[Value] = []
    kind: Kind | None = None
    choices: list[Value] = []
    also: dict[str, dict[str, Value]] = {}
    excludes: dict[str, Value] = {}
    default: Value | None = None
    results: Results
    causes: list[str] = []
    causes_of: dict[str, list[str]] = {}
    evidence: dict[str, str] = {}
    roles: list[Role] = []
    collectives: list[str] = []
    between_nodes: bool = False
    of: list[str] = []
    there: list[str] = []
    gpu: bool = False
    cores: bool = False
    collects: bool = False
    needs: str = ""
    pattern: str = ""
    environment: str = ""
    assigns: str = ""
    constructor: Constructor | None = None
    overrides: bool = False
    call: str = ""
    applies: str = ""
    unless: list[str] = []
    argument: str = ""
    program: str = ""
    requires: list[str] = []
    write: str = ""
    write_with: dict[str, str] = {}
    effect: str = ""
    change: str = ""
    at_most: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        # A constructor's lever may have a call that checks it.
        ways = [way for way in (self.environment, self.constructor or self.call, self.argument) if way]
        if len(ways) != 1:
            raise ValueError("a lever has one of environment, constructor, call and argument")
        if self.environment and not self.write:
            self.write = f"export {self.environment}={{value}}"
        if not self.argument and not self.write:
            raise ValueError("write is missing")
        if not self.values:
            self.values, self.default = [True], False

    @property
    def way(self) -> Way:
        if self.environment:
            return "environment"
        if self.constructor:
            return "constructor"
        return "call" if self.call else "argument"

    @property
    def is_in_process(self) -> bool:
        """Returns whether it is applied in the processes of the training, which say whether it could be."""
        return self.way in ("constructor", "call")

    def can_mend(self, found: Finding) -> bool:
        """Returns whether it can mend a finding, by its cause, what its collectives carry, and its evidence."""
        carries = not (self.roles and found.roles) or bool({*self.roles} & {*found.roles})
        shown = re.search(self.evidence.get(found.cause, ""), f"{found.collective}: {found.evidence}")
        return found.cause in self.causes and carries and bool(shown)

    def mended_by(self, value: Value) -> list[str]:
        """Returns the causes that a value can mend."""
        return self.causes_of.get(str(value).rpartition(":")[2], self.causes)

    def assigned(self, value: Value) -> str:
        """Returns what the variable of a lever that is applied by environment is set to, or is to contain."""
        if self.assigns:
            return self.assigns.replace("{value}", str(value))
        return str(int(value) if isinstance(value, bool) else value)

    def written(self, value: Value) -> str:
        """Returns the lines for the user's script or launch command."""
        if not self.write:
            return programs.written(self, value)
        text = self.assigned(value) if self.environment else str(value)
        lines = [self._written_for(*part) for part in parts_of(text)] if self.pattern else [self._with(text)]
        return "\n".join([*lines, *(levers()[name].written(one) for name, one in self.also.get(text, {}).items())])

    @property
    def only_value(self) -> Value | None:
        """Returns the only value worth trying that is not the default; None if there are several."""
        own = [one for one in self.values if not self.is_scoped(one)]
        left = [one for one in own if one != self.default] or own
        return left[0] if len(left) == 1 else None

    def shown(self, value: Value | None) -> str:
        """Returns the lines for the user's script or launch command, with PLACEHOLDER if there is no value."""
        return self.written(PLACEHOLDER if value is None else value)

    def is_scoped(self, value: Value) -> bool:
        """Returns whether a value is for some process groups alone."""
        return bool(self.pattern) and ":" in str(value)

    def for_collective(self, collective: str, value: Value) -> str:
        """Returns a value that is for one of `collectives` alone, as NCCL's variables have it."""
        return f"{collective.replace('_', '')}:{value}"

    def is_for(self, collective: str, value: Value) -> bool:
        """Returns whether a value is for this collective alone."""
        return collective in self.collectives and str(value).startswith(self.for_collective(collective, ""))

    def _written_for(self, scope: str, value: str) -> str:
        """Returns the lines for those process groups that a part of a value is for."""
        lines = self._with(value.capitalize() if value in ("true", "false") else value)
        return f"# process groups {scope}\n{lines}" if scope else lines

    def _with(self, value: str) -> str:
        return self.write.replace("{value}", value)


def written_together(values: Mapping[str, Value]) -> list[str]:
    """Returns the lines for the user's script of levers that are applied together, by name."""
    lines, in_others = [], {other for name in values for other in levers()[name].write_with}
    for name, value in values.items():
        lever = levers()[name]
        if other := next((one for one in lever.write_with if one in values), ""):
            both = lever.write_with[other].replace("{value}", str(value))
            lines.append(both.replace("{other}", str(values[other])))
        elif name not in in_others:
            lines.append(lever.written(value))
    return lines


@cache
def levers() -> dict[str, Lever]:
    """Returns all levers by name, such as `ddp.bucket_cap_mb`. UserError for another package's file that is wrong."""
    found = _read(Path(__file__).with_name("levers.yaml"))
    for entry in entry_points(group=GROUP):
        try:
            path = Path(entry.load()())
            found |= {name: one for name, one in _read(path).items() if name not in found}
        except Exception as error:
            # Importing another package's code can raise anything.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UserError(
                f"The levers of {entry.value} cannot be read ({reason}); fix or uninstall that package."
            ) from error
    return found


def _read(path: Path) -> dict[str, Lever]:
    found = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Lever])
    for name, lever in found.items():
        if lever.argument:
            lever.program = lever.program or name.partition(".")[0]
            if lever.program not in programs.PROGRAMS:
                raise ValueError(f"{name}: program is none of {', '.join(programs.PROGRAMS)}")
    return found


def flat(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of `job.levers`, without those that are null."""
    for family, own in given.items():
        if isinstance(own, Mapping):
            yield from ((f"{family}.{name}", value) for name, value in own.items() if value is not None)
        elif own is not None:
            yield family, own


def of_option(option: str) -> Lever | None:
    """Returns the lever that an option such as job.levers.ddp.bucket_cap_mb is; None for other options, and for a lever
    of a package that is not installed."""
    return levers().get(option.removeprefix(OPTION)) if option.startswith(OPTION) else None


def effect_entry(option: str) -> str | None:
    """Returns the entry of effects/settings.yaml by which one sees a lever, given as an option; empty if a trace does
    not show it, None for other options."""
    lever = of_option(option)
    return lever.effect if lever else None


def chosen(given: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the values of the levers of `job.levers`. UsageError for a name or value that does not exist."""
    found: dict[str, Value] = {}
    for name, value in flat(given):
        if reason := _wrong(lever_named(name), value):
            raise UsageError(f"job.levers.{name}={programs.text(value)} {reason}.")
        found[name] = value
    for name, value in [*found.items()]:
        for other, needed in levers()[name].also.get(str(value), {}).items():
            if found.setdefault(other, needed) != needed:
                raise UsageError(f"job.levers.{name}={value} sets job.levers.{other}={needed}; leave that out.")
    return found


def misfits(values: Mapping[str, Value]) -> str:
    """Returns which levers do not go together; empty if all do."""
    for name in values:
        for other, value in levers()[name].excludes.items():
            if values.get(other) == value:
                return f"{OPTION}{name} does not go with {OPTION}{other}={programs.text(value)}"
    return ""


def named(names: Iterable[str]) -> dict[str, Lever]:
    """Returns the levers whose names begin with one of these, such as those of a family; without names all. UsageError
    if none does."""
    known = levers()
    found: dict[str, Lever] = {}
    for name in names:
        own = [name] if name in known else [each for each in known if each.startswith(name)]
        if not own:
            near = nearest(name, [*known, *(each.partition(".")[0] for each in known)])
            raise UsageError(f"Unknown lever {name}. {f'Did you mean {near}?' if near else 'Leave it out for all.'}")
        found |= {each: known[each] for each in own}
    return found or known


def change_of(name: str, value: Value) -> str:
    """Returns a lever's value as a change of `predict`, which that may not know."""
    lever, text = levers().get(name), programs.text(value)
    return lever.change.replace("{value}", text) if lever and lever.change else f"{name}={text}"


def lever_named(name: str) -> Lever:
    """Returns the lever. UsageError if there is none of that name."""
    if found := levers().get(name):
        return found
    near = nearest(name, [*levers()])
    raise UsageError(
        f"job.levers.{name} is not known. {f'Did you mean {near}?' if near else '`analyze.py levers` lists them.'}"
    )


def value_of(name: str, text: str) -> Value:
    """Returns the value of a lever that a text says. UsageError if the lever does not take it."""
    lever = lever_named(name)
    known = {programs.text(one).lower(): one for one in (*lever.values, *lever.choices)}
    value: Value = known.get(text.lower(), text)
    kinds = _TYPES[lever.kind or _KIND_OF[type(lever.values[0])]] if value == text else ()
    for kind in (one for one in (int, float) if one in kinds):
        with suppress(ValueError):
            value = kind(text)
            break
    chosen({name: value})
    return value


def _wrong(lever: Lever, value: Any) -> str:
    """Returns why a lever does not take a value; empty if it does."""
    kind, such = lever.kind or _KIND_OF[type(lever.values[0])], programs.text(lever.values[0])
    if isinstance(value, list):
        return "is a list; give one value, or several with -m and without brackets"
    if lever.choices:
        choices = [*map(programs.text, lever.choices)]
        choices += [lever.for_collective(one, choice) for one in lever.collectives for choice in lever.choices]
        return "" if programs.text(value) in choices else f"is not one of {', '.join(choices)}"
    # Not isinstance, for which true is 1.
    if type(value) not in _TYPES[kind]:
        return f"is not {'an' if kind == 'integer' else 'a'} {kind}, such as {such}"
    if lever.pattern and not re.fullmatch(lever.pattern, str(value)):
        return f"cannot be understood; give such as {' or '.join(map(str, lever.values))}"
    if kind in ("integer", "number") and not 0 <= value < math.inf:
        return f"is out of range; give such as {such}"
    return ""


def typed(text: str) -> int | bool:
    """Returns the number or the boolean that a text says."""
    return int(text) if text.isdigit() else text.lower() == "true"


def environment(values: Mapping[str, Value]) -> dict[str, str]:
    """Returns the variables that levers set for the command. Options of one variable are joined by commas."""
    found: dict[str, list[str]] = {}
    for name, value in values.items():
        if variable := levers()[name].environment:
            found.setdefault(variable, []).append(levers()[name].assigned(value))
    return {variable: ",".join(texts) for variable, texts in found.items()}


def needing_gpus(values: Mapping[str, Value]) -> list[str]:
    """Returns the names of the levers that have a meaning only on GPUs."""
    return [name for name in values if levers()[name].gpu]
