"""Clocks, power and temperature of a GPU: at a moment, and during a run."""

from __future__ import annotations

import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from overlap_sweep.measure import nvml, rocm_smi

ROCM_SMI_INTERVAL_S = 1.0
"""At least so long between two calls of rocm-smi: each is a process that takes some tenths of a second."""


class Sample(NamedTuple):
    """What a GPU told at a moment."""

    values: dict[str, float]
    """`sm_clock_mhz`, `memory_clock_mhz`, `power_w`, `temperature_c`, and of NVML `throttle_reasons` (its bits), as far
    as the GPU tells."""
    rocm_smi_output: str | None = None
    """The same as rocm-smi put it, on AMD."""


NOTHING = Sample({})


def samples_now(devices: Sequence[torch.device]) -> list[Sample]:
    """Of each GPU; none at all where nobody can be asked."""
    if torch.version.hip:
        if not rocm_smi.found():
            return []
        cards, text = rocm_smi.query()
        names = [rocm_smi.card_of(device, cards) for device in devices]
        return [Sample(rocm_smi.values_of(cards[name]), text) for name in names if name]
    handles = [nvml.handle_of(device) for device in devices]
    return [Sample(nvml.read(handle)) for handle in handles if handle is not None]


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
        """The last one that was taken by then (seconds since 1970); an empty one where there is none."""
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
    """What takes a sample; None where nobody can be asked."""
    if not torch.version.hip:
        handle = nvml.handle_of(device)
        return None if handle is None else lambda: Sample(nvml.read(handle))
    cards = rocm_smi.query()[0] if rocm_smi.found() else {}
    card = rocm_smi.card_of(device, cards) if cards else None
    return (lambda: _rocm_sample(card)) if card else None


def _rocm_sample(card: str) -> Sample:
    cards, text = rocm_smi.query(card)
    return Sample(rocm_smi.values_of(cards.get(card, {})), text)
