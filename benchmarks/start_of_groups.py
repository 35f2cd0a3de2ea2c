"""Measures how long a torchrun group takes to start, on one node and on two. Both nodes are this machine.

python benchmarks/start_of_groups.py [repeats]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from overlap_sweep.runtime import nodes
from overlap_sweep.runtime.group import WorkerGroup
from overlap_sweep.runtime.group_config import GroupConfig
from overlap_sweep.runtime.meeting import Place

ROOT = Path(__file__).parent.parent
SERVE = (
    "import sys; from pathlib import Path; from overlap_sweep.runtime.meeting import Place; "
    "from overlap_sweep.runtime.serve import serve; sys.exit(serve(Place(1, 2, Path(sys.argv[1]), ())))"
)


def start_s(ranks: int, count: int, folder: Path) -> float:
    """Returns the seconds until all ranks have joined."""
    config = GroupConfig(
        world_size=ranks,
        device="cpu",
        threads_per_rank=1,
        multicast=False,
        max_connections=1,
        start_timeout_s=120.0,
        timeout_s=60.0,
        nodes=count,
    )
    begun = time.perf_counter()
    with WorkerGroup(config, folder / "workers.log"):
        return time.perf_counter() - begun


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = Place(0, 2, folder / "meeting.json", ("127.0.0.1",))
        serving = subprocess.Popen([sys.executable, "-c", SERVE, place.file], cwd=ROOT)
        launch = nodes.gather(place)
        launch.take(2, 60.0)
        print("ranks  nodes  seconds until all ranks have joined: median (least to most)")
        for ranks in (2, 4):
            for count in (1, 2):
                taken = [start_s(ranks, count, folder) for _ in range(repeats)]
                print(f"{ranks:5}  {count:5}  {statistics.median(taken):5.1f} ({min(taken):.1f} to {max(taken):.1f})")
        launch.close()
        serving.wait()


if __name__ == "__main__":
    main()
