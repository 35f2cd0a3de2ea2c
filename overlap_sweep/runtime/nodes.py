"""The machines of a launch, on which processes of points run: the launcher's own, and those that serve it; how many of
them a point's ranks are spread over."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from overlap_sweep import workloads
from overlap_sweep.config import PointConfig, ResolvedPoint
from overlap_sweep.errors import NodeLost, UserError
from overlap_sweep.gpus import elsewhere
from overlap_sweep.keeper import Keeper, OwnKeeper, Program, Start
from overlap_sweep.runtime import channel
from overlap_sweep.runtime.meeting import Meeting, Place, interface_of, own_addresses, write_meeting
from overlap_sweep.runtime.serve import EndCommand, Goodbye, Hello, Said, StartCommand

POLL_S = 0.1

KILLED_S = 60.0
"""Time that another machine has to end a command that is killed."""

LEAVE_S = 10.0
"""Time since its start that a launch by torchrun does not end before all machines have joined, which start with it."""


class OwnNode:
    """The launcher's machine. What is said of it is as in `Hello`."""

    start: Start = OwnKeeper

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.host, self.address, self.launcher = platform.node(), address, "127.0.0.1"
        self.interface = interface_of(address)


class OtherNode:
    """Another machine, over the connection to the process that serves there. Its methods and those of its keepers raise
    NodeLost once the connection is lost."""

    def __init__(self, hello: Hello, connection: Connection) -> None:
        self.number, self.host, self.address = hello.number, hello.host, hello.address
        self.launcher, self.interface = hello.launcher, hello.interface
        self.connection = connection
        self._numbers = count()
        self.said: dict[int, list[Said]] = {}
        """By the number of a command what its keepers have said and nobody has taken."""
        self.lost = False

    def start(self, program: Program) -> Keeper:
        """Starts a command, whose environment differs from the machine's as it does from the launcher's."""
        number = next(self._numbers)
        plain = replace(program, environment={}, log=program.log.absolute())
        self.send(StartCommand(number, plain, _changes(program.environment)))
        return _KeeperThere(self, number)

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._loss() from None

    def hear(self, timeout_s: float = 0.0) -> None:
        """Takes in what the machine has said, after waiting for it at most so long."""
        try:
            while self.connection.poll(timeout_s):
                timeout_s = 0.0
                message: Said = self.connection.recv()
                self.said.setdefault(message.number, []).append(message)
        except (EOFError, OSError):
            raise self._loss() from None

    def give_up(self) -> None:
        """Ends the connection, upon which the machine's commands end by themselves."""
        self.lost = True
        self.connection.close()

    def _loss(self) -> NodeLost:
        self.give_up()
        return NodeLost(f"node {self.number} ({self.host}) is lost: its process no longer answers")


Node = OwnNode | OtherNode
"""A machine on which commands of a point can be started."""


class _KeeperThere:
    """The keepers of a command on another machine."""

    def __init__(self, node: OtherNode, number: int) -> None:
        self._node, self._number = node, number
        self.is_gone = self._is_killed = False

    def hear(self, timeout_s: float) -> list[str]:
        until = time.monotonic() + timeout_s
        while not self.is_gone and self._number not in self._node.said:
            if self._node.lost:
                raise NodeLost(f"node {self._node.number} ({self._node.host}) is lost")
            left_s = until - time.monotonic()
            self._node.hear(min(POLL_S, max(0.0, left_s)))
            if left_s <= 0:
                break
        said = self._node.said.pop(self._number, [])
        self.is_gone = self.is_gone or any(one.line is None for one in said)
        for problem in filter(None, (one.problem for one in said)):
            raise OSError(f"node {self._node.number} ({self._node.host}): {problem}")
        return [one.line for one in said if one.line is not None]

    def hang_up(self) -> None:
        self._node.send(EndCommand(self._number, at_once=False))

    def kill(self) -> None:
        if self._is_killed or self._node.lost:
            # Without the connection the machine's commands end by themselves.
            return
        self._is_killed = True
        until, lines = time.monotonic() + KILLED_S, []
        with contextlib.suppress(NodeLost):
            self._node.send(EndCommand(self._number, at_once=True))
            while not self.is_gone and not self._node.lost:
                if time.monotonic() > until:
                    self._node.give_up()
                    return
                with contextlib.suppress(OSError):
                    lines += self.hear(POLL_S)
        self._node.said[self._number] = [Said(self._number, line) for line in lines]


