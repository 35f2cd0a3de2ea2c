"""The launcher's side of a torchrun group: starts it, sends it points, kills it when needed.

A pool keeps one group alive from point to point.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from overlap_sweep.errors import PointFailed
from overlap_sweep.results.identity import machine
from overlap_sweep.results.run_directory import Attempt
from overlap_sweep.runtime.agent import DIRECTORY_PREFIX
from overlap_sweep.runtime.group_config import GroupConfig, worker_environment
from overlap_sweep.runtime.outcome import tail
from overlap_sweep.runtime.stopping import STOP_AFTER_POINT

SETTLE_S = 5.0
"""Time that other ranks have to answer after one has failed, before the group counts as broken."""

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
        self._killed = False

    def __enter__(self) -> WorkerGroup:
        # A private directory, since nobody else may connect. `check_temporary_directory` limits its length.
        self._directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        self._log: IO[bytes] = self._log_path.open("ab")
        # Earlier groups wrote to the same log; their errors are not this group's cause of death.
        self._log_start = self._log_path.stat().st_size
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = str(self._directory / "workers")
        listener.bind(address)
        listener.listen(self.config.world_size)
        command = [*self.config.wrapper, sys.executable, "-m", "overlap_sweep.runtime.agent", "--address", address]
        command += ["--world-size", str(self.config.world_size), "--device", self.config.device]
        # The collectives' timeout comes after the launcher's, whose message says more about the point.
        command += ["--timeout-s", str(self.config.timeout_s + 60)]
        if self.config.wrapper:
            # A profiler records processes that load it and writes when they exit; forked processes do neither.
            command += ["--start-method", "spawn"]
        environment = worker_environment(self.config)
        self._machine = machine(self.config.device, environment, self.config.world_size)
        # Cluster managers send this signal to every process of a job, but only the launcher handles it. Child processes
        # inherit the blocked signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_AFTER_POINT])
        try:
            self._agent = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_AFTER_POINT])
        try:
            self._channels = self._accept(listener)
        except BaseException:
            self.kill()
            raise
        finally:
            listener.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> list[Connection]:
        deadline = time.monotonic() + self.config.start_timeout_s
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self.config.world_size:
            if self._agent.poll() is not None:
                raise PointFailed(f"the worker group died at start ({self._cause_of_death()})\n{self._log_tail()}")
            if time.monotonic() > deadline:
                limit = f"runtime.start_timeout_s={self.config.start_timeout_s:g}"
                raise PointFailed(f"only {len(by_rank)} of {self.config.world_size} ranks joined within {limit}")
            if select.select([listener], [], [], 0.2)[0]:
                channel: Connection = Connection(listener.accept()[0].detach())
                if channel.poll(max(0.0, deadline - time.monotonic())):
                    with contextlib.suppress(EOFError, ConnectionError):
                        by_rank[channel.recv()] = channel
        return [by_rank[rank] for rank in range(self.config.world_size)]

    def run(
        self,
        point: Mapping[str, Any],
        directory: Path,
        timeout_s: float,
        earlier_attempts: Sequence[Attempt] = (),
    ) -> dict[str, Any]:
        """Runs the point on every rank; returns the reply of the first rank that is not `ok`, else rank 0's.

        PointFailed if the group died or did not answer within `timeout_s`. Then, and after a failure that not every
        rank calls `sound`, the group is killed, since memory, streams and collectives may be in any state.
        """
        request = {
            "point": point,
            "directory": str(directory.resolve()),
            "machine": self._machine,
            "earlier_attempts": earlier_attempts,
        }
        try:
            for channel in self._channels:
                channel.send(request)
            replies = self._collect(timeout_s)
        except ConnectionError:
            cause = self._cause_of_death()
            self.kill()
            raise PointFailed(f"the worker group died ({cause})\n{self._log_tail()}") from None
        except BaseException:
            # Also when the launcher is asked to stop: workers that go on could still write a result.
            self.kill()
            raise
        wrong = [reply for reply in replies.values() if reply["status"] != "ok"]
        failed = [reply for reply in wrong if reply["status"] == "failed"]
        sound = len(replies) == len(self._channels) and all(reply.get("sound") for reply in failed)
        if failed and not sound:
            self.kill()
        return wrong[0] if wrong else replies[0]

    @property
    def alive(self) -> bool:
        return not self._killed and self._agent.poll() is None

    def _collect(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        replies: dict[int, dict[str, Any]] = {}
        failing = False
        while len(replies) < len(self._channels):
            waiting = {channel: rank for rank, channel in enumerate(self._channels) if rank not in replies}
            ready: Any = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and failing:
                return replies
            if not ready:
                silent = list(waiting.values())
                raise PointFailed(f"no answer from ranks {silent} within {timeout_s:g} s", timed_out=True)
            for channel in ready:
                try:
                    replies[waiting[channel]] = reply = channel.recv()
                except (EOFError, ConnectionError):
                    raise PointFailed(f"rank {waiting[channel]} died ({self._cause_of_death()})") from None
                if reply["status"] == "failed" and not failing:
                    failing, deadline = True, min(deadline, time.monotonic() + SETTLE_S)
        return replies

    def _cause_of_death(self) -> str:
        """Waits for the agent to end; returns the last exception or exit code in its log."""
        try:
            self._agent.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            return "cause unknown: its agent is still running"
        causes = re.findall(r"^\s*(\w*(?:Error|Exception): .+|exitcode .+)$", self._log_tail(200), re.MULTILINE)
        return " ".join(causes[-1].split()) if causes else f"its agent exited with {self._agent.returncode}"

    def _log_tail(self, lines: int = 20) -> str:
        return tail(self._log_path, lines, self._log_start)

    def close(self) -> None:
        """Closes the connections, upon which workers exit by themselves, and then kills the remaining processes."""
        if not self._killed:
            self._disconnect()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(PROFILED_END_S if self.config.wrapper else SETTLE_S)
            self.kill()

    def kill(self) -> None:
        """Kills every process of the group."""
        # Only once: the id of an ended process group may be reused.
        if self._killed:
            return
        self._killed = True
        self._disconnect()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._agent.pid, signal.SIGKILL)
        self._agent.wait()
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

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
        self,
        point: Mapping[str, Any],
        directory: Path,
        timeout_s: float,
        earlier_attempts: Sequence[Attempt] = (),
    ) -> dict[str, Any]:
        """Runs the point like `WorkerGroup.run`, in the living group if its configuration is the same, else in a new
        one."""
        config = GroupConfig.of(point, directory)
        fits = self._group is not None and self._group.config == config and self._group.alive
        if self._group is None or not fits or point["runtime"]["isolate"]:
            self.close()
            self._group = WorkerGroup(config, self._log).__enter__()
        return self._group.run(point, directory, timeout_s, earlier_attempts)

    def close(self) -> None:
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
