"""Fetches the public traces that `tests/data/judged/verdicts.yaml` judges, each at its commit, for the tests to read:

    python benchmarks/fetch_public_traces.py [RUN...] [--from PROJECT=REPOSITORY ...]

Needs git and the network; the traces take 130 MB. `--from torchrec=DIRECTORY` reads a clone that is already there.
They stay out of commits: git ignores where they lie.
"""

import argparse
import fnmatch
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

import yaml

JUDGED = Path(__file__).parent.parent / "tests" / "data" / "judged"


def fetch(runs: list[str], clones: dict[str, str], target: Path) -> list[Path]:
    """Writes TARGET/<run>/<trace> of these runs, or of all; returns the directories."""
    judged = yaml.safe_load((JUDGED / "verdicts.yaml").read_text())
    public = {each["run"]: each["files"] for each in judged["runs"] if "files" in each}
    if unknown := sorted(set(runs) - set(public)):
        raise SystemExit(f"No public run is called {', '.join(unknown)}: there are {', '.join(public)}.")
    written = []
    with tempfile.TemporaryDirectory() as temporary:
        for run in runs or public:
            project = run.split("/")[0]
            source = judged["sources"][project]
            if project not in clones:
                clones[project] = _cloned(source["repository"], source["commit"], Path(temporary) / project)
            written.append(_write(target / run, clones[project], source["commit"], public[run]))
            print(written[-1])
    return written


def _cloned(repository: str, commit: str, directory: Path) -> str:
    """Fetches one commit, and of its files only those that are asked for."""
    subprocess.run(["git", "init", "--quiet", "--bare", directory], check=True)
    _git(str(directory), "remote", "add", "origin", repository)
    _git(str(directory), "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", commit)
    return str(directory)


def _write(directory: Path, clone: str, commit: str, pattern: str) -> Path:
    names = _git(clone, "ls-tree", "-r", "--name-only", commit, f"{pattern.rpartition('/')[0]}/").decode().splitlines()
    wanted = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not wanted:
        raise SystemExit(f"{clone} has no {pattern} at {commit}.")
    directory.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        content = _git(clone, "cat-file", "blob", f"{commit}:{name}")
        if name.endswith(".tar.gz"):
            _unpack(content, directory)
        else:
            (directory / Path(name).name).write_bytes(content)
    return directory


def _unpack(content: bytes, directory: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)):
                (directory / Path(member.name).name).write_bytes(file.read())


def _git(clone: str, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", clone, *arguments], check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--from", dest="clones", action="append", default=[], metavar="PROJECT=REPOSITORY")
    given = parser.parse_args()
    fetch(given.runs, dict(each.split("=", 1) for each in given.clones), JUDGED / "public")