def _changes(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Returns how the environment differs from this process's."""
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    return {**changed, **dict.fromkeys(os.environ.keys() - environment.keys())}


_present: list[Nodes] = []
"""The machines of this launch; empty if it is this machine alone."""


class Nodes:
    """The machines of a launch. Others may join until it ends."""

    def __init__(self, place: Place) -> None:
        """Writes the meeting file of the place, which is the launcher's."""
        assert place.number == 0
        self.count, self._place = place.count, place
        self._own = OwnNode()
        self._others: dict[int, OtherNode] = {}
        self.late = ""
        """Why a machine that did not join in time is not waited for again."""
        self._begun = time.monotonic()
        self._door = channel.Door(channel.listen(None), channel.new_secret())
        hosts = dict.fromkeys((*place.hosts, platform.node(), *own_addresses()))
        write_meeting(place.file, Meeting(tuple(hosts), channel.port_of(self._door.listener), self._door.secret))

    def take(self, count: int, limit_s: float) -> list[Node]:
        """Returns so many machines, the launcher's first. NodeLost if one is lost or has not joined within the limit;
        it is not waited for again."""
        until = time.monotonic() + (0.0 if self.late else limit_s)
        while missing := sorted(set(range(1, count)) - self._others.keys()):
            if not self._admit(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                listed, limit = ", ".join(map(str, missing)), f"runtime.start_timeout_s={limit_s:g}"
                mend = f"see its log, next to this one, and whether it reaches every port of {self._place.hosts[0]}"
                if self._place.torchrun:
                    mend = "start launch.py there, too, in the same shared folder"
                self.late = f"node {listed} of {self.count} has not joined within {limit}; {mend}"
                raise NodeLost(self.late)
        others = [self._others[number] for number in range(1, count)]
        for other in others:
            if not other.lost:
                other.hear()
            if other.lost:
                raise NodeLost(f"node {other.number} ({other.host}) is lost")
        return [self._own, *others]

    @property
    def lost(self) -> bool:
        """Returns whether points that need all machines can no longer run."""
        return bool(self.late) or any(other.lost for other in self._others.values())

    def _admit(self, timeout_s: float) -> bool:
        """Waits for a machine to join; returns whether one did."""
        connection = self._door.accept(timeout_s)
        if connection is None:
            return False
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(channel.PROOF_S):
                hello: Hello = connection.recv()
                self._others[hello.number] = OtherNode(hello, connection)
                # The address at which one machine reaches this one serves the others, too.
                self._own = OwnNode(channel.own_host(connection))
                return True
        connection.close()
        return False

    def close(self) -> None:
        """Takes leave of the other machines."""
        # Some may not have been needed yet. Those of a launch that ends at once, as with a wrong option, would
        # otherwise wait for it in vain.
        until = self._begun + (LEAVE_S if self._place.torchrun and not self.late else 0.0)
        while len(self._others) < self.count - 1 and self._admit(max(0.0, until - time.monotonic())):
            pass
        if len(self._others) < self.count - 1 and not self._place.torchrun:
            write_meeting(self._place.file, Meeting((), 0, "", ended=True))
        else:
            self._place.file.unlink(missing_ok=True)
        for other in self._others.values():
            with contextlib.suppress(NodeLost):
                if not other.lost:
                    other.send(Goodbye())
        self._door.close()


def gather(place: Place) -> Nodes:
    """Has other machines join this process, which is the launcher. Returns them; they are closed at exit."""
    found = Nodes(place)
    _present.append(found)
    atexit.register(found.close)
    return found


def nodes_here() -> int:
    """Returns the number of machines that this launch has, or waits for."""
    return _present[-1].count if _present else 1


def late() -> str:
    """Returns why a machine counts as one that never joined this launch; empty if none does."""
    return _present[-1].late if _present else ""


def lost() -> bool:
    """Returns whether a machine of this launch is lost or never joined."""
    return bool(_present) and _present[-1].lost


def take(count: int, limit_s: float) -> list[Node]:
    """Returns so many machines as `Nodes.take` does."""
    if count == 1:
        return [OwnNode()]
    assert count <= nodes_here()
    return _present[-1].take(count, limit_s)


def with_hosts(machine: Mapping[str, object], nodes: Sequence[Node]) -> dict[str, object]:
    """Returns the description of a machine with the names of all that a point has, if these are several."""
    return {**machine, **({"hosts": [node.host for node in nodes]} if len(nodes) > 1 else {})}


def nodes_of(point: PointConfig) -> int:
    """Returns the machines that a point gets. UserError if this launch has fewer."""
    launcher = HydraConfig.instance().cfg.hydra.launcher if HydraConfig.initialized() else None  # type: ignore[union-attr]
    wanted = requested(point, launcher)
    if not elsewhere() and wanted > nodes_here():
        raise UserError(
            f"runtime.nodes={wanted} needs {wanted} machines, but this launch has {nodes_here()}; use "
            f"hydra/launcher=slurm, or start launch.py on each machine by torchrun --nnodes={wanted} (see clusters.md)."
        )
    return wanted


def requested(config: PointConfig, launcher: DictConfig | None) -> int:
    """Returns the machines that the user asked for: `runtime.nodes`, `hydra.launcher.nodes`, or those that it takes to
    have a point's GPUs with `hydra.launcher.gpus_per_node`; otherwise 1. UserError if two of them differ."""
    nodes, of_launcher = config.runtime.nodes, given(launcher, "nodes")
    if nodes and of_launcher and nodes != of_launcher:
        raise UserError(f"runtime.nodes={nodes} and hydra.launcher.nodes={of_launcher} differ; give only one.")
    if asked := nodes or of_launcher:
        return int(asked)
    gpus_per_node = given(launcher, "gpus_per_node")
    if not gpus_per_node or config.runtime.device == "cpu":
        return 1
    return max(1, -(-workloads.gpus(config) // gpus_per_node))


def given(launcher: DictConfig | None, option: str) -> int | None:
    """Returns an option of the launcher if the user gave it: the defaults depend on the points, and these on it."""
    # Asking whether it is `in` the configuration would resolve the default, which asks for this.
    if launcher is None or option not in list(launcher) or OmegaConf.is_interpolation(launcher, option):
        return None
    return None if launcher[option] is None else int(launcher[option])


def nodes_refusal(point: ResolvedPoint) -> str | None:
    """Returns why a completed point's ranks cannot be spread over its machines; None if they can."""
    nodes = point.nodes
    if nodes == 1:
        return None
    ranks = point.world_size
    if ranks % nodes:
        return f"{ranks} ranks cannot be spread evenly over runtime.nodes={nodes}"
    if workloads.of(point).idle_gpus(point):
        return f"workload={point.workload.name} needs a GPU without a rank, which only one node has"
    return workloads.of(point).on_one_node(point)
