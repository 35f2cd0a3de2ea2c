"""What the numbers were measured on: the machine, and its GPUs' clocks, power and temperature now and during a run.

rocm-smi is a program whose keys differ from version to version: they are looked for by regular expressions.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
import traceback
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pynvml
import torch

from overlap_sweep.measure import Ranks

TIMEOUT_S = 10.0

_QUERY = ("rocm-smi", "--showclocks", "--showpower", "--showtemp", "--json")

_PATTERNS = {
    # "sclk clock speed:": "(132Mhz)"; ROCm 4 had "sclk clock level": "1 (1502Mhz)".
    "sm_clock_mhz": r"^sclk\b.*?(\d+)mhz",
    "memory_clock_mhz": r"^mclk\b.*?(\d+)mhz",
    # "Average Graphics Package Power (W)"; MI300: "Current Socket Graphics Package Power (W)". "Max ..." is the limit.
    "power_w": r"^(?:average|current)\b.*power.*\(w\) ([\d.]+)$",
    # Of the hottest sensor.
    "temperature_c": r"^temperature.*\(c\) ([\d.]+)$",
}
"""By name what is looked for in a card's keys and values."""

Cards = Mapping[str, Mapping[str, Any]]

ROCM_SMI_INTERVAL_S = 1.0
"""At least so long between two calls of rocm-smi: each is a process that takes some tenths of a second."""


@cache
def nvml_handle(device: torch.device) -> Any | None:
    """Returns the GPU as NVML knows it, whose order need not be CUDA's; None without NVML, and for a MIG part."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


def read_nvml(handle: Any) -> dict[str, float]:
    """Returns what the GPU tells: parts of one (MIG) and virtual ones know less. A lost GPU is a NVMLError."""
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


def query_rocm_smi() -> tuple[Cards, str]:
    """Returns the cards that rocm-smi tells of (`card0`), and its text. Warns where it fails."""
    text = ""
    try:
        text = subprocess.run(_QUERY, capture_output=True, text=True, timeout=TIMEOUT_S).stdout.strip()
        # Warnings may stand before its JSON, such as that a card sleeps.
        told, _ = json.JSONDecoder().raw_decode(text[max(0, text.find("{")) :])
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        warnings.warn(f"rocm-smi: {error}: clocks, power and temperatures are not recorded", stacklevel=2)
        return {}, text
    return told, text


def rocm_values(device: torch.device, cards: Cards) -> dict[str, float]:
    """Returns what the device's card tells: the second die of a MI250 has no power of its own."""
    index = device.index or 0
    if visible := os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")):
        index = int(visible.split(",")[index])
    text = "\n".join(f"{key} {value}" for key, value in cards.get(f"card{index}", {}).items())
    found = {name: re.findall(pattern, text, re.IGNORECASE | re.MULTILINE) for name, pattern in _PATTERNS.items()}
    return {name: max(map(float, values)) for name, values in found.items() if values}


class Sample(NamedTuple):
    """What a GPU told at a moment."""

    values: dict[str, float]
    """`sm_clock_mhz`, `memory_clock_mhz`, `power_w`, `temperature_c`, and of NVML `throttle_reasons` (its bits), as far
    as the GPU tells."""
    rocm_smi_output: str | None = None
    """The same as rocm-smi put it, on AMD."""


NOTHING = Sample({})


class DeviceSampler:
    """`with DeviceSampler(device, interval_s) as sampler:` takes a sample of this one GPU every interval.

    Nothing is taken on a CPU, with an interval of 0, and where neither NVML nor rocm-smi can be asked.
    """

    def __init__(self, device: torch.device, interval_s: float) -> None:
        self._device = device
        self._interval_s = max(interval_s, ROCM_SMI_INTERVAL_S) if torch.version.hip else interval_s
        self._wanted = device.type == "cuda" and interval_s > 0
        self._taken: list[tuple[float, Sample]] = []
        self._ended = threading.Event()
        # A daemon keeps no process alive that ends without leaving the block.
        self._thread = threading.Thread(target=self._run, name="DeviceSampler", daemon=True)

    def __enter__(self) -> DeviceSampler:
        read = _reader_for(self._device) if self._wanted else None
        if read:
            self._read = read
            # The first step has one, too, and a GPU that cannot be asked fails here.
            self._take()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def last_before(self, unix_s: float) -> Sample:
        """Returns the last one that was taken by then (seconds since 1970); an empty one where there is none."""
        place = bisect_right(self._taken, unix_s, key=lambda taken: taken[0])
        return self._taken[place - 1][1] if place else NOTHING

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._interval_s):
                self._take()
        except Exception:
            # A run is worth more than its samples. What was told before must not be taken for what came after.
            traceback.print_exc()
            self._taken.append((time.time(), NOTHING))

    def _take(self) -> None:
        sample = self._read()
        self._taken.append((time.time(), sample))


def _reader_for(device: torch.device) -> Callable[[], Sample] | None:
    """Returns what takes a sample; None where nobody can be asked."""
    if not torch.version.hip:
        handle = nvml_handle(device)
        return None if handle is None else lambda: Sample(read_nvml(handle))
    return (lambda: _rocm_sample(device)) if query_rocm_smi()[0] else None


def _rocm_sample(device: torch.device) -> Sample:
    cards, text = query_rocm_smi()
    return Sample(rocm_values(device, cards), text)


def environment(device: torch.device, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the launcher's account of the machine (`identity.machine`), and what only torch knows."""
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
    """Returns the machine's load, and of every rank's GPU what NVML or rocm-smi says now, if they can be asked."""
    load: dict[str, Any] = {"load_1min": os.getloadavg()[0]}
    if ranks.device.type != "cuda":
        return load
    devices = [torch.device("cuda", index) for index in range(ranks.world_size)]
    if not torch.version.hip:
        return load | {"gpus": [read_nvml(handle) for device in devices if (handle := nvml_handle(device))]}
    cards, _ = query_rocm_smi()
    return load | {"gpus": [values for device in devices if (values := rocm_values(device, cards))]}
