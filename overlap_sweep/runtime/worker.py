"""One rank: joins the group, connects to the launcher, and runs points until the launcher disconnects."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from overlap_sweep import backends, workloads
from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.keeper.process import end_with_parent
from overlap_sweep.measure import Ranks
from overlap_sweep.measure.environment import conditions, environment
from overlap_sweep.measure.instruments import instruments, say
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results import run_directory
from overlap_sweep.results.identity import RECORDED_PREFIXES
from overlap_sweep.results.run_directory import Result, log_file, now
from overlap_sweep.runtime.channel import SECRET, PointRequest, Reply, connect
from overlap_sweep.runtime.stacks import stacks_written
from overlap_sweep.workloads import memory

CONNECT_S = 30.0
"""Time to connect to the launcher."""

_BY_LINES = 1
"""_IOLBF of C's stdio.h."""


@dataclass(frozen=True)
class RankNode:
    """The machine of a rank."""

    node: int
    nodes: int
    store: str
    """Where all ranks meet: a file on one machine; of several, host:port of the first."""

    @property
    def address(self) -> tuple[str, str] | None:
        """Returns the store's host and port; None if it is a file."""
        host, _, port = self.store.rpartition(":")
        return (host, port) if self.nodes > 1 else None


def main(address: str, device: str, timeout_s: float, place: RankNode, agent: int) -> None:
    """Runs a rank in a process of torch's elastic agent, which sets LOCAL_RANK etc. in the environment."""
    end_with_parent(agent)
    _be_no_agent()
    _print_by_lines()
    ranks = _join(device, timeout_s, place)
    channel = connect(address, os.environ[SECRET], CONNECT_S)
    channel.send(ranks.rank)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            channel.send(_work(channel.recv(), ranks))
    backends.close_all()
    dist.destroy_process_group()


def _be_no_agent() -> None:
    """Undoes what a rank that was forked has of its agent: a directory, and signals that wait for Python's turn."""
    tempfile.tempdir = None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _print_by_lines() -> None:
    """Has C and C++ libraries print whole lines at once: of a process that is killed, the log has what they said."""
    library = ctypes.CDLL(None)
    library.setvbuf(ctypes.c_void_p.in_dll(library, "stdout"), None, _BY_LINES, 0)


def _join(device: str, timeout_s: float, place: RankNode) -> Ranks:
    # The agent knows only the ranks of this machine.
    of_node = int(os.environ["LOCAL_WORLD_SIZE"])
    rank, world_size = place.node * of_node + int(os.environ["LOCAL_RANK"]), place.nodes * of_node
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ[name] = os.environ[f"ROLE_{name}"] = str(value)
    os.environ |= {"GROUP_RANK": str(place.node), "GROUP_WORLD_SIZE": str(place.nodes)}
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    timeout = timedelta(seconds=timeout_s)
    store = _store(place, rank, world_size, timeout)
    store.set_timeout(timeout)
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU; install its CUDA build, or use runtime.device=cpu")
        here = own_gpu()
        torch.cuda.set_device(here)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=here)
    else:
        here = torch.device("cpu")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Ranks(rank, world_size, here, place.node, place.nodes)


def _store(place: RankNode, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns the store at which all ranks meet. That of several machines listens at the interface which they use."""
    if place.address is None:
        return dist.FileStore(place.store, world_size)
    host, port = place.address
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    listening = None
    if rank == 0:
        # By itself torch listens at all interfaces.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, int(port)), family=family).detach()
    return dist.TCPStore(host, int(port), world_size, rank == 0, timeout, master_listen_fd=listening)


def own_gpu() -> torch.device:
    """Returns this rank's GPU."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _work(request: PointRequest, ranks: Ranks) -> Reply:
    """Runs one point; rank 0 writes result.json if it is `ok`. Returns this rank's reply, with its status."""
    directory, point = request.directory, request.point
    started, clock = now(), time.perf_counter()
    workload = workloads.of(point)
    with (
        _output_to(directory / log_file(ranks.node)),
        stacks_written(directory, ranks.rank, request.limit_s),
        instruments(point.runtime, ranks),
    ):
        _say_what_is_run(point, directory, ranks)
        try:
            before = conditions(ranks) if ranks.rank == 0 else {}
            assert workload.run
            doubts = _check_memory(point, ranks)
            measured = workload.run(point, directory, ranks)
            measured["warnings"] = [*doubts, *measured.get("warnings", [])]
            after = conditions(ranks) if ranks.rank == 0 else {}
            say("ends")
        except Refused as reason:
            return Reply("skipped", str(reason))
        except WrongNumbers as error:
            return Reply("failed", str(error), final=True, relative_error=error.relative_error)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            return Reply("failed", f"rank {ranks.rank}: {type(error).__name__}: {error}", node=ranks.node)
    if ranks.rank == 0:
        result = Result(
            name=directory.name,
            recorded=dict(point),
            status="ok",
            settings=workload.overlap_configs(point).get("", OverlapConfig()).slots,
            environment=environment(ranks.device, request.machine),
            conditions={"before": before, "after": after},
            started=started,
            wall_s=time.perf_counter() - clock,
            earlier_attempts=list(request.earlier_attempts),
            **measured,
        )
        # The launcher makes it durable, when the ranks have something else to do.
        run_directory.write_result(directory, result, durable=False)
    return Reply("ok")


def _check_memory(point: ResolvedPoint, ranks: Ranks) -> list[str]:
    """Returns and prints a warning if the point may not fit this rank's GPU. Refused if not even its parameters do."""
    workload = workloads.of(point)
    estimate = workload.memory(point) if ranks.device.type == "cuda" else None
    if estimate is None:
        return []
    gpu = torch.cuda.get_device_properties(ranks.device)
    available = 1, gpu.total_memory, gpu.name, workload.less_memory
    if reason := memory.refusal(estimate, *available):
        raise Refused(reason)
    if not (sentence := memory.warning(estimate, *available)):
        return []
    print(f"warning: {sentence}", flush=True)
    return [f"This point {sentence}."]


def _say_what_is_run(point: ResolvedPoint, directory: Path, ranks: Ranks) -> None:
    """Prints the point, this rank, and the variables that libraries read, if the point is debugged."""
    names = {name: getattr(point, name) for name in ("backend", "precision", "tp_size")}
    names = {"workload": point.workload.name, **names, "model": point.model.name}
    say(f"{directory.name}: {', '.join(f'{name}={value}' for name, value in names.items())}, torch {torch.__version__}")
    where = f"at tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if ranks.nodes > 1 else "by a file"
    say(
        f"process {os.getpid()} on {ranks.device}, rank {ranks.rank} of {ranks.world_size}, node {ranks.node}; "
        f"{dist.get_backend()} meets {where}"
    )
    prefixes = (*RECORDED_PREFIXES, "CUDA_", "HIP_", "OMP_")
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(prefixes))
    say(f"variables: {' '.join(variables)}")


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Redirects this process's output, also that of C++ libraries, to the point's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, old in zip((1, 2), kept, strict=True):
            os.dup2(old, descriptor)
            os.close(old)
