"""The machines of this launch: the launcher's own, and those whose processes serve it."""

from __future__ import annotations

import atexit
import contextlib
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

from overlap_sweep.errors import NodeLost
from overlap_sweep.runtime import channel
from overlap_sweep.runtime.interfaces import own_addresses
from overlap_sweep.runtime.meeting import Meeting, Place, write_meeting
from overlap_sweep.runtime.node import Goodbye, Hello, Node, OtherNode, OwnNode

LEAVE_S = 10.0
"""Time since its start that a launch by torchrun does not end before all machines have joined, which start with it."""

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


def with_hosts(machine: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, Any]:
    """Returns the description of a machine with the names of all that a point has, if these are several."""
    return {**machine, **({"hosts": [node.host for node in nodes]} if len(nodes) > 1 else {})}
