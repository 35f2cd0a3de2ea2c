"""Records the machine, and its GPUs' clocks, power and temperature now and during a run.

The keys of rocm-smi differ between versions, so they are found by regular expressions.
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
from typing import NamedTuple

import pynvml
import torch

from overlap_sweep.measure import Ranks

TIMEOUT_S = 10.0

_QUERY = ("--showuniqueid", "--showclocks", "--showpower", "--showtemp", "--json")

_KEYS = {
    # "sclk clock speed:": "(132Mhz)"; ROCm 4 had "sclk clock level": "1 (1502Mhz)".
    "sm_clock_mhz": (r"sclk\b",),
    "memory_clock_mhz": (r"mclk\b",),
    # "Average Graphics Package Power (W)"; MI300: "Current Socket Graphics Package Power (W)". "Max ..." is the limit.
    "power_w": (r"(average|current)\b.*power.*\(w\)",),
    # MI300 has no edge sensor.
    "temperature_c": (r"temperature.*junction", r"temperature.*edge", r"temperature"),
}
"""Patterns of keys by name of the reading, the best first."""

_CLOCK = re.compile(r"(\d+(?:\.\d+)?)\s*mhz", re.IGNORECASE)

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*$")

Cards = Mapping[str, Mapping[str, object]]

ROCM_SMI_INTERVAL_S = 1.0
"""Shortest time between two calls of rocm-smi: each is a process that takes some tenths of a second."""


@cache
def nvml_handle(device: torch.device) -> object | None:
    """Returns the GPU's NVML handle by UUID, because NVML's order may differ from CUDA's; None without NVML or for
    MIG."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


def read_nvml(handle: object) -> dict[str, float]:
    """Returns the GPU's readings; MIG parts and virtual GPUs have fewer. NVMLError if the GPU is lost."""
    queries: dict[str, Callable[[], float]] = {
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
    readings = {}
    for name, query in queries.items():
        with contextlib.suppress(pynvml.NVMLError_NotSupported):
            readings[name] = query()
    return readings


def query_rocm_smi(card: str | None = None) -> tuple[Cards, str]:
    """Returns rocm-smi's readings of the card (`card0`), or of all cards, and its output. Warns if it fails."""
    command = ["rocm-smi", *(("-d", card.removeprefix("card")) if card else ()), *_QUERY]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S).stdout.strip()
        return rocm_cards(text), text
    except (FileNotFoundError, PermissionError):
        problem = "is not in PATH"
    except subprocess.TimeoutExpired:
        problem = f"did not answer within {TIMEOUT_S:g} s"
    warnings.warn(f"rocm-smi {problem}; clocks, power and temperatures are not recorded.", stacklevel=2)
    return {}, ""


def rocm_cards(text: str) -> Cards:
    """Returns the cards in rocm-smi's output. Its JSON may follow warnings, such as that a card sleeps."""
    start = text.find("{")
    try:
        cards, _ = json.JSONDecoder().raw_decode(text[start:] if start >= 0 else "")
    except ValueError:
        warnings.warn(f"rocm-smi printed no JSON: {text[:200]}", stacklevel=2)
        return {}
    return {name: card for name, card in cards.items() if re.fullmatch(r"card\d+", name)}


def rocm_values(card: Mapping[str, object]) -> dict[str, float]:
    """Returns the card's readings; the second die of an MI250 has no power reading."""
    values = {}
    for name, patterns in _KEYS.items():
        number = _CLOCK if name.endswith("_mhz") else _NUMBER
        found = [
            float(match[1])
            for pattern in patterns
            for key, value in card.items()
            if re.match(pattern, key, re.IGNORECASE) and (match := number.search(str(value)))
        ]
        if found:
            values[name] = found[0]
    return values


