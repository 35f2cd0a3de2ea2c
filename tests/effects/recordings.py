"""Recordings of trainings with and without a setting, as small archives that benchmarks/pack_causes.py made of what
benchmarks/record_effects.py had recorded."""

import tarfile
from pathlib import Path

ARCHIVES = Path(__file__).parent.parent / "data" / "effects"


def unpack(directory: Path, name: str = "*") -> Path:
    """Restores ARCHIVE/NAME/trace_rank<r>.json in the directory, of one archive or all."""
    for archive in sorted(ARCHIVES.glob(f"{name}.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(directory / archive.name.removesuffix(".tar.xz"), filter="data")
    return directory
