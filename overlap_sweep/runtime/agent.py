"""The process that hosts the ranks of one group on a machine: torch's elastic agent, torchrun's, around `worker.main`.

Started by `group.WorkerGroup`, one on each machine, under keepers. If these are killed, the kernel kills this process,
and then its ranks.
"""

import argparse
import gc
import os
from pathlib import Path

from overlap_sweep.keeper.process import end_with_parent
from overlap_sweep.runtime.lock import PrivateDirectory, remove_private


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
    end_with_parent(os.getppid())
    # On one machine the launcher's, next to its socket; on several each has its own.
    folder = Path(arguments.address).parent if arguments.nodes == 1 else PrivateDirectory().path
    # Importing torch takes seconds, and the first backward pass and profile import _dynamo, another second. Here it is
    # done once for all ranks, which fork from this process; so it must never touch a GPU. Its half a million objects
    # stay: looking among them for garbage took a fifth of the imports, and a tenth of a second of every point.
    gc.disable()
    from overlap_sweep.runtime.elastic import run_ranks
    from overlap_sweep.runtime.worker import RankNode

    if arguments.start_method == "fork":
        import torch._dynamo  # noqa: F401
    gc.freeze()
    gc.enable()
    place = RankNode(arguments.node, arguments.nodes, arguments.store)
    given = arguments.address, arguments.device, arguments.timeout_s, place, os.getpid()
    try:
        run_ranks(arguments.world_size // arguments.nodes, arguments.start_method, folder, given)
    finally:
        remove_private(folder)


if __name__ == "__main__":
    main()