def rocm_card(device: torch.device, cards: Cards) -> str | None:
    """Returns the device's card: the one with its unique ID, or by index, because desktop cards have no ID."""
    # HIP gives the digits of the ID as the bytes of the UUID.
    unique = bytes.fromhex(str(torch.cuda.get_device_properties(device).uuid).replace("-", "")).decode(
        "ascii", "replace"
    )
    by_id = {str(card.get("Unique ID", "")).lower().removeprefix("0x"): name for name, card in cards.items()}
    if unique.lower() in by_id:
        return by_id[unique.lower()]
    index = device.index or 0
    if visible := os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")):
        index = int(visible.split(",")[index])
    if (name := f"card{index}") in cards:
        return name
    warnings.warn(f"rocm-smi lists no {name} for {device}; its clocks are not recorded.", stacklevel=2)
    return None


class Sample(NamedTuple):
    """A GPU's readings at one time."""

    values: dict[str, float]
    """`sm_clock_mhz`, `memory_clock_mhz`, `power_w`, `temperature_c`, and with NVML `throttle_reasons` (bits), as far
    as the GPU reports them."""
    rocm_smi_output: str | None = None
    """The output of rocm-smi, on AMD."""


NOTHING = Sample({})


class DeviceSampler:
    """`with DeviceSampler(device, interval_s) as sampler:` takes a sample of this GPU every interval.

    It takes none on a CPU, with an interval of 0, and without NVML and rocm-smi.
    """

    def __init__(self, device: torch.device, interval_s: float) -> None:
        self._device = device
        self._interval_s = max(interval_s, ROCM_SMI_INTERVAL_S) if torch.version.hip else interval_s
        self._wanted = device.type == "cuda" and interval_s > 0
        self._taken: list[tuple[float, Sample]] = []
        self._ended = threading.Event()
        # A daemon thread does not keep alive a process that ends inside the block.
        self._thread = threading.Thread(target=self._run, name="DeviceSampler", daemon=True)

    def __enter__(self) -> DeviceSampler:
        read = _reader_for(self._device) if self._wanted else None
        if read:
            self._read = read
            # The first step needs a sample too, and a GPU that cannot be read fails here.
            self._take()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def last_before(self, unix_s: float) -> Sample:
        """Returns the last sample up to this time (seconds since 1970); an empty one if there is none."""
        place = bisect_right(self._taken, unix_s, key=lambda taken: taken[0])
        return self._taken[place - 1][1] if place else NOTHING

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._interval_s):
                self._take()
        except Exception:
            # The run goes on without samples. An empty one keeps the last one from being used for later times.
            traceback.print_exc()
            self._taken.append((time.time(), NOTHING))

    def _take(self) -> None:
        sample = self._read()
        self._taken.append((time.time(), sample))


def _reader_for(device: torch.device) -> Callable[[], Sample] | None:
    if not torch.version.hip:
        handle = nvml_handle(device)
        return None if handle is None else lambda: Sample(read_nvml(handle))
    cards, _ = query_rocm_smi()
    card = rocm_card(device, cards) if cards else None

    def read() -> Sample:
        found, text = query_rocm_smi(card)
        return Sample(rocm_values(found.get(str(card), {})), text)

    return read if card else None


def environment(device: torch.device, machine: Mapping[str, object]) -> dict[str, object]:
    """Returns the launcher's record of the machine (`identity.machine`) with the properties that only torch knows."""
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


def conditions(ranks: Ranks) -> dict[str, object]:
    """Returns this machine's load, and present readings of the GPUs of its ranks from NVML or rocm-smi, if they
    answer."""
    load: dict[str, object] = {"load_1min": os.getloadavg()[0]}
    if ranks.device.type != "cuda":
        return load
    devices = [torch.device("cuda", index) for index in range(ranks.ranks_per_node)]
    if not torch.version.hip:
        return load | {"gpus": [read_nvml(handle) for device in devices if (handle := nvml_handle(device))]}
    cards, _ = query_rocm_smi()
    names = [rocm_card(device, cards) for device in devices] if cards else []
    return load | {"gpus": [rocm_values(cards[name]) for name in names if name]}
