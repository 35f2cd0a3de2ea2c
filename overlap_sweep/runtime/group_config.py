"""Configuration of a group of workers, and checks before its start: GPUs, environment, profiler."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlap_sweep import workloads
from overlap_sweep.config import PointConfig, ResolvedPoint, Runtime
from overlap_sweep.errors import UserError
from overlap_sweep.gpus import beginning_with
from overlap_sweep.program import environment_with_package
from overlap_sweep.results.identity import NO_MULTICAST, machine
from overlap_sweep.workloads import profilers
from overlap_sweep.workloads.profilers import Wrapper

LONGEST_TEMPORARY_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Longest path of the temporary directory: multiprocessing's processes, such as those of loaders, listen below it, and
the address of a Unix socket has at most 107 bytes. Our own sockets need one byte less."""

DEBUG = {
    "NVTE_UBDEBUG": "1",
    "NVTE_DEBUG": "1",
    "NVTE_DEBUG_LEVEL": "2",
    "NCCL_DEBUG": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""Variables with which libraries print what they do: userbuffers their ranks, Transformer Engine why it chose which
attention, NCCL its topology and channels."""


@dataclass(frozen=True)
class GroupConfig:
    """Configuration of a group; points with equal ones can share a group."""

    world_size: int
    device: str
    threads_per_rank: int
    multicast: bool
    max_connections: int | None
    start_timeout_s: float
    timeout_s: float
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the point sets, for the libraries below it."""
    wrapper: tuple[str, ...] = ()
    """Start of the agent's command line: a profiler for all processes of the group. It contains the point's directory,
    so that each such point has its own group."""
    company: str = ""
    first_gpu: int = 0
    nodes: int = 1
    """Machines that the ranks are spread over, equally many on each."""

    @classmethod
    def of(cls, point: ResolvedPoint, directory: Path = Path()) -> GroupConfig:
        runtime, workers = point.runtime, workloads.of(point).workers(point, directory)
        names = ("device", "threads_per_rank", "multicast", "start_timeout_s", "timeout_s")
        return cls(
            **{name: getattr(runtime, name) for name in names},
            world_size=point.world_size,
            max_connections=runtime.max_connections or workers.max_connections,
            environment=tuple(sorted({**_instruments(runtime), **workers.environment}.items())),
            wrapper=wrapper.words if (wrapper := _wrapper(point, directory)) else (),
            company=workers.company,
            first_gpu=workers.first_gpu,
            nodes=point.nodes,
        )


def check_torch() -> None:
    """Raises UserError if PyTorch is missing. It is not a dependency, since pip would replace an image's own build."""
    if find_spec("torch") is None:
        raise UserError(f"PyTorch is not installed for {sys.executable}; pip install 'overlap-sweep[torch]'.")


def check_wrapper(point: ResolvedPoint) -> None:
    """Raises UserError if the point needs a profiler that is not installed."""
    if (wrapper := _wrapper(point, Path())) and not shutil.which(wrapper.words[0]):
        raise UserError(wrapper.missing)


def _wrapper(point: ResolvedPoint, directory: Path) -> Wrapper | None:
    """Returns the program that starts the point's workers, if there is one. UserError if two should."""
    own = workloads.of(point).workers(point, directory).wrapper
    nsys = profilers.nsys(point.runtime, directory)
    if own and nsys:
        raise UserError(f"runtime.nsys=true and {own.words[0]} would both start the workers; turn one of them off.")
    return own or nsys


def check_instruments(point: PointConfig) -> None:
    """Raises UserError if the point's device, workload or profile leave nothing to an option that looks into it."""
    runtime, own = point.runtime, bool(workloads.of(point).run_here)
    asked = next((name for name in ("nsys", "nvtx") if getattr(runtime, name)), None)
    if asked and own:
        name = point.workload.name
        raise UserError(f"runtime.{asked}=true is for workers, but workload={name} starts processes of its own.")
    if runtime.nvtx and runtime.device == "cpu":
        raise UserError("runtime.nvtx=true names passes for profilers of GPUs; leave it out with runtime.device=cpu.")
    if runtime.nsys and runtime.device == "cuda" and point.profile == "none":
        raise UserError("runtime.nsys=true records the profiled passes, but with profile=none there are none.")


def check_multicast(runtime: Runtime, environ: Mapping[str, str]) -> None:
    """Raises UserError if the environment disables multicast that the point enables."""
    if runtime.device != "cpu" and runtime.multicast and environ.get("UB_SKIPMC", "0") not in ("", "0"):
        raise UserError(
            f"UB_SKIPMC={environ['UB_SKIPMC']} in the environment disables the NVLink multicast that "
            "runtime.multicast=true enables; unset it, or leave out runtime.multicast."
        )


def check_temporary_directory() -> None:
    """Raises UserError if the temporary directory's path is too long for the sockets of a group."""
    directory = tempfile.gettempdir()
    length = len(os.fsencode(directory))
    if length > LONGEST_TEMPORARY_BYTES:
        raise UserError(
            f"TMPDIR={directory} has {length} bytes, but the sockets of worker processes allow only "
            f"{LONGEST_TEMPORARY_BYTES}; set TMPDIR to a shorter path, such as /tmp."
        )


def _instruments(runtime: Runtime) -> dict[str, str]:
    """Returns the variables for what looks into a point; the user's own win."""
    found = dict(DEBUG) if runtime.debug else {}
    if runtime.nvtx or runtime.nsys:
        found["NVTE_NVTX_ENABLED"] = "1"
    found = {name: os.environ.get(name, value) for name, value in found.items()}
    limit_s = runtime.ub_timeout_s
    return found if limit_s is None else {**found, "UB_TIMEOUT": str(limit_s)}


def _variables(config: GroupConfig) -> dict[str, str]:
    """Returns the variables that the point sets."""
    connections = config.max_connections
    return {
        **dict(config.environment),
        **beginning_with(config.first_gpu),
        **({} if config.multicast else NO_MULTICAST),
        **({} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}),
    }


def worker_environment(config: GroupConfig) -> dict[str, str]:
    """Returns the environment that every process of the group inherits."""
    environment = environment_with_package() | _variables(config)
    # It would silently replace an operator of torch for some sizes; that variant is the implementation async_input.
    environment.pop("TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP", None)
    environment["OMP_NUM_THREADS"] = str(config.threads_per_rank)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def machine_of(point: ResolvedPoint) -> dict[str, Any]:
    """Returns the machine of a point's workers, as `identity.machine` describes it."""
    config = GroupConfig.of(point)
    return machine(config.device, environment_of(point), config.world_size)


def environment_of(point: ResolvedPoint) -> dict[str, str]:
    """Returns the environment of the processes that run the point."""
    config = GroupConfig.of(point)
    if workloads.of(point).run_here:
        # Of processes that a workload starts itself only what the point sets is changed.
        return environment_with_package({**os.environ, **_variables(config)}, last=True)
    return worker_environment(config)


def shared_by(point: ResolvedPoint) -> tuple[tuple[int, int], int, tuple[tuple[str, str], ...]]:
    """Returns a key that is equal for points that one group can run, and for all that start their own processes."""
    if workloads.of(point).run_here:
        return (point.nodes, 0), 0, ()
    config = GroupConfig.of(point)
    return (config.nodes, config.world_size), config.max_connections or 0, config.environment
