"""Configurations as dataclasses whose annotations carry ranges and choices: decoding, spellings, keys."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import msgspec

from overlap_sweep.errors import UsageError

C = TypeVar("C")

_SHOWN = r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]"
PRINTABLE = rf"^{_SHOWN}*\Z"
Name = Annotated[str, msgspec.Meta(max_length=100, pattern=PRINTABLE)]
"""Name of a knob, a variant or an implementation, short enough for a table."""
Text = Annotated[str, msgspec.Meta(max_length=4096, pattern=PRINTABLE)]
FileName = Annotated[str, msgspec.Meta(max_length=255, pattern=rf"^(?!\.\.?\Z|.*/){_SHOWN}+\Z")]
"""Name of a file in the same directory."""
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Us = Annotated[float, msgspec.Meta(ge=1e-6, lt=1e15)]
"""A time in microseconds, positive since rates divide by it and charts take its logarithm; 1e15 us are 31 years."""
Gb = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]

VERBATIM = msgspec.Meta(extra={"verbatim": True})
"""Marks an option that takes the rest of the word as it was typed, without Hydra's grammar."""

Role = Literal["schedules", "floor", "trains differently", "case", "nothing"]
"""What changing an option changes, in its annotation: when things run, what is computed or moved, what is learnt, which
points may be compared, or nothing that is measured. Options may have several."""
SCHEDULES: Role = "schedules"
FLOOR: Role = "floor"
TRAINS_DIFFERENTLY: Role = "trains differently"
CASE: Role = "case"
NOTHING: Role = "nothing"


def one_of(*choices: str, also: Mapping[str, str] | None = None) -> msgspec.Meta:
    """Returns a constraint to these strings. `also`: other spellings, with the choice that each stands for."""
    return msgspec.Meta(
        pattern=rf"^({'|'.join(map(re.escape, choices))})\Z", extra={"choices": choices, "also": also or {}}
    )


class _Required:
    """A class attribute that is as if there were none."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError("has no value")


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def resolved(cls: type[C]) -> type[C]:
    """Returns the class as a dataclass in which a field declared again without a default must be given, though its base
    has one: that is a class attribute, which msgspec would take for the value."""
    made = dataclass(kw_only=True)(cls)
    for declared in fields(made):  # type: ignore[arg-type]
        if declared.default is MISSING and declared.default_factory is MISSING:
            setattr(made, declared.name, _Required())
    return made


@cache
def types_of(schema: type) -> dict[str, Any]:
    """Returns each field's type, in order."""
    hints = get_type_hints(schema)
    return {declared.name: hints[declared.name] for declared in fields(schema)}


@cache
def _annotations(schema: type) -> dict[str, list[object]]:
    """Returns what each field's type is annotated with, in order."""
    hints = get_type_hints(schema, include_extras=True)
    return {
        name: [
            one
            for kind in (hints[name], *get_args(hints[name]))
            if get_origin(kind) is Annotated
            for one in kind.__metadata__
        ]
        for name in types_of(schema)
    }


@cache
def metas_of(schema: type) -> dict[str, msgspec.Meta]:
    """Returns each field's constraint; an empty one for a field without."""
    annotations = _annotations(schema).items()
    return {
        name: next((one for one in found if isinstance(one, msgspec.Meta)), msgspec.Meta())
        for name, found in annotations
    }


def roles_of(schema: type) -> dict[str, set[Role]]:
    """Returns each field's roles; an empty set for a field without."""
    return {name: {role for role in get_args(Role) if role in found} for name, found in _annotations(schema).items()}


@cache
def _leaves(schema: type) -> dict[str, msgspec.Meta]:
    """Returns the constraints of all options by their dotted names."""
    found: dict[str, msgspec.Meta] = {}
    for name, kind in types_of(schema).items():
        below = _leaves(kind) if is_dataclass(kind) else {}  # type: ignore[arg-type]
        found |= {f"{name}.{leaf}": meta for leaf, meta in below.items()} or {name: metas_of(schema)[name]}
    return found


@cache
def spellings(schema: type) -> dict[str, Mapping[str, str]]:
    """Returns the other spellings of each option's values, by dotted name."""
    return {name: also for name, meta in _leaves(schema).items() if (also := (meta.extra or {}).get("also"))}


