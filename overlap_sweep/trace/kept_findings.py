"""What was found in traces before, by their content and by the code that reads them: as Parquet, see `cache`."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlap_sweep.cache import find
from overlap_sweep.cache import keep as keep_bytes
from overlap_sweep.trace.breakdown import PartRow
from overlap_sweep.trace.findings import Findings
from overlap_sweep.trace.overlap import TraceRow

_KIND = "traces"
_HEAD = b"findings"

_PATH = "\0"
"""In front of a kept sentence, for where the trace lies: all sentences about it begin so, and it may be moved."""

_NOT_OF_ITS_CONTENT = f"{_PATH} cannot be read ("
"""The disk's or the network's problem, which may pass."""

_Row = TypeVar("_Row", TraceRow, PartRow)


def key_of(path: Path) -> str | None:
    """None where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return f"{_reader()} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError:
        return None


def load(key: str | None, path: Path, with_parts: bool) -> Findings | None:
    """None where nothing is kept, or what is kept is damaged. `path` is where the trace lies now."""
    rows = find(_KIND, f"{key} rows") if key else None
    parts = find(_KIND, f"{key} parts") if key and with_parts else b""
    if rows is None or parts is None:
        return None
    try:
        found, head = _read(rows, TraceRow, path)
        head["warnings"] = [_with_path(warning, path) for warning in head["warnings"]]
        if head["problem"] is not None:
            return Findings(**head | {"problem": _with_path(head["problem"], path)})
        of_parts = _read(parts, PartRow, path)[0] if with_parts else []
        if not found or (with_parts and not of_parts):
            raise ValueError("a trace without rows would have a problem")
        return Findings(**head, rows=found, parts=of_parts)
    except Exception:
        # Whatever a damaged file makes its readers raise: the trace is there to be read again.
        return None


def keep(key: str | None, path: Path, findings: Findings, with_parts: bool) -> None:
    """What is wrong with the trace, too: to find that out may have taken as long as anything else."""
    if key is None:
        return
    warnings = [_without_path(warning, path) for warning in findings.warnings]
    problem = None if findings.problem is None else _without_path(findings.problem, path)
    if None in warnings or (findings.problem and (problem is None or problem.startswith(_NOT_OF_ITS_CONTENT))):
        return
    if (warnings or problem) and key_of(path) != key:
        # Somebody is writing it just now: this was found in more of it than the key is of.
        return
    head = {"rank": findings.rank, "world_size": findings.world_size, "warnings": warnings, "problem": problem}
    keep_bytes(_KIND, f"{key} rows", _written(findings.rows, TraceRow, head))
    if with_parts:
        keep_bytes(_KIND, f"{key} parts", _written(findings.parts, PartRow, {}))


def _without_path(sentence: str, path: Path) -> str | None:
    """None where it isn't the sentence's beginning, or not only that."""
    rest = sentence.removeprefix(str(path))
    return _PATH + rest if rest != sentence and rest[:1] in (" ", ":") else None


def _with_path(sentence: str, path: Path) -> str:
    if not sentence.startswith(_PATH):
        raise ValueError("a sentence about a trace begins with its path")
    return str(path) + sentence.removeprefix(_PATH)


@cache
def _reader() -> str:
    """Changes with the code and the kernel classes."""
    files = sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    sources = [file.read_bytes() for file in files if file.name.endswith((".py", ".yaml"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def _written(rows: Sequence[_Row], kind: type[_Row], head: dict[str, Any]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    # A path need not be text. What was found doesn't depend on it.
    columns = [name for name in kind.__struct_fields__ if name != "file"]
    table = pyarrow.table({name: [getattr(row, name) for row in rows] for name in columns})
    stream = io.BytesIO()
    table = table.replace_schema_metadata({_HEAD: json.dumps(head)})
    parquet.write_table(
        table, stream, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    return stream.getvalue()


def _read(content: bytes, kind: type[_Row], path: Path) -> tuple[list[_Row], dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    file = parquet.ParquetFile(pyarrow.BufferReader(content), page_checksum_verification=True)
    table = file.read(use_threads=False)
    rows = msgspec.convert([{"file": str(path), **row} for row in table.to_pylist()], list[kind])  # type: ignore[valid-type]
    return rows, json.loads(table.schema.metadata[_HEAD])
