"""What the numbers were measured on: the lasting part, and the part that changes from moment to moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pynvml
import torch

from overlap_sweep.ranks import Ranks


def environment(device: torch.device, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The launcher's account of the machine (`machine.machine`), and what only torch knows."""
    if device.type != "cuda":
        return dict(machine)
    properties = torch.cuda.get_device_properties(device)
    return {
        **machine,
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "sm_count": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


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