@cache
def verbatim_options(schema: type) -> list[str]:
    """Returns the dotted names of the options that are taken as they were typed."""
    return [name for name, meta in _leaves(schema).items() if meta is VERBATIM]


def spelled(config: dict[str, Any], schema: type) -> dict[str, Any]:
    """Returns the configuration with one spelling for every value, so that each spelling gives the same point."""
    for name, also in spellings(schema).items():
        *parents, last = name.split(".")
        node = config
        for parent in parents:
            node = node.get(parent) or {}
        if node.get(last) in also:
            node[last] = also[node[last]]
    return config


def decode(config: Mapping[str, Any], schema: type[C], where: str = "") -> C:
    """Returns the configuration as the schema's dataclass; keys that the schema lacks are left out.

    UsageError, in which names begin with `where`, for the first value outside the range or the choices of its
    annotation, or the first missing key.
    """
    if key := _deleted_key(config, schema):
        key = f"{where}{key}"
        raise UsageError(f"{key} cannot be deleted; set it to a value or null instead of using ~{key}.")
    # Plain values first: nested ones may be interpolated from them, and those of `workload` from nested ones.
    ordered = sorted(config.items(), key=lambda item: (isinstance(item[1], Mapping), item[0] == "workload"))
    try:
        return msgspec.convert(dict(ordered), schema)
    except msgspec.ValidationError as error:
        raise UsageError(_refusal(config, schema, where, str(error))) from None


def _deleted_key(config: Mapping[str, Any], schema: type) -> str | None:
    """Returns the first dotted key of the schema that the configuration lacks."""
    for name, kind in types_of(schema).items():
        if name not in config:
            return name
        if is_dataclass(kind) and isinstance(config[name], Mapping):
            below = _deleted_key(config[name], kind)  # type: ignore[arg-type]
            if below:
                return f"{name}.{below}"
    return None


def _refusal(config: Mapping[str, Any], schema: type, where: str, error: str) -> str:
    """Returns what is wrong with the value that msgspec refused, and what to give instead."""
    found = re.search(r"`\$\.([\w.]+)", error)
    assert found, error
    *parents, leaf = found[1].split(".")
    for parent in parents:
        config, schema = config[parent], types_of(schema)[parent]
    name, value, kind, meta = f"{where}{found[1]}", config[leaf], types_of(schema)[leaf], metas_of(schema)[leaf]
    if is_dataclass(kind):
        return f"{name} is a group of options; set one, such as {name}.{fields(kind)[0].name}=... ."
    if choices := (meta.extra or {}).get("choices"):
        return f"{name}={value} is not known; choose one of {', '.join(choices)}."
    if meta.ge is not None:
        return f"{name}={value} is out of range; give a value from {meta.ge} to {meta.le}."
    return f"{name}={shown(value)}: {error.partition(' - at ')[0]}."


def unknown_key(config: Mapping[str, object], schema: type) -> str | None:
    """Returns the first dotted key that the schema lacks. Hydra lets `+` add any key; nothing would read it, and points
    that differ only in it would be pooled."""
    types = types_of(schema)
    for name, value in config.items():
        if name not in types:
            return f"{name}.{_first_leaf(value)}".rstrip(".")
        if is_dataclass(types[name]) and isinstance(value, Mapping):
            below = unknown_key(value, types[name])
            if below:
                return f"{name}.{below}"
    return None


def _first_leaf(value: object) -> str:
    if not isinstance(value, Mapping) or not value:
        return ""
    name, below = next(iter(value.items()))
    return f"{name}.{_first_leaf(below)}".rstrip(".")


def has_key(schema: type, key: str) -> bool:
    """Returns whether the schema has the dotted key. Keys below a field that is no dataclass are not checked."""
    name, _, below = key.partition(".")
    kind = types_of(schema).get(name)
    return kind is not None and (not below or not is_dataclass(kind) or has_key(kind, below))  # type: ignore[arg-type]


def short_key(key: str, schema: type) -> str:
    """Returns the last part of a dotted key; the whole key if another key of the schema ends in the same part."""
    leaf = key.rpartition(".")[2]
    return leaf if sum(name.rpartition(".")[2] == leaf for name in _leaves(schema)) < 2 else key


def shown(value: object) -> str:
    """Returns the value as it is typed on the command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{shown(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
