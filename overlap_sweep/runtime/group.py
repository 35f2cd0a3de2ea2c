"""One torchrun group, seen from the launcher: started once, fed point after point, killed when it must be."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import msgspec

import overlap_sweep
from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.results.machine import machine
from overlap_sweep.results.run_directory import FailedAttempt
from overlap_sweep.runtime.agent import DIRECTORY_PREFIX
from overlap_sweep.runtime.attempts import current_launch
from overlap_sweep.runtime.channel import Channel
from overlap_sweep.runtime.log_tail import tail
from overlap_sweep.runtime.stopping import STOP_AFTER_POINT

SETTLE_S = 5.0
"""After one rank has failed, how long the others have to answer before the group counts as broken."""

PROFILED_END_S = 120.0
"""How long workers have to end that were run under a profiler, which only then writes what it has recorded."""

LONGEST_TEMPORARY_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Of the temporary directory's path: multiprocessing's fork server listens below it, and the address of a Unix socket
has at most 107 bytes. Our own is one byte shorter."""

PART_S = 1.0
"""How long to wait for the rest of a message before looking at the clock again."""

NO_MULTICAST = {
    "UB_SKIPMC": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


ROCPROFV3 = "rocprofv3"
"""The program, and the folder in the run directory that it writes to."""

MAX_CONNECTIONS = {
    **{"symm_mem": 8, "fsdp2": 8, "ddp": 8, "copy_engine": 8},
    **{"autotp": 8, "fsdp_dtensor": 8, "async_tp": 8},
}
"""CUDA_DEVICE_MAX_CONNECTIONS as those set it who train with the backend; 1 for all others. With one queue, the two
streams of symm_mem wait for each other: a fused GEMM and reduce-scatter took 21 % longer (8192x8192x8192, two H200s).
With eight, NCCL's kernels wait for a GEMM that has taken all SMs: a ring exchange took 22 % longer."""


class GroupError(Exception):
    """The group could not start, died, or stopped answering; it is dead now. `timed_out` tells the last case."""

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass(frozen=True)
class GroupConfig:
    """What a group is started with; points that agree in it can share one."""

    world_size: int
    device: str
    threads_per_rank: int
    multicast: bool
    max_connections: int
    start_timeout_s: float
    timeout_s: float
    environment: tuple[tuple[str, str], ...] = ()
    """What the point wants in it, for NCCL or RCCL."""
    wrapper: tuple[str, ...] = ()
    """What the agent's command line begins with: a profiler that all processes of the group are run under. It has the
    point's directory in it, so that each such point has a group of its own."""

    of_point: str = ""
    """The directory of a point that leaves behind what no other should have: a group of its own."""

    impl: str = ""
    """Stacks of training patch what others run, and are compared by the memory that they take: none shares a process
    with another."""

    @classmethod
    def of(cls, point: Mapping[str, Any], directory: Path | None = None) -> GroupConfig:
        """Without a directory there is no wrapper, which would write there."""
        runtime = point["runtime"]
        names = ("device", "threads_per_rank", "multicast", "start_timeout_s", "timeout_s")
        given = {name: runtime[name] for name in names}
        connections = runtime.get("max_connections") or MAX_CONNECTIONS.get(point["backend"], 1)
        environment = tuple(sorted(point.get("distributed", {}).get("env", {}).items()))
        wrapper = _wrapper(point, directory) if directory else ()
        return cls(
            world_size=workloads.world_size(point),
            max_connections=connections,
            environment=environment,
            wrapper=wrapper,
            of_point=str(directory) if directory and _leaves_groups(point) else "",
            impl=point.get("impl", ""),
            **given,
        )


def _leaves_groups(point: Mapping[str, Any]) -> bool:
    """FSDP2 makes two process groups for each unit that stays gathered within a smaller group, and keeps them."""
    return type(point.get("fsdp", {}).get("reshard_after_forward")) is int


def _wrapper(point: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    profiling = point.get("profiling", {})
    if not profiling.get("rocprofv3"):
        return ()
    output = directory.resolve() / ROCPROFV3
    return (ROCPROFV3, *shlex.split(profiling["rocprofv3_args"]), "-d", str(output), "--")


def check_wrapper(point: Mapping[str, Any]) -> None:
    """UserError where the point is to be run under a profiler that cannot be started."""
    try:
        wrapper = _wrapper(point, Path())
    except ValueError as error:
        raise UserError(f"profiling.rocprofv3_args cannot be split ({error}); close its quotes.") from None
    if wrapper and not shutil.which(wrapper[0]):
        raise UserError(
            "profiling.rocprofv3=true needs rocprofv3 in PATH, which comes with ROCm (/opt/rocm/bin); add it, or leave "
            "profiling.rocprofv3 out."
        )


def check_multicast(runtime: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Say once what of the user's environment `runtime.multicast` overrides. UserError where the environment keeps
    multicast off that the point asks for."""
    if runtime["device"] == "cpu":
        return
    if runtime["multicast"]:
        if environ.get("UB_SKIPMC", "0") not in ("", "0"):
            raise UserError(
                f"UB_SKIPMC={environ['UB_SKIPMC']} in the environment turns off the NVLink multicast that "
                "runtime.multicast=true asks for; unset it, or leave runtime.multicast out."
            )
        return
    asked = [
        f"{name}={environ[name]}" for name, off in NO_MULTICAST.items() if environ.get(name) not in (None, "", off)
    ]
    if asked:
        _note(
            f"{', '.join(asked)} in the environment: no effect here, since runtime.multicast=false turns NVLink "
            "multicast off; give runtime.multicast=true to allow it."
        )


@cache
def _note(text: str) -> None:
    """Print it, once in this process however many points it is true of."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def check_temporary_directory() -> None:
    """UserError where no group could be started, since its sockets' addresses would be too long."""
    directory = tempfile.gettempdir()
    length = len(os.fsencode(directory))
    if length > LONGEST_TEMPORARY_BYTES:
        raise UserError(
            f"TMPDIR={directory} is {length} bytes long, and worker processes need a socket below it, for which it may "
            f"have {LONGEST_TEMPORARY_BYTES}; set TMPDIR to a shorter path, such as /tmp."
        )


def worker_environment(config: GroupConfig) -> dict[str, str]:
    """The environment that every process of the group inherits."""
    environment = {**os.environ, **dict(config.environment)}
    if not config.multicast:
        environment |= NO_MULTICAST
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(config.max_connections)
    # It makes one operator of torch's another for some sizes. What it would take has a name of its own: async_input.
    environment.pop("TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP", None)
    environment["OMP_NUM_THREADS"] = str(config.threads_per_rank)
    environment["PYTHONUNBUFFERED"] = "1"
    package = str(Path(overlap_sweep.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environment.get("PYTHONPATH"))))
    return environment


def machine_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """The machine as a point's workers will find it: `machine.machine`."""
    config = GroupConfig.of(point)
    return machine(config.device, worker_environment(config), config.world_size)


def shared_by(point: Mapping[str, Any]) -> tuple[int, int, tuple[tuple[str, str], ...]]:
    """Equal for points of a sweep that one group can run."""
    config = GroupConfig.of(point)
    return config.world_size, config.max_connections, config.environment


class WorkerGroup:
    """`with WorkerGroup(config, log) as group: group.run(...)`: no process outlives the block."""

    def __init__(self, config: GroupConfig, log: Path) -> None:
        """`log` gets what the processes print outside of any point."""
        self.config = config
        self._log_path = log
        self._channels: list[Channel] = []
        self._killed = False

    def __enter__(self) -> WorkerGroup:
        # Of its own, since nobody else may connect; `check_temporary_directory` has seen to it that it is short.
        self._directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        self._log: IO[bytes] = self._log_path.open("ab")
        # What earlier groups left in it is not this one's cause of death.
        self._log_start = self._log_path.stat().st_size
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = str(self._directory / "workers")
        listener.bind(address)
        listener.listen(self.config.world_size)
        command = [*self.config.wrapper, sys.executable, "-m", "overlap_sweep.runtime.agent", "--address", address]
        command += ["--world-size", str(self.config.world_size), "--device", self.config.device]
        # The collectives' own limit comes after the launcher's, which can say more about the point.
        command += ["--timeout-s", str(self.config.timeout_s + 60)]
        if self.config.wrapper:
            # A profiler records what has loaded it, and writes when that exits; what was forked does neither.
            command += ["--start-method", "spawn"]
        environment = worker_environment(self.config)
        self._machine = machine(self.config.device, environment, self.config.world_size)
        # Cluster managers send it to every process of a job, and only the launcher knows what to do. A blocked signal
        # stays blocked in all that is started from here.
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

    def _accept(self, listener: socket.socket) -> list[Channel]:
        deadline = time.monotonic() + self.config.start_timeout_s
        by_rank: dict[int, Channel] = {}
        while len(by_rank) < self.config.world_size:
            if self._agent.poll() is not None:
                raise GroupError(f"the group ended while starting ({self._cause_of_death()})\n{self._log_tail()}")
            if time.monotonic() > deadline:
                limit = f"runtime.start_timeout_s={self.config.start_timeout_s:g}"
                raise GroupError(f"only {len(by_rank)} of {self.config.world_size} ranks joined within {limit}")
            if select.select([listener], [], [], 0.2)[0]:
                channel = Channel(listener.accept()[0])
                try:
                    hello = channel.receive(max(PART_S, deadline - time.monotonic()))
                except TimeoutError:
                    continue
                if hello:
                    by_rank[hello["rank"]] = channel
        return [by_rank[rank] for rank in range(self.config.world_size)]

    def run(
        self,
        point: Mapping[str, Any],
        directory: Path,
        timeout_s: float,
        earlier_attempts: Sequence[FailedAttempt] = (),
    ) -> dict[str, Any]:
        """Have every rank run the point; the reply of the first rank that is not `ok`, else rank 0's.

        GroupError when the group died or did not answer in `timeout_s`. Then, and after a failure that not
        every rank calls `sound`, the group is dead: who knows what was left of memory, streams and other ranks'
        collectives.
        """
        request = {
            "point": point,
            "directory": str(directory.resolve()),
            "machine": self._machine,
            "earlier_attempts": msgspec.to_builtins(earlier_attempts),
            "launch": current_launch(),
        }
        try:
            for channel in self._channels:
                channel.send(request)
            replies = self._collect(timeout_s)
        except (BrokenPipeError, ConnectionResetError):
            cause = self._cause_of_death()
            self.kill()
            raise GroupError(f"the group is gone ({cause})\n{self._log_tail()}") from None
        except BaseException:
            # Also when the launcher is told to stop: workers that go on might yet leave a result.
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
            waiting = {ch: rank for rank, ch in enumerate(self._channels) if rank not in replies}
            ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready and failing:
                return replies
            if not ready:
                raise GroupError(f"no answer from ranks {list(waiting.values())} in {timeout_s:g} s", timed_out=True)
            for channel in ready:
                try:
                    reply = channel.receive(PART_S)
                except TimeoutError:
                    continue
                if reply is None:
                    raise GroupError(f"rank {waiting[channel]} died ({self._cause_of_death()})")
                replies[waiting[channel]] = reply
                if reply["status"] == "failed" and not failing:
                    failing, deadline = True, min(deadline, time.monotonic() + SETTLE_S)
        return replies

    def _cause_of_death(self) -> str:
        """The agent's own account, once it has noticed: the last exception or exit status in its log."""
        try:
            self._agent.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            return "its agent has not noticed"
        causes = re.findall(r"^\s*(\w*(?:Error|Exception): .+|exitcode .+)$", self._log_tail(200), re.MULTILINE)
        return (
            " ".join(causes[-1].replace("exitcode  :", "exit code").split())
            if causes
            else f"its agent ended with {self._agent.returncode}"
        )

    def _log_tail(self, lines: int = 20) -> str:
        return tail(self._log_path, lines, self._log_start)

    def close(self) -> None:
        """Let the workers end by themselves, as those whose connection closes do; then see to it that they have."""
        if not self._killed:
            self._disconnect()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(PROFILED_END_S if self.config.wrapper else SETTLE_S)
            self.kill()

    def kill(self) -> None:
        """End every process of the group now."""
        # Once only: the number of a process group that is gone may become somebody else's.
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
