"""Recorded sweeps as small archives: traces lie unpacked in a tar.xz, since xz finds what many of them share.

python -m tests.golden.archives DIRECTORY...    packs recorded sweeps into tests/golden/inputs
"""

import gzip
import io
import sys
import tarfile
from pathlib import Path

INPUTS = Path(__file__).parent / "inputs"

_ANALYSIS = (
    *("*.csv", "*.parquet", "*.html", "*.py", "*.txt", "tuning_report.json", "results_*.json"),
    *("optimal_tp_comm_overlap_cfg*.yaml", "ub_cfgs*.json", "async_tp*.json"),
)


def pack(sweep: Path, archive: Path) -> None:
    """Writes what launching left in the sweep's directory into the archive, without what analysis made of it."""
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in sorted(sweep.rglob("*")):
            name = path.relative_to(sweep).as_posix()
            made_by_analysis = any(map(path.match, _ANALYSIS))
            if not path.is_file() or made_by_analysis or name.startswith(("plots/", "traces/")):
                continue
            content = path.read_bytes()
            if name.endswith(".json.gz"):
                name, content = name.removesuffix(".gz"), gzip.decompress(content)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def unpack(name: str, directory: Path) -> Path:
    """Restores the recorded sweep `name` in the directory, traces as .json.gz."""
    with tarfile.open(INPUTS / f"{name}.tar.xz") as tar:
        for entry in tar:
            path, file = directory / entry.name, tar.extractfile(entry)
            assert file is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name.startswith("trace") and path.suffix == ".json":
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(file.read(), compresslevel=1, mtime=0))
            else:
                path.write_bytes(file.read())
    return directory


if __name__ == "__main__":
    INPUTS.mkdir(exist_ok=True)
    for given in map(Path, sys.argv[1:]):
        pack(given, INPUTS / f"{given.name}.tar.xz")
