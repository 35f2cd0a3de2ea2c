"""Holds what commands print with `--format json` to their JSON schemas, more strictly than these say: to declared
columns and fields alone."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from overlap_sweep.commands.schemas import schema_of

MOST_ROWS = 12
"""Rows that are checked, from all over an output: those of a table are alike."""


def check(arguments: Sequence[str], printed: str) -> None:
    """Raises what is wrong with the output of a command, if it is JSON."""
    given = " ".join(arguments)
    if ("--format json" not in given and "--format=json" not in given) or not printed:
        return
    found = json.loads(printed)
    if isinstance(found, list):
        found = found[:: max(len(found) // MOST_ROWS, 1)]
    _validator(arguments[0]).validate(found)


@cache
def _validator(command: str) -> Any:
    from jsonschema import Draft202012Validator

    schema = schema_of(command)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(_closed(schema))


def _closed(schema: Any) -> Any:
    """Returns the schema in which objects have no more than is declared."""
    if isinstance(schema, dict):
        closed = {"additionalProperties": False} if "properties" in schema else {}
        return closed | {key: _closed(value) for key, value in schema.items()}
    return list(map(_closed, schema)) if isinstance(schema, list) else schema
