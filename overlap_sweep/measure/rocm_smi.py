"""What AMD's rocm-smi tells of a GPU at this moment, under the names that NVML's values have here.

It is a program, and its keys differ from version to version: they are looked for by regular expressions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from typing import Any

import torch

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
"""By name the keys, the best first."""
_CLOCK = re.compile(r"(\d+(?:\.\d+)?)\s*mhz", re.IGNORECASE)
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*$")
_UNIQUE_ID = "Unique ID"

Cards = Mapping[str, Mapping[str, Any]]


def found() -> bool:
    """Whether there is a rocm-smi in PATH. Warns where there is none."""
    if shutil.which("rocm-smi"):
        return True
    warnings.warn("rocm-smi is not in PATH: clocks, power and temperatures are not recorded", stacklevel=2)
    return False


def query(card: str | None = None) -> tuple[Cards, str]:
    """What is told of the card (`card0`), or of all of them, and the text in which it was. Warns where it fails."""
    command = ["rocm-smi", *(("-d", card.removeprefix("card")) if card else ()), *_QUERY]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S).stdout.strip()
    except subprocess.TimeoutExpired:
        warnings.warn(f"rocm-smi did not answer in {TIMEOUT_S:g} s", stacklevel=2)
        return {}, ""
    return cards_in(text), text


def cards_in(text: str) -> Cards:
    """Warnings may stand before the JSON document, such as that a card sleeps."""
    start = text.find("{")
    try:
        told, _ = json.JSONDecoder().raw_decode(text[start:] if start >= 0 else "")
    except ValueError:
        warnings.warn(f"rocm-smi told nothing: {text[:200]}", stacklevel=2)
        return {}
    return {name: card for name, card in told.items() if re.fullmatch(r"card\d+", name)}


def values_of(card: Mapping[str, Any]) -> dict[str, float]:
    """Without what the card does not tell: the second die of a MI250 has no power of its own."""
    values = {}
    for name, patterns in _KEYS.items():
        number = _CLOCK if name.endswith("_mhz") else _NUMBER
        told = [
            float(match[1])
            for pattern in patterns
            for key, value in card.items()
            if re.match(pattern, key, re.IGNORECASE) and (match := number.search(str(value)))
        ]
        if told:
            values[name] = told[0]
    return values


def card_of(device: torch.device, cards: Cards) -> str | None:
    """The name of the device's card: the one with its unique ID. Those for desktops have none; they are counted."""
    # HIP gives the digits of the ID as the bytes of the UUID.
    unique = bytes.fromhex(str(torch.cuda.get_device_properties(device).uuid).replace("-", "")).decode(
        "ascii", "replace"
    )
    by_id = {str(told.get(_UNIQUE_ID, "")).lower().removeprefix("0x"): name for name, told in cards.items()}
    if unique.lower() in by_id:
        return by_id[unique.lower()]
    index = device.index or 0
    if visible := os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")):
        index = int(visible.split(",")[index])
    if (name := f"card{index}") in cards:
        return name
    warnings.warn(f"rocm-smi knows no {name} for {device}: its clocks, power and temperature are missing", stacklevel=2)
    return None
