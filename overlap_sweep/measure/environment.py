"""What the numbers were measured on: the lasting part, and the part that changes from moment to moment."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml
import torch

from overlap_sweep.ranks import Ranks

RECORDED_PACKAGES = ("torch", "transformer-engine", "megatron-core", "overlap-sweep")
RECORDED_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "UB_SKIPMC",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
    "OMP_NUM_THREADS",
    "CUDNN_HOME",
)
RECORDED_PREFIXES = ("NVTE_", "UB_")
"""Transformer Engine's own variables change what it runs."""


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
        "variables": {
            **{name: os.environ.get(name) for name in RECORDED_VARIABLES},
            **{name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED_PREFIXES)},
        },
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "sm_count": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _nvidia_smi("--query-gpu=driver_version"),
            "topology": _topology(),
        }
    return found


def conditions(ranks: Ranks) -> dict[str, Any]:
    """The machine's load, and of every rank's GPU what NVML says now."""
    now: dict[str, Any] = {"load_1min": os.getloadavg()[0]}
    if ranks.device.type == "cuda":
        now["gpus"] = [_gpu_conditions(handle) for handle in _nvml_handles(ranks.world_size)]
    return now


@cache
def _nvml_handles(count: int) -> list[Any]:
    """Of the first `count` GPUs as CUDA numbers them, which need not be NVML's order; none without NVML (AMD)."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    uuids = [torch.cuda.get_device_properties(index).uuid for index in range(count)]
    return [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]


def _gpu_conditions(handle: Any) -> dict[str, float]:
    """Without what the GPU does not tell: parts of one (MIG) and virtual ones know less."""
    queries: dict[str, Callable[[], float]] = {
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
    told = {}
    for name, query in queries.items():
        with contextlib.suppress(pynvml.NVMLError_NotSupported):
            told[name] = query()
    return told


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
