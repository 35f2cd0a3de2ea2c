"""JSON schemas of what commands print with `--format json`, from the columns and types that declare it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from overlap_sweep.errors import UsageError
from overlap_sweep.report.numbers import visible_json
from overlap_sweep.report.table import Kind, Table

VERSION = 1
"""Of all schemas. Within a version columns and fields are only added; one that is removed, renamed or of another type
begins the next."""
TYPES: Mapping[Kind, str] = {"text": "string", "count": "integer", "number": "number", "flag": "boolean"}
OBJECTS = ("effect", "optimize")
"""Commands that print objects instead of rows."""


def tables_of() -> dict[str, Mapping[str, Table]]:
    """Returns the tables of each command's rows, by heading."""
    from overlap_sweep.commands import compare, frames, history, levers, predict, query, report
    from overlap_sweep.report import diagnosis

    return {
        "query": query.headed(),
        "report": report.tables(),
        "trace": frames.TRACE_TABLES,
        "diagnose": diagnosis.TABLES,
        "predict": predict.TABLES,
        "levers": levers.TABLES,
        "compare": compare.tables(),
        "history": history.TABLES,
    }


def schema_of(command: str) -> dict[str, Any]:
    """Returns the JSON schema of the command's output. UsageError if it prints no JSON."""
    from overlap_sweep.commands.frames import trace_table

    program = "overlap-sweep" if command == "optimize" else "overlap-sweep analyze"
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:overlap-sweep:{command}:{VERSION}",
        "title": f"{program} {command} --format json",
    }
    if command in OBJECTS:
        return {**head, **_of_objects(command)}
    tables = tables_of()
    if command not in tables:
        raise UsageError(f"{command} prints no JSON; choose one of {', '.join([*tables, *OBJECTS])}.")
    rows = {_key(heading): _of_rows(heading, table) for heading, table in tables[command].items()}
    if command == "query":
        rows = _of_query(rows)
    elif command == "trace":
        for by in ("phase", "class"):
            heading = f"with --median, by {by}"
            rows[_key(heading)] = _of_rows(heading, trace_table(by, medians=True))
    return {
        **head,
        "type": "array",
        "items": {"anyOf": [{"$ref": f"#/$defs/{key}"} for key in rows]},
        "$defs": rows,
    }


def _key(heading: str) -> str:
    return re.sub(r"\W+", "_", heading).strip("_")


def _of_rows(heading: str, table: Table) -> dict[str, Any]:
    columns = {
        column.name: {"type": [TYPES[column.kind], "null"], "description": f"{column.unit}: {column.about}"}
        for column in table.written
    }
    return {
        "type": "object",
        "description": f"Rows {heading}: {table.rows}.",
        "properties": columns,
        "required": [*columns],
    }


def _of_query(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the schemas of rows that have the columns that were asked for, of their table or added to it."""
    from overlap_sweep.commands.query import ADDED_TYPES

    added = [key for key, one in rows.items() if {*one["properties"]} <= {*ADDED_TYPES}]
    columns = {name: about for key in added for name, about in rows[key]["properties"].items()}
    return {
        key: {**one, "properties": {**one["properties"], **columns}, "required": []}
        for key, one in rows.items()
        if key not in added
    }


def _of_objects(command: str) -> dict[str, Any]:
    from overlap_sweep.effects.comparison import Effect
    from overlap_sweep.optimizer.answer import Answer

    kind: Any = Effect if command == "effect" else Answer
    (one,), defined = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    several = {"anyOf": [one, {"type": "array", "items": one}]}
    return {**(several if command == "effect" else one), "$defs": _with_undefined(defined)}


def _with_undefined(schema: Any) -> Any:
    """Returns the schema in which a number may be null, as NaN is written."""
    if isinstance(schema, dict):
        within = {key: _with_undefined(value) for key, value in schema.items()}
        return within | {"type": ["number", "null"]} if schema.get("type") == "number" else within
    return list(map(_with_undefined, schema)) if isinstance(schema, list) else schema


def as_text(schema: Mapping[str, Any]) -> str:
    """Returns the schema as it is printed and published."""
    return visible_json(msgspec.json.format(msgspec.json.encode(schema), indent=1).decode()) + "\n"
