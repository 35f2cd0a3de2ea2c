"""Ranks under torch's elastic agent, torchrun's.

The launcher knows all ranks and their machines before it starts them. So an agent has nobody to meet, and nothing
listens for it: torch's own rendezvous would open ports to everybody and unpickle what it reads there.
"""

import tempfile
from pathlib import Path

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from overlap_sweep.runtime import worker

MONITOR_S = 0.1
"""Time between looks at the ranks."""


def run_ranks(count: int, start_method: str, folder: Path, arguments: tuple[object, ...]) -> None:
    """Runs so many `worker.main(*arguments)`. ChildFailedError if one of them fails, after the others were ended.

    `folder`: a private one, for the files with which they say how they failed.
    """
    # torch unpickles files of the temporary directory, so nobody else may be able to write there.
    tempfile.tempdir = str(folder)
    spec = WorkerSpec(
        role="default",
        local_world_size=count,
        entrypoint=worker.main,
        args=arguments,
        rdzv_handler=_KnownRanks(),
        max_restarts=0,
        monitor_interval=MONITOR_S,
    )
    result = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(folder)), start_method).run()
    if result.is_failed():
        raise ChildFailedError(worker.main.__name__, result.failures)


class _KnownRanks(RendezvousHandler):
    """A rendezvous within this process: of one agent, whose ranks take their numbers from `worker.RankNode`."""

    def get_backend(self) -> str:
        return "none"

    def next_rendezvous(self) -> RendezvousInfo:
        # Nobody is to meet at an address; `worker` sets one where there is one.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Has nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "none"

    def shutdown(self) -> bool:
        return True
