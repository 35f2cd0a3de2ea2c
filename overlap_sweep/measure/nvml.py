"""What NVIDIA's management library tells of a GPU at this moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pynvml
import torch


@cache
def handle_of(device: torch.device) -> Any | None:
    """The GPU as NVML knows it, whose order need not be CUDA's; None without NVML, and for a part of a GPU (MIG)."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


def read(handle: Any) -> dict[str, float]:
    """Without what the GPU does not tell: parts of one (MIG) and virtual ones know less. A lost GPU is a NVMLError."""
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
