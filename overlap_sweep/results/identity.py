"""The machine that a point is measured on, without torch; and when two measurements are of the same point on equivalent
machines."""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from overlap_sweep.config import INSTRUMENTS, ResolvedPoint

HOW_TO_RUN = ("timeout_s", "timeout_factor", "start_timeout_s", "retries", "isolate", "ub_timeout_s", "nsys_args")
"""Options of a point's `runtime` that don't change what is measured. Results of earlier versions have
`timeout_factor`."""

LIBRARIES = ("torch", "transformer-engine", "megatron-core", "nccl")
"""Packages whose version changes times."""


def point_identity(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a resolved configuration that determines what is measured. Without nulls, so that an unused
    option of a later version makes no new point."""
    runtime = {
        name: value
        for name, value in point["runtime"].items()
        # A single node is null in earlier results.
        if name not in HOW_TO_RUN and (name, value) != ("nodes", 1)
    }
    found = {**point, "runtime": runtime}
    if model := point.get("model"):
        # They say what the answer applies to. Of a language model that is trained, `language_model` has the layers.
        trains_it = "architecture" in getattr(point, "reads_of_model", ()) and "language_model" not in point
        idle = {"layers"} if trains_it else {"layers", "num_layers"}
        found["model"] = {name: value for name, value in model.items() if name not in idle}
    return _without_nulls(found)


def instrumented(point: ResolvedPoint) -> str | None:
    """Returns why a resolved point's times must not be compared: the option that looks into it. None if there is
    none."""
    found = [name for name in INSTRUMENTS if getattr(point.runtime, name)]
    return f"measured with runtime.{found[0]}=true, which costs time: not compared" if found else None


def point_key(point: ResolvedPoint) -> str:
    """Returns a digest that is equal for configurations that measure the same."""
    return key_of(point_identity(point))


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without_nulls(item) for name, item in value.items() if item is not None}


def library_identity(environment: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """Returns the part of a result's environment that is the same on every machine that shares an installation."""
    packages = environment.get("packages", {})
    return {"packages": {name: packages.get(name) for name in LIBRARIES}}


def environment_identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a result's environment that must be equal to compare times: device, driver, links between
    GPUs, libraries. Not the host, since the nodes of a cluster are alike."""
    same = {name: environment.get(name) for name in ("device", "gpus", "driver", "links")}
    if environment.get("device") == "cpu":
        same |= {name: environment.get(name) for name in ("cpu", "cpu_count")}
    variables = environment.get("variables", {})
    same["variables"] = {name: value for name, value in variables.items() if _SWITCHES.match(name)}
    return {**same, **library_identity(environment)}


def key_of(identity: Mapping[str, object]) -> str:
    """Returns a digest that is equal for equal identities."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


RECORDED_PACKAGES = ("torch", "transformer-engine", "megatron-core", "deepspeed", "transformers", "overlap-sweep")
NO_MULTICAST = {
    "UB_SKIPMC": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUBLASMP_DISABLE_MULTICAST": "1",
}
"""Variables that keep libraries from NVLink multicast. NCCL_NVLS_ENABLE is also what keeps cuBLASMp from it: it takes
its multicast addresses from NCCL (0.10)."""
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
RECORDED_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "UB_SKIPMC",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
    "OMP_NUM_THREADS",
    "CUDNN_HOME",
)
_PREFIXES = "NVTE_ UB_ NCCL_ RCCL_ TORCH_NCCL_ TORCH_SYMM_MEM_ NVSHMEM_ FLUX_ FI_ OFI_ UCX_ GLOO_"
RECORDED_PREFIXES = tuple(_PREFIXES.split())
"""Prefixes of the libraries' own variables, and of those that carry their messages between nodes."""

_SWITCHES = re.compile(rf"(?!UB_TIMEOUT$)({'|'.join(RECORDED_PREFIXES)}|CUDA_DEVICE_MAX_)(?!.*DEBUG|.*LOG_LEVEL)")
"""Variables that change what the libraries do."""


def machine(device: str, environ: Mapping[str, str], world_size: int) -> dict[str, object]:
    """Returns host, GPUs, driver, topology and library versions for `world_size` workers on `device` with `environ`."""
    found: dict[str, object] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "device": device,
        "packages": packages(),
        "variables": {
            **{name: environ.get(name) for name in RECORDED_VARIABLES},
            **{name: value for name, value in sorted(environ.items()) if name.startswith(RECORDED_PREFIXES)},
        },
    }
    if device == "cuda":
        found |= _gpus()
        # A single GPU uses no links.
        found |= {"links": []} if world_size < 2 else {}
    return found


@cache
def _gpus() -> dict[str, object]:
    """Returns names, driver and links of NVIDIA's GPUs; None for unknown values and on AMD's GPUs."""
    listed = _nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader,nounits")
    rows = [tuple(part.strip() for part in line.split(",")) for line in (listed or "").splitlines()]
    names = sorted({row[0] for row in rows})
    topology = _nvidia_smi("topo", "-m")
    return {
        "gpu": names[0] if len(names) == 1 else None,
        "gpus": names,
        "driver": rows[0][1] if rows else None,
        "topology": topology,
        "links": gpu_links(topology or ""),
    }


def gpu_links(topology: str) -> list[str]:
    """Returns the kinds of link between GPUs in the output of `nvidia-smi topo -m`, such as `["NV18"]` or `["NODE",
    "SYS"]`.

    Its network cards and CPU affinities are left out: they differ between nodes that are alike.
    """
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    return sorted({cell for row in rows for cell in row[1 : 1 + len(rows)]} - {"X"})


@cache
def packages() -> dict[str, str | None]:
    """Returns the versions of the libraries that times depend on; None for those not installed."""
    nccl = (installed_version(package) for package in NCCL_PACKAGES)
    return {**{name: installed_version(name) for name in RECORDED_PACKAGES}, "nccl": next(filter(None, nccl), None)}


def installed_version(package: str) -> str | None:
    """Returns the package's version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    if not listed.exists():
        return platform.processor()
    named = re.search(r"^model name\s*:\s*(.+)$", listed.read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()


def _nvidia_smi(*arguments: str) -> str | None:
    """Returns the output of nvidia-smi without terminal colours; None if it is missing (AMD, some containers)."""
    try:
        answer = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return re.sub(r"\x1b\[[0-9;]*m", "", answer.stdout)
