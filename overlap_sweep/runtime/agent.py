"""The process that hosts one torchrun group: torch's elastic launch around `worker.main`.

Started by `group.WorkerGroup` in a session of its own. Its standard input is a pipe that the launcher holds open: when
the launcher ends, for whatever reason, the pipe closes and the whole session is killed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import threading
import uuid
from multiprocessing import forkserver
from pathlib import Path

DIRECTORY_PREFIX = "overlap_sweep_"
"""Prefix of the temporary directories in which launchers listen for their groups."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--start-method", choices=("forkserver", "spawn"), default="forkserver")
    arguments = parser.parse_args()
    directory = Path(arguments.address).parent
    threading.Thread(target=_die_with_launcher, args=(directory,), daemon=True).start()

    # Importing torch takes seconds, and the first backward pass and profile import _dynamo, another second. The fork
    # server does it once for all workers, in parallel with this process.
    if arguments.start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["overlap_sweep.runtime.worker", "torch._dynamo"])
        forkserver.ensure_running()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from overlap_sweep.runtime import worker

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=arguments.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=arguments.start_method,
        # So that its files are removed with the group's.
        logs_specs=DefaultLogsSpecs(log_dir=str(directory)),
    )
    elastic_launch(config, worker.main)(arguments.address, arguments.device, arguments.timeout_s)


def _die_with_launcher(directory: Path) -> None:
    while os.read(0, 1):
        pass
    # The dead launcher can no longer remove the directory that it made for this group.
    if directory.name.startswith(DIRECTORY_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
