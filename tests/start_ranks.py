"""Starts ranks as torchrun does, which takes as long to start as a rank: `start_ranks.py COUNT SCRIPT ARGUMENTS...`."""

import os
import socket
import subprocess
import sys


def main(count: int, *command: str) -> int:
    """Returns the first exit status that is not 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = []
    for rank in range(count):
        environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen([sys.executable, *command], env=environment))
    return next(filter(None, [rank.wait() for rank in ranks]), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
