"""A launch on two nodes that a test needs: this process is the launcher, and one that serves it is the second node."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from overlap_sweep.runtime import nodes
from overlap_sweep.runtime.meeting import Place

_SERVE = "import sys; from pathlib import Path; from overlap_sweep.runtime.meeting import Place; "
_SERVE += "from overlap_sweep.runtime.serve import serve; sys.exit(serve(Place(1, 2, Path(sys.argv[1]), ())))"
JOINS_S = 60.0


def start_serving(meeting_file: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts the process that serves as the second of two nodes."""
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-c", _SERVE, meeting_file], stdout=output, stderr=output)


@dataclass
class TwoNodes:
    """The two machines of this process's launch."""

    nodes: nodes.Nodes
    serving: subprocess.Popen[bytes]
    """The process on the second one."""


@contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Has this process be a launch on two nodes inside the block. What the second node prints is in `folder`."""
    file = folder / "meeting.json"
    launch = nodes.Nodes(Place(0, 2, file, ("127.0.0.1",)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "_present", [launch])
        serving = start_serving(file, folder / "node1.log")
        try:
            launch.take(2, JOINS_S)
            yield TwoNodes(launch, serving)
        finally:
            launch.close()
            try:
                serving.wait(30)
            finally:
                serving.kill()
                serving.wait()
