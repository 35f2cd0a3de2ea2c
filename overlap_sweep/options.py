"""The options that a configuration's dataclasses declare, for --help, docs/options.md and shell completion."""

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, get_args, get_origin

from msgspec import Meta
from omegaconf import MISSING

from overlap_sweep.declared import metas_of, shown, types_of

NOT_GIVEN = {"workload.name", "model_preset"}
"""Options that a config group sets, not the user."""


@dataclass(frozen=True)
class Option:
    name: str
    """Dotted name, as it is typed."""
    default: str
    """Default value, as it is typed; empty for a required option."""
    choices: tuple[str, ...]
    """All allowed values; empty for a range or free values."""
    values: str
    """Description of the allowed values."""
    about: str
    """The field's docstring, in one line."""
    section: type
    """The dataclass under which it is listed: its own, or the outermost below the schema."""

    @property
    def is_map(self) -> bool:
        """Returns whether it takes keys of the user's."""
        return self.values == "map"


@cache
def options_of(schema: type) -> tuple[Option, ...]:
    """Returns all options of the schema, in order, those of nested dataclasses with dots."""
    return tuple(_options(schema, "", None))


def _options(schema: type, where: str, section: type | None) -> Iterator[Option]:
    for declared in fields(schema):
        name, kind = f"{where}{declared.name}", types_of(schema)[declared.name]
        if name in NOT_GIVEN:
            continue
        if is_dataclass(kind):
            yield from _options(kind, f"{name}.", section or kind)  # type: ignore[arg-type]
            continue
        owner = _declares(schema, declared.name)
        about = _docstrings(owner.__module__).get((owner.__name__, declared.name), "")
        meta = metas_of(schema)[declared.name]
        choices = _choices(meta, kind)
        values = _values(meta, choices, kind)
        yield Option(name, _default(declared), choices, values, about, section or owner)


def _declares(schema: type, name: str) -> type:
    """Returns the class that declares the schema's field."""
    return next(each for each in schema.__mro__ if name in vars(each).get("__annotations__", ()))


def sections_of(schema: type) -> dict[type, list[Option]]:
    """Returns the schema's options by section."""
    found: dict[type, list[Option]] = {}
    for option in options_of(schema):
        found.setdefault(option.section, []).append(option)
    return found


def listed(names: Sequence[str]) -> str:
    """Returns `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def about(documented: type) -> str:
    """Returns the dataclass's own docstring in one line; empty without one."""
    text = vars(documented).get("__doc__") or ""
    # `dataclass` itself writes the signature as docstring.
    return "" if text.startswith(f"{documented.__name__}(") else " ".join(text.split())


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Returns the attribute docstrings by class and field. Python does not keep them, so the source is parsed."""
    found = {}
    for node in ast.parse(inspect.getsource(import_module(module))).body:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[node.name, name] = " ".join(text.split())
    return found


def _default(declared: Field[object]) -> str:
    if callable(declared.default_factory):
        return shown(declared.default_factory())
    return "" if declared.default == MISSING else shown(declared.default)


def _choices(meta: Meta, kind: Any) -> tuple[str, ...]:
    choices = (meta.extra or {}).get("choices", ("true", "false") if bool in (kind, *get_args(kind)) else ())
    if not choices:
        return ()
    null = ("null",) if type(None) in get_args(kind) else ()
    return tuple(dict.fromkeys((*map(shown, choices), *null)))


def _values(meta: Meta, choices: tuple[str, ...], kind: Any) -> str:
    if choices:
        return ", ".join(choices)
    if meta.ge is not None:
        low, high = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (meta.ge, meta.le))
        return f"{low} to {high}"
    container = {get_origin(each) for each in (kind, *get_args(kind))}
    return meta.description or ("list" if list in container else "map" if dict in container else "")
