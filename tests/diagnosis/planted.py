"""Recordings of programs with one planted cause each, of two H200s, two H100s and of a CPU, as small archives.

python -m tests.diagnosis.planted ARCHIVE DIRECTORY restores one, for analyze.py diagnose; benchmarks/pack_causes.py
has packed what benchmarks/record_causes.py had recorded.
"""

import json
import sys
import tarfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DESCRIBED = "scenarios.json"
ARCHIVES = Path(__file__).parent.parent / "data" / "causes"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What scenario.json says about a recording."""

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


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
