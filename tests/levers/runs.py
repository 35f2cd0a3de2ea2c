"""Runs scripts with levers, as `workload=job` does, and returns what they did."""

import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_sweep.effects import Difference
from overlap_sweep.effects.differences import differences
from overlap_sweep.effects.fingerprint import Fingerprint
from overlap_sweep.effects.runs import read_prints
from overlap_sweep.levers import Value
from overlap_sweep.levers.status import APPLIED, SKIPPED, statuses
from overlap_sweep.program import environment_with_package, environment_with_recorder
from overlap_sweep.recorder.recording import Wanted

TRAINING = Path(__file__).with_name("training.py")


@dataclass(frozen=True)
class Ran:
    applied: set[str]
    skipped: dict[str, str]
    """Reasons by lever."""
    prints: list[Fingerprint]
    output: str

    def differences(self, before: "Ran") -> list[Difference]:
        return differences(before.prints, self.prints)


def run(
    directory: Path, script: str, *arguments: str, levers: dict[str, Value] | None = None, ranks: int = 2, **wanted: Any
) -> Ran:
    """Returns what the script's ranks did, all of them."""
    directory.mkdir()
    file = directory / "script.py"
    file.write_text(script)
    asked = Wanted(
        directory=str(directory), levers=levers or {}, **{"skip_steps": 4, "steps": 3, "profile_steps": 2} | wanted
    )
    shared = environment_with_recorder(environment_with_package()) | asked.as_environment()
    # As torchrun does, which takes as long to start as a rank.
    shared |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(file), *arguments]
        with (directory / f"output{rank}").open("w") as output:
            started.append(subprocess.Popen(command, env=shared | own, stdout=output, stderr=subprocess.STDOUT))
    codes = [one.wait() for one in started]
    outputs = [(directory / f"output{rank}").read_text() for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(outputs)
    said = [one for of_process in statuses(directory) for one in of_process]
    traces = sorted(directory.glob("trace_rank*"))
    prints = [one.print for one in read_prints(traces).values() if one.print]
    count = Counter(one.lever for one in said if one.status == APPLIED)
    return Ran(
        applied={lever for lever, processes in count.items() if processes == ranks},
        skipped={one.lever: one.reason for one in said if one.status == SKIPPED},
        prints=sorted(prints, key=lambda one: one.rank or 0),
        output="".join(outputs),
    )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port: int = one.getsockname()[1]
        return port
