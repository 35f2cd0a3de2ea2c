"""What other users meet of a real sweep, and what is left of it: no port is open to them; whichever of its processes
are killed, in whatever order, none outlives them; and what they leave of temporary files the next start removes."""

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from overlap_sweep.runtime.lock import PrivateDirectory
from tests.faults.injection import TINY, faulty_launch, journal
from tests.sweeps import Launch, parent_of, wait_for

pytestmark = pytest.mark.faults

# Nothing in these processes can notice that others have ended.
STUCK = {"fault": "hangs_in_c", "times": 1, "rank": None}
DEAD_WITHIN_S = 8.0


class Sweep(NamedTuple):
    """A sweep whose two ranks are stuck."""

    launch: Launch
    process: subprocess.Popen[str]
    temporary: Path

    def kill(self, *names: str) -> None:
        """Kills them one after the other, without a pause."""
        ((agent, ranks),) = self.launch.agents().items()
        keeper = parent_of(agent)
        pids = {"launcher": self.process.pid, "guard": parent_of(keeper), "keeper": keeper, "agent": agent}
        pids |= {f"rank {rank}": pid for rank, pid in enumerate(ranks)}
        # Who ended with the one before is gone already.
        subprocess.run(["kill", "-KILL", *(str(pids[name]) for name in names)], check=False)


ORDERS = (
    ("launcher",),
    ("agent", "launcher"),
    ("rank 1", "agent", "launcher"),
    ("launcher", "keeper", "guard"),
    ("keeper", "guard", "agent", "launcher"),
)


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, ...], Sweep]]:
    """All at the same time, by whom is killed."""
    found = {}
    for names in ORDERS:
        folder = tmp_path_factory.mktemp("sweep")
        (folder / "t").mkdir()
        launch = faulty_launch(folder, [STUCK])
        launch.environment["TMPDIR"] = str(folder / "t")
        found[names] = Sweep(launch, launch.start("-m", "num_sm=1", *TINY), folder / "t")
    for one in found.values():
        wait_for(lambda one=one: len(journal(one.temporary.parent)) == 2, 120)
    yield found
    for one in found.values():
        one.process.kill()
        one.process.communicate()
        for pid in one.launch.processes():
            os.kill(pid, signal.SIGKILL)


_LISTENS = "0A"


def listening(pids: Collection[int]) -> list[str]:
    """The addresses at which one of the processes listens."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    return [_address(row[1].partition(":")[0]) for row in rows if row[3] == _LISTENS and row[9] in inodes]


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of the process's sockets."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (target := str(descriptor.readlink())).startswith("socket:["):
                yield target[len("socket:[") : -1]


def _address(words: str) -> str:
    """Of 32-bit words in the machine's order of bytes."""
    packed = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def test_no_process_of_a_group_listens_to_other_machines(sweeps: dict[tuple[str, ...], Sweep]) -> None:
    """gloo's ranks do on the loopback interface. Nobody has a store or a rendezvous to connect to."""
    for one in sweeps.values():
        ((agent, ranks),) = one.launch.agents().items()
        assert len(ranks) == 2
        assert {*listening(ranks)} == {"127.0.0.1"}
        assert listening({*one.launch.processes(), one.process.pid, agent} - {*ranks}) == []


def test_no_process_of_a_group_has_shared_memory_that_a_kill_would_leave(
    sweeps: dict[tuple[str, ...], Sweep],
) -> None:
    """What has no name any more goes with its processes."""
    for one in sweeps.values():
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in one.launch.processes())
        assert not [name for name in set(re.findall(r"/dev/shm/\S+", maps)) if Path(name).exists()]


@pytest.mark.parametrize("names", ORDERS, ids="+".join)
def test_nothing_outlives_a_kill(
    sweeps: dict[tuple[str, ...], Sweep], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sweeps[names]
    one.kill(*names)
    wait_for(lambda: not one.launch.processes(), DEAD_WITHIN_S)
    monkeypatch.setattr("tempfile.tempdir", str(one.temporary))

    def left_by_a_start() -> list[Path]:
        PrivateDirectory().remove()
        # torch keeps what it has compiled for the next process.
        return [path for path in one.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    # A process that ends gives up its environment, by which we see it, before its locks.
    wait_for(lambda: not left_by_a_start(), DEAD_WITHIN_S)
    assert not one.launch.processes(), "a process came after the kill"
