"""What NVML tells, with a stand-in for it: this needs no GPU."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from overlap_sweep.measure import environment

TOLD = {
    "nvmlDeviceGetClockInfo": 1500,
    "nvmlDeviceGetPowerUsage": 250_000,
    "nvmlDeviceGetTemperature": 40,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
}
ALL = {"sm_clock_mhz": 1500, "memory_clock_mhz": 1500, "power_w": 250.0, "temperature_c": 40, "throttle_reasons": 4}


def tells(monkeypatch: pytest.MonkeyPatch, not_supported: tuple[str, ...], error: int) -> dict[str, float]:
    def query(name: str) -> Any:
        def answer(*_: Any) -> int:
            if name in not_supported:
                raise pynvml.NVMLError(error)
            return TOLD[name]

        return answer

    for name in TOLD:
        monkeypatch.setattr(pynvml, name, query(name))
    return environment._gpu_conditions("a GPU")


def test_everything_that_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tells(monkeypatch, (), 0) == ALL


def test_what_it_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tells(monkeypatch, ("nvmlDeviceGetPowerUsage",), pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert found == {name: value for name, value in ALL.items() if name != "power_w"}


def test_a_lost_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pynvml.NVMLError):
        tells(monkeypatch, ("nvmlDeviceGetPowerUsage",), pynvml.NVML_ERROR_GPU_IS_LOST)
