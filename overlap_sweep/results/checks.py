"""Checks on the location and size of the files of a run directory, which anybody may have written."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.overlap_cfg import NO_YAML
from overlap_sweep.trace.disk import is_below, is_special

MEASURE_AGAIN = "if it is a point's, measure that again with resume="
ELSEWHERE = "move it elsewhere"
MOST_BYTES = 64 << 20
"""Largest file that is read; a result has some 100 kB."""
MOST_YAML_BYTES = 1 << 20
"""Largest YAML file that is read; reading it takes a second."""
_MOST_VALUES = 100_000
"""Most values in a file; with YAML aliases a few lines can hold many."""
_DEEPEST = 32
_LARGEST = 2**63


def check_place(path: Path, root: Path, most_bytes: int | None = MOST_BYTES) -> None:
    """Raises UserError unless `path` is absent or a regular file below `root` of at most `most_bytes`."""
    if not is_below(path, root):
        raise UserError(f"{path} is a link that leads out of {root}, so it is not read; copy the file there.")
    if is_special(path):
        raise UserError(f"{path} is not a regular file, so it is not read; {ELSEWHERE}.")
    if most_bytes and path.exists() and path.stat().st_size > most_bytes:
        raise UserError(f"{path} is larger than {most_bytes >> 20} MiB, so it is not read; {ELSEWHERE}.")


def read_yaml(path: Path) -> Any:
    """Returns the content. UserError if it is not YAML or larger than any configuration."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, *NO_YAML) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); {ELSEWHERE}.") from None
    if reason := excess([content]):
        raise UserError(f"{path} {reason}; {ELSEWHERE}.")
    return content


def excess(content: Iterable[object]) -> str | None:
    """Returns why the content is too large or too deep to be processed, or None."""
    for count, (value, depth) in enumerate(_walk(content), start=1):
        if count > _MOST_VALUES:
            return f"holds more than {_MOST_VALUES} values"
        if depth > _DEEPEST:
            return f"is nested more than {_DEEPEST} deep"
        if isinstance(value, int) and abs(value) >= _LARGEST:
            return "holds a number beyond 64 bits"
    return None


def _walk(content: Iterable[object], depth: int = 0) -> Iterator[tuple[object, int]]:
    """Yields each value with its depth; endlessly if the content contains itself."""
    for value in content:
        yield value, depth
        if depth <= _DEEPEST and isinstance(value, dict | list):
            yield from _walk(value.values() if isinstance(value, dict) else value, depth + 1)
