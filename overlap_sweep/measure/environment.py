"""What the numbers were measured on: the lasting part, and the part that changes from moment to moment."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RECORDED_PACKAGES = ("torch", "transformer-engine", "megatron-core", "overlap-sweep")
RECORDED_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "UB_SKIPMC",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
    "OMP_NUM_THREADS",
)


@cache
def environment(device: torch.device) -> dict[str, Any]:
    """Machine, device, driver, topology and library versions: equal for points that may be compared."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "device": device.type,
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "variables": {name: os.environ.get(name) for name in RECORDED_VARIABLES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "sm_count": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda or torch.version.hip,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _nvidia_smi("--query-gpu=driver_version"),
            "topology": _topology(),
        }
    return found


def conditions(device: torch.device) -> dict[str, Any]:
    """Load, and on a GPU clocks, power and temperature, now."""
    now: dict[str, Any] = {"load_1min": os.getloadavg()[0]}
    if device.type == "cuda":
        fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
        values = _nvidia_smi(f"--query-gpu={','.join(fields)}", f"--id={device.index or 0}")
        now |= dict(zip(fields, (values or "").split(", "), strict=False))
    return now


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    if not listed.exists():
        return platform.processor()
    named = re.search(r"^model name\s*:\s*(.+)$", listed.read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()


def _nvidia_smi(*arguments: str) -> str | None:
    """The first line of its answer; None where there is no nvidia-smi (AMD, some containers)."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None


def _topology() -> str | None:
    """How the GPUs are linked, as nvidia-smi draws it, without its terminal colours."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return re.sub(r"\x1b\[[0-9;]*m", "", answer.stdout)
