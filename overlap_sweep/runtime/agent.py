"""The process that hosts the ranks of one group on a machine: torch's elastic agent around `worker.main`.

Started by `group.WorkerGroup`, one on each machine, in a session of its own. Its standard input is held open by the
process that started it: when that ends, for whatever reason, the input closes and the whole session is killed. When
this process is killed, the kernel kills its ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from pathlib import Path

from overlap_sweep.runtime import private_directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--store", required=True, help="where the ranks meet: a file, or host:port of the first node")
    arguments = parser.parse_args()
    # On one machine the launcher's, next to its socket; on several each has its own.
    folder = Path(arguments.address).parent if arguments.nodes == 1 else private_directory.PrivateDirectory().path
    threading.Thread(target=_die_with_launcher, args=(folder,), daemon=True).start()

    # Importing torch takes seconds, and the first backward pass and profile import _dynamo, another second. It is done
    # once for all ranks, which fork from this process; so it must never touch a GPU.
    if arguments.start_method == "fork":
        import torch._dynamo  # noqa: F401
    from overlap_sweep.runtime import ranks, worker

    place = worker.Place(arguments.node, arguments.nodes, arguments.store)
    given = arguments.address, arguments.device, arguments.timeout_s, place
    try:
        ranks.run_ranks(arguments.world_size // arguments.nodes, arguments.start_method, folder, given)
    finally:
        private_directory.remove(folder)


def _die_with_launcher(folder: Path) -> None:
    # Reset instead of closed, where a wrapper or a rank wrote into it what the launcher never read.
    with contextlib.suppress(ConnectionResetError):
        while os.read(0, 1):
            pass
    # The dead launcher can no longer remove what it made for this group.
    private_directory.remove(folder)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
