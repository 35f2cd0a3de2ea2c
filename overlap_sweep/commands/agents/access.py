"""What the server may read and write for its client, and what is there."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep.commands.compare import label_and_path
from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import find_points, find_telemetry
from overlap_sweep.trace.disk import find_traces


@dataclass(frozen=True)
class Access:
    """What the server may do for its client."""

    roots: tuple[Path, ...]
    """Directories at or below which it may read and write."""
    may_run: bool = False
    """Whether it may start a training command."""

    def path(self, given: str) -> Path:
        """Returns the path; a relative one is below a root, or below the folder that the server was started in if that
        may be read. UserError if it leads out of the roots."""
        places = [place for place in (Path(), *self.roots) if self._has(place)]
        paths = [place / given for place in places if self._has(place / given)]
        if not paths:
            roots = ", ".join(map(str, self.roots))
            raise UserError(f"{given} is outside of {roots}; start overlap-sweep mcp with --root to allow it.")
        return next((path for path in paths if _exists(path)), paths[0])

    def is_there(self, given: str) -> bool:
        """Returns whether it is a path, allowed or not, and no command or label."""
        return any(_exists(place / given) for place in (Path(), *self.roots))

    def _has(self, path: Path) -> bool:
        return any(path.resolve().is_relative_to(root.resolve()) for root in self.roots)

    def operand(self, written: str) -> str:
        """Returns what is to be compared, `[LABEL=]PATH`, with the path as the commands need it."""
        if "=" in written and self.is_there(written):
            return str(self.path(written).resolve())
        label, path = label_and_path(written)
        found = self.path(str(path))
        return f"{label}={found}" if label else str(found)


def _exists(path: Path) -> bool:
    # Path.exists raises for what is longer than any path.
    return os.path.exists(path)  # noqa: PTH110


HELD = {
    "path": "what the tool is given",
    "holds": "how many points or traces",
    "files": "names of the traces or points",
    "tool": "the tool that reads it first",
}
"""What the columns of `held` are."""


def held(directory: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each directory at or below with traces, telemetry or results; the points of a sweep are one."""
    points = find_points(directory)

    def is_of_a_point(path: Path) -> bool:
        return not {path, *path.parents}.isdisjoint(points)

    sweeps, traces = defaultdict(list), defaultdict(list)
    for point in points:
        sweeps[point if point == directory else point.parent].append(point.name)
    for path in find_traces(directory):
        if not is_of_a_point(path):
            traces[path.parent].append(path.name)
    for kind, tool, found in (("traces", "diagnose", traces), ("points", "query", sweeps)):
        for folder, names in found.items():
            yield str(folder), f"{len(names)} {kind}", ", ".join(names), tool
    for folder in find_telemetry(directory):
        if not is_of_a_point(folder):
            yield str(folder), "telemetry", "", "compare"
