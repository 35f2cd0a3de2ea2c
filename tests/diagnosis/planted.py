"""Recordings of programs with one planted cause each, of two H200s, two H100s and of a CPU, as small archives.

python -m tests.diagnosis.planted pack RECORDINGS ARCHIVE    packs what benchmarks/record_causes.py has recorded
python -m tests.diagnosis.planted unpack ARCHIVE DIRECTORY   restores it, for analyze.py diagnose

The first entry of an archive is scenarios.json; reading it does not need the rest. Traces lie uncompressed, since xz
finds what many of them share. They are as recorded, except that some of what says nothing of time is left out: arrows
between launches and kernels, questions to the runtime that launch nothing, and numbers of the profiler's own.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DESCRIBED = "scenarios.json"
ARCHIVES = Path(__file__).parent.parent / "data" / "causes"
DICTIONARY = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 128 << 20}]
ARROWS = ("s", "t", "f")
QUESTIONS = ("cudaEventQuery", "cudaStreamIsCapturing", "cudaThreadExchangeStreamCaptureMode", "cudaGetFuncBySymbol")
OWN_NUMBERS = ("Record function id", "Ev Idx", "cbid", "queued", "context")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What scenario.json tells about a recording."""

    name: str
    cause: str
    also: list[str]
    """Causes that may hold besides, and cost more."""
    late_rank: int | None
    cause_by_group: dict[str, str]
    archive: str
    device: str
    step_ms: float
    """Median without the profiler."""
    described: dict[str, Any]
    """All of scenario.json."""


def archives() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))


def scenarios(archive: str) -> list[Planted]:
    """Returns what the archive has, without unpacking the traces."""
    with tarfile.open(ARCHIVES / f"{archive}.tar.xz") as tar:
        first = tar.next()
        content = tar.extractfile(first) if first else None
        assert content is not None
        names = [field.name for field in fields(Planted) if field.name not in ("archive", "described")]
        return [
            Planted(archive=archive, described=each, **{name: each[name] for name in names})
            for each in json.loads(content.read())
        ]


def unpack(archive: Path, directory: Path) -> None:
    """Restores DIRECTORY/<scenario>/trace_rank<r>.json and scenario.json."""
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    for described in json.loads((directory / DESCRIBED).read_text()):
        (directory / described["name"] / "scenario.json").write_text(json.dumps(described, indent=2))


def pack(recordings: Path, archive: Path) -> None:
    described = [json.loads(path.read_text()) for path in sorted(recordings.glob("*/scenario.json"))]
    with lzma.open(archive, "w", filters=DICTIONARY) as compressed, tarfile.open(fileobj=compressed, mode="w") as tar:
        _add(tar, DESCRIBED, json.dumps(described, indent=1).encode())
        for name, content in _traces(recordings, [each["name"] for each in described]):
            _add(tar, name, content)


def _traces(recordings: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        for path in sorted((recordings / name).glob("trace_rank*.json.gz")):
            trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
            trace.pop("traceName", None)
            trace["traceEvents"] = [_shortened(event) for event in trace["traceEvents"] if _says_something(event)]
            yield f"{name}/{path.name.removesuffix('.gz')}", json.dumps(trace, separators=(",", ":")).encode()


def _says_something(event: dict[str, Any]) -> bool:
    return event.get("ph") not in ARROWS and event.get("name") not in QUESTIONS


def _shortened(event: dict[str, Any]) -> dict[str, Any]:
    if "args" in event:
        event["args"] = {name: value for name, value in event["args"].items() if name not in OWN_NUMBERS}
    return event


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    command, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    {"pack": pack, "unpack": unpack}[command](source, target)
