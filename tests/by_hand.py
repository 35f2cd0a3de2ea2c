"""Launches on two nodes as users start them by hand: launch.py by one torchrun on each. Both nodes are this machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from overlap_sweep.runtime.channel import listen, port_of
from overlap_sweep.runtime.meeting import BY_HAND
from tests.sweeps import ROOT, Launch

NODE = "OVERLAP_SWEEP_TEST_NODE"
"""Variable that tells the processes of one node from those of the other."""
FSDP = (
    *("-m", "workload=fsdp", "runtime.device=cpu", "distributed.dp_size=4", "ranking.num_layers=1"),
    *("ranking.sequence_length=8", "training.max_steps=2", "training.batch_size=1", "workload.repeats=3"),
)
"""A sweep of small trainings on four ranks, which runs on one or two nodes."""


class ByHand:
    """A launch on two nodes. Its processes are tagged like those of `Launch`, and by their node."""

    def __init__(
        self,
        launch: Launch,
        arguments: Sequence[str],
        *,
        torchrun: bool = True,
        within: Sequence[Sequence[str]] = ((), ()),
        address: str = "127.0.0.1",
    ) -> None:
        """Starts both. Without torchrun each has the variables that this would have set: it takes seconds to start.
        `within`: for each node the words that run a command there; `address`: the first node's."""
        self.launch, self._torchrun, self._within, self._address = launch, torchrun, within, address
        # The second node looks whether the first one's torchrun listens.
        self._listening = listen(None)
        self._port = port_of(self._listening)
        if torchrun:
            self._listening.close()
        words = [*arguments, f"hydra.sweep.dir={launch.directory}"]
        self.nodes = [self._start(node, words) for node in range(2)]

    def _start(self, node: int, words: list[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.launch.environment, "OVERLAP_SWEEP_TEST": self.launch.tag, NODE: str(node)}
        if self._torchrun:
            by = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
            by += [f"--master-addr={self._address}", f"--master-port={self._port}"]
        else:
            by = []
            environment |= variables_of_torchrun(node, port=self._port)
        return subprocess.Popen(
            [*self._within[node], sys.executable, *by, "launch.py", *words],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    @property
    def meeting_file(self) -> Path:
        return ROOT / BY_HAND / f"{self._address.replace('.', '_')}_{self._port}_none.json"

    def processes(self, node: int, part: str) -> list[int]:
        """Living processes of a node whose command line has that part."""
        return [pid for pid, command in self.launch.processes(f"{NODE}={node}").items() if part in command]

    def end(self, timeout_s: float = 60.0) -> list[tuple[str, str]]:
        """Returns what the processes of each node printed, once all have ended."""
        return [process.communicate(timeout=timeout_s) for process in self.nodes]

    def kill(self) -> None:
        """Leaves nothing behind, also if a test failed: then pytest shows what was printed."""
        self._listening.close()
        for node, process in enumerate(self.nodes):
            process.kill()
            if process.stdout and not process.stdout.closed:
                print(f"node {node}:", *process.communicate(), sep="\n")
        self.meeting_file.unlink(missing_ok=True)


def variables_of_torchrun(node: int, *, nodes: int = 2, per_node: int = 1, port: int = 29500) -> dict[str, str]:
    """The variables that torchrun sets for the first process of a node."""
    sizes = {"LOCAL_WORLD_SIZE": per_node, "GROUP_WORLD_SIZE": nodes}
    sizes |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), nodes * per_node)
    ranks = {"LOCAL_RANK": 0, "GROUP_RANK": node, **dict.fromkeys(("RANK", "ROLE_RANK"), node * per_node)}
    named = {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    elastic = {"RUN_ID": "none", "RESTART_COUNT": "0", "MAX_RESTARTS": "0", "USE_AGENT_STORE": "True"}
    return {
        **{name: str(value) for name, value in (sizes | ranks).items()},
        **named,
        **{f"TORCHELASTIC_{name}": value for name, value in elastic.items()},
    }
