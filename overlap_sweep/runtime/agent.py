"""The process that hosts one torchrun group: torch's elastic launch around `worker.main`.

Started by `group.WorkerGroup`, one on each machine, in a session of its own. Its standard input is held open by the
process that started it: when that ends, for whatever reason, the input closes and the whole session is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import uuid
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

DIRECTORY_PREFIX = "overlap_sweep_"
"""Prefix of the temporary directories in which launchers listen for their groups."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--start-method", choices=("forkserver", "spawn"), default="forkserver")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--own-address", help="IP address at which the other nodes reach this one")
    parser.add_argument("--rendezvous", default="localhost:0", help="host and port of the first node")
    parser.add_argument("--run-id", default="")
    parser.add_argument("--start-timeout-s", type=float, default=60.0)
    arguments = parser.parse_args()
    threading.Thread(target=_die_with_launcher, args=(arguments.address,), daemon=True).start()

    # Importing torch takes seconds, and the first backward pass and profile import _dynamo, another second. The fork
    # server does it once for all workers, in parallel with this process.
    if arguments.start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["overlap_sweep.runtime.worker", "torch._dynamo"])
        forkserver.ensure_running()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from overlap_sweep.runtime import worker

    config = LaunchConfig(
        min_nodes=arguments.nodes,
        max_nodes=arguments.nodes,
        nproc_per_node=arguments.world_size // arguments.nodes,
        run_id=arguments.run_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=arguments.rendezvous,
        rdzv_configs=_of_first_node(arguments) if arguments.nodes > 1 else {},
        local_addr=arguments.own_address,
        max_restarts=0,
        monitor_interval=0.1,
        start_method=arguments.start_method,
        # So that its files are removed with the group's; of several nodes there are none.
        logs_specs=DefaultLogsSpecs(log_dir=str(_directory(arguments.address)) if arguments.nodes == 1 else os.devnull),
    )
    place = worker.Place(arguments.node, arguments.nodes)
    elastic_launch(config, worker.main)(arguments.address, arguments.device, arguments.timeout_s, place)


def _of_first_node(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of torch's rendezvous for a store that the first node hosts."""
    return {"is_host": arguments.node == 0, "read_timeout": int(arguments.start_timeout_s)}


def _directory(address: str) -> Path:
    return Path(address).parent


def _die_with_launcher(address: str) -> None:
    # Reset instead of closed, where a wrapper or a rank wrote into it what the launcher never read.
    with contextlib.suppress(ConnectionResetError):
        while os.read(0, 1):
            pass
    # The dead launcher can no longer remove the directory that it made for this group.
    if _directory(address).name.startswith(DIRECTORY_PREFIX):
        shutil.rmtree(_directory(address), ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
