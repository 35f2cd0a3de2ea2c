"""What NVML and torch tell of a GPU, with stand-ins for it: this needs none."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch

from overlap_sweep.identity import environment_identity
from overlap_sweep.measure import environment, nvml

TOLD = {
    "nvmlDeviceGetClockInfo": (1500, {"sm_clock_mhz": 1500, "memory_clock_mhz": 1500}),
    "nvmlDeviceGetPowerUsage": (250_000, {"power_w": 250.0}),
    "nvmlDeviceGetTemperature": (40, {"temperature_c": 40}),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (4, {"throttle_reasons": 4}),
}
"""What NVML's functions answer, and what is to be read of it."""


def read(monkeypatch: pytest.MonkeyPatch, failing: str | None = None, error: int = 0) -> dict[str, float]:
    for name, (answer, _) in TOLD.items():
        stand_in = Mock(return_value=answer, side_effect=pynvml.NVMLError(error) if name == failing else None)
        monkeypatch.setattr(pynvml, name, stand_in)
    return nvml.read("a GPU")


@pytest.mark.parametrize("missing", [None, *TOLD])
def test_what_a_gpu_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    found = read(monkeypatch, missing, pynvml.NVML_ERROR_NOT_SUPPORTED)
    told = {name: values for name, (_, values) in TOLD.items() if name != missing}
    assert found == {name: value for values in told.values() for name, value in values.items()}


def test_a_lost_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pynvml.NVMLError):
        read(monkeypatch, "nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_GPU_IS_LOST)


def test_on_a_cpu_the_launcher_s_account_is_all() -> None:
    told = {"host": "node1", "device": "cpu", "packages": {"torch": "2.13.0"}}
    assert environment.environment(torch.device("cpu"), told) == told


def test_on_a_gpu_torch_has_more_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, total_memory=150_754_820_096)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 3)))
    told = {"host": "node1", "device": "cuda", "gpu": None, "gpus": ["NVIDIA H200"], "links": ["NV18"]}
    found = environment.environment(torch.device("cuda", 0), told)
    assert (found["gpu"], found["gpu_count"], found["sm_count"]) == ("NVIDIA H200", 4, 132)
    assert (found["memory_gb"], found["nccl"]) == (150.8, "2.27.3")
    # What decides whether it stands for another measurement is the launcher's alone.
    assert environment_identity(found) == environment_identity(told)
