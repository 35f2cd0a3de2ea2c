"""The launcher's side of a torchrun group: starts it on one or more machines, sends it points, kills it when needed.

A pool keeps one group alive from point to point.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import NodeLost, PointFailed
from overlap_sweep.keeper import Command, Program
from overlap_sweep.report.numbers import counted
from overlap_sweep.results.identity import machine
from overlap_sweep.results.run_directory import Attempt
from overlap_sweep.runtime.channel import SECRET, Door, PointRequest, Reply, free_port, listen, new_secret, port_of
from overlap_sweep.runtime.deferred import catch_up
from overlap_sweep.runtime.group_config import GroupConfig, worker_environment
from overlap_sweep.runtime.lock import PrivateDirectory
from overlap_sweep.runtime.meeting import LOOPBACK
from overlap_sweep.runtime.nodes import Node, OtherNode, take, with_hosts
from overlap_sweep.runtime.outcome import tail
from overlap_sweep.runtime.progress import measuring, now_doing

ACCEPT_S = 0.2
"""Time between looks at the agents while ranks are awaited."""

AGENT_S = 0.05
"""Time between looks at the agents while one is expected to end."""

SETTLE_S = 5.0
"""Time that other ranks have to answer after one has failed, before the group counts as broken."""

GRACE_S = 2.0
"""Time that an agent has to remove its files when the launcher has ended."""

PROFILED_END_S = 120.0
"""Time that workers under a profiler have to exit; the profiler writes its records at exit."""

GROUP_LOG = "workers.log"

_shared: WorkerPool | None = None


class WorkerGroup:
    """`with WorkerGroup(config, log) as group: group.run(...)`: no process outlives the block."""

    def __init__(self, config: GroupConfig, log: Path) -> None:
        """`log`: file for output of the processes that belongs to no point."""
        self.config = config
        self._log_path = log
        self._channels: list[Connection] = []
        self._nodes: list[Node] = []
        self._agents: list[Command] = []
        """The process of each node that hosts its ranks."""
        self._directory: PrivateDirectory | None = None
        self._door: Door | None = None
        self._killed = False

    def __enter__(self) -> WorkerGroup:
        """PointFailed if the group does not start, NodeLost if a machine is missing."""
        door = self._door or self.start()
        try:
            with door:
                self._channels = self._accept(door)
        except BaseException:
            self.kill()
            raise
        return self

    def start(self) -> Door:
        """Starts the processes, which import torch for seconds, without waiting for them; returns where they join.
        NodeLost if a machine is missing."""
        self._nodes = take(self.config.nodes, self.config.start_timeout_s)
        self._machine = with_hosts(
            machine(self.config.device, worker_environment(self.config), self.config.world_size), self._nodes
        )
        if len(self._nodes) == 1:
            # For the socket. `check_temporary_directory` limits its length.
            self._directory = PrivateDirectory()
        try:
            listener = listen(self._directory.path / "workers" if self._directory else None)
            self._door = Door(listener, new_secret())
            self._start_agents(self._door)
        except BaseException:
            self.kill()
            raise
        return self._door

    def _start_agents(self, door: Door) -> None:
        alone = self._directory is not None
        store = str(self._directory.path / "store") if self._directory else f"{self._nodes[0].address}:{free_port()}"
        for index, node in enumerate(self._nodes):
            address = door.listener.getsockname() if alone else f"{node.launcher}:{port_of(door.listener)}"
            environment = worker_environment(self.config) | {SECRET: door.secret}
            if node.interface:
                # By itself gloo takes the interface of the machine's name: of several machines that may be 127.0.0.1's,
                # and of one alone another, at which it would listen to the network.
                environment.setdefault("GLOO_SOCKET_IFNAME", node.interface)
            if alone:
                environment.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
            words = self._words(address, store, index)
            log = self._log_path.with_suffix(f".node{index}.log") if index else self._log_path
            self._agents.append(Command(Program(words, environment, log, grace_s=GRACE_S), node.start))

    def _words(self, address: str, store: str, node: int) -> list[str]:
        """Returns the command line of a node's agent."""
        config = self.config
        words = [*config.wrapper, sys.executable, "-m", "overlap_sweep.runtime.agent", "--address", address]
        words += ["--world-size", str(config.world_size), "--device", config.device, "--store", store]
        # The collectives' timeout comes after the launcher's, whose message says more about the point.
        words += ["--timeout-s", str(config.timeout_s + 60)]
        if config.nodes > 1:
            words += ["--nodes", str(config.nodes), "--node", str(node)]
        if config.wrapper:
            # A profiler records processes that load it and writes when they exit; forked processes do neither.
            words += ["--start-method", "spawn"]
        return words

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, door: Door) -> list[Connection]:
        deadline = time.monotonic() + self.config.start_timeout_s
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self.config.world_size:
            if any(agent.wait() is not None for agent in self._agents):
                raise PointFailed(f"the worker group died at start ({self._cause_of_death()})\n{self._log_tail()}")
            if time.monotonic() > deadline:
                limit = f"runtime.start_timeout_s={self.config.start_timeout_s:g}"
                joined = f"only {len(by_rank)} of {self.config.world_size} ranks joined within {limit}"
                raise PointFailed(f"{joined}{self._where_missing(by_rank)}\n{self._log_tail()}".rstrip())
            if (channel := door.accept(ACCEPT_S)) and channel.poll(max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(EOFError, ConnectionError):
                    by_rank[channel.recv()] = channel
        return [by_rank[rank] for rank in range(self.config.world_size)]

    def _where_missing(self, by_rank: Mapping[int, Connection]) -> str:
        """Returns the nodes of ranks that did not join, if there are several nodes."""
        if self.config.nodes == 1:
            return ""
        of_node = self.config.world_size // self.config.nodes
        nodes = sorted({rank // of_node for rank in range(self.config.world_size) if rank not in by_rank})
        return "; the others are on node " + ", ".join(f"{node} ({self._nodes[node].host})" for node in nodes)

    def run(
        self, point: ResolvedPoint, directory: Path, timeout_s: float, earlier_attempts: Sequence[Attempt] = ()
    ) -> Reply:
        """Runs the point on every rank; returns the reply of the first rank that is not `ok`, else rank 0's.

        PointFailed if the group died or did not answer within `timeout_s`. Then, and after a failure that not every
        rank calls `final`, the group is killed, since memory, streams and collectives may be in any state.
        """
        try:
            self._send(PointRequest(point, directory.resolve(), self._machine, earlier_attempts, timeout_s))
            catch_up()
            replies = self._collect(timeout_s)
        except BaseException:
            # Also when the launcher is asked to stop: workers that go on could still write a result.
            self.kill()
            raise
        wrong = [reply for reply in replies.values() if reply.status != "ok"]
        failed = [reply for reply in wrong if reply.status == "failed"]
        if failed and not (len(replies) == len(self._channels) and all(reply.final for reply in failed)):
            self.kill()
        return wrong[0] if wrong else replies[0]

    @property
    def has_joined(self) -> bool:
        return bool(self._channels)

    @property
    def alive(self) -> bool:
        with contextlib.suppress(NodeLost, PointFailed):
            return not self._killed and all(agent.wait() is None for agent in self._agents)
        return False

    def _send(self, request: PointRequest) -> None:
        try:
            for channel in self._channels:
                channel.send(request)
        except OSError:
            raise PointFailed(f"the worker group died ({self._cause_of_death()})\n{self._log_tail()}") from None

    def _collect(self, timeout_s: float) -> dict[int, Reply]:
        deadline = time.monotonic() + timeout_s
        replies: dict[int, Reply] = {}
        failing = False
        while len(replies) < len(self._channels):
            waiting = {channel: rank for rank, channel in enumerate(self._channels) if rank not in replies}
            others = [node for node in self._nodes if isinstance(node, OtherNode)]
            ready = wait([*waiting, *(node.connection for node in others)], max(0.0, deadline - time.monotonic()))
            for node in others:
                node.hear()
            if not ready and failing:
                return replies
            if not ready:
                silent = list(waiting.values())
                raise PointFailed(f"no answer from ranks {silent} within {timeout_s:g} s", timed_out=True)
            for channel in waiting.keys() & ready:
                try:
                    replies[waiting[channel]] = reply = channel.recv()
                except (EOFError, OSError):
                    # Over TCP also that a machine is unreachable, which its own connection may not have noticed yet.
                    raise PointFailed(f"rank {waiting[channel]} died ({self._cause_of_death()})") from None
                if reply.status == "failed" and not failing:
                    failing, deadline = True, min(deadline, time.monotonic() + SETTLE_S)
        return replies

    def _cause_of_death(self) -> str:
        """Waits for an agent to end; returns the last exception or exit code in its log. NodeLost if that is the cause:
        the group is as good as before."""
        until = time.monotonic() + SETTLE_S
        # Later ones end because of the first: the others' ranks have lost their connections.
        while time.monotonic() < until:
            for agent in self._agents:
                if (status := agent.wait(AGENT_S)) is not None:
                    # Earlier groups wrote to the same log; their errors are not this group's cause of death.
                    text = tail(agent.log, 200, agent.log_start)
                    causes = re.findall(r"^\s*(\w*(?:Error|Exception): .+|exitcode .+)$", text, re.MULTILINE)
                    return " ".join(causes[-1].split()) if causes else f"its agent exited with {status}"
        return "cause unknown: its agent is still running"

    def _log_tail(self) -> str:
        """Returns the end of the nodes' logs."""
        return "\n".join(filter(None, (tail(agent.log, 20, agent.log_start) for agent in self._agents)))

    def close(self) -> None:
        """Closes the connections, upon which workers exit by themselves, and then kills the remaining processes."""
        if not self._killed:
            # Who has not joined would not notice.
            ends_s = (PROFILED_END_S if self.config.wrapper else SETTLE_S) if self.has_joined else 0.0
            self._disconnect()
            until = time.monotonic() + ends_s
            with contextlib.suppress(NodeLost, PointFailed):
                for agent in self._agents:
                    agent.wait(max(0.0, until - time.monotonic()))
            self.kill()

    def kill(self) -> None:
        """Kills every process of the group."""
        self._killed = True
        self._disconnect()
        for agent in self._agents:
            agent.end(at_once=True)
        if self._door:
            self._door.close()
        if self._directory:
            self._directory.remove()
            self._directory = None

    def _disconnect(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = []


class WorkerPool:
    """Keeps at most one group alive, that of the last point: idle workers would disturb the measurements of others."""

    def __init__(self, log: Path) -> None:
        """`log`: file for output of the groups that belongs to no point."""
        self._log = log
        self._group: WorkerGroup | None = None

    def run(
        self, point: ResolvedPoint, directory: Path, timeout_s: float, earlier_attempts: Sequence[Attempt] = ()
    ) -> Reply:
        """Runs the point like `WorkerGroup.run`, in the living group if its configuration is the same, else in a new
        one."""
        config, group = GroupConfig.of(point, directory), self._group
        fits = group is not None and group.config == config and group.alive
        if group is None or not fits or (point.runtime.isolate and group.has_joined):
            self.close()
            self._group = group = WorkerGroup(config, self._log)
        if not group.has_joined:
            now_doing(f"starting {counted(config.world_size, 'worker')} for {directory.name}")
            group.__enter__()
            now_doing(measuring(directory.name, timeout_s))
        return group.run(point, directory, timeout_s, earlier_attempts)

    def start_early(self, point: ResolvedPoint) -> None:
        """Starts a group on this machine for a point that will be run soon, if there is none."""
        config = GroupConfig.of(point)
        if self._group is None and config.nodes == 1 and not config.wrapper:
            self._group = WorkerGroup(config, self._log)
            # The point itself tries again, and says what is wrong.
            with contextlib.suppress(OSError):
                self._group.start()

    def close(self) -> None:
        # The ranks will have nothing to do for long.
        catch_up()
        if self._group:
            self._group.close()
        self._group = None


def shared_pool(log: Path) -> WorkerPool:
    """Returns this process's pool, which is closed at exit. The first call's `log` is used."""
    global _shared
    if _shared is None:
        _shared = WorkerPool(log)
        atexit.register(_shared.close)
    return _shared
