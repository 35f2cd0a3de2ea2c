"""What NVML, rocm-smi and torch tell of GPUs that this machine lacks: functions and a program stand for them."""

import json
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch

from overlap_sweep.measure import Ranks, environment
from overlap_sweep.measure.environment import NOTHING, DeviceSampler
from overlap_sweep.results.identity import environment_identity
from tests.sweeps import wait_for

GPU = torch.device("cuda", 0)
UNIQUE_ID, OTHER_ID = "719d230578348e8c", "719d230578348e8d"

MI250 = {
    "card0": {
        "Unique ID": f"0x{UNIQUE_ID}",
        **{"Temperature (Sensor edge) (C)": "32.0", "Temperature (Sensor junction) (C)": "35.0"},
        **{"mclk clock speed:": "(1600Mhz)", "mclk clock level:": "3"},
        **{"sclk clock speed:": "(800Mhz)", "sclk clock level:": "1"},
        **{"Max Graphics Package Power (W)": "560.0", "Average Graphics Package Power (W)": "89.0"},
    },
    "card1": {
        **{"Unique ID": f"0x{OTHER_ID}", "Temperature (Sensor junction) (C)": "36.0"},
        **{"sclk clock speed:": "(1700Mhz)", "Average Graphics Package Power (W)": "N/A (Secondary die)"},
    },
}
"""ROCm 5. The two are the dies of one card."""
MI300 = {
    **{"Unique ID": f"0x{UNIQUE_ID}", "Current Socket Graphics Package Power (W)": "133.0"},
    **{"Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "35.0"},
    **{"mclk clock speed:": "(900Mhz)", "sclk clock speed:": "(131Mhz)"},
}
"""ROCm 6."""
VEGA = {
    **{"Unique ID": "N/A", "Temperature (Sensor edge) (c)": "77.0", "Average Graphics Package Power (W)": "222.0"},
    **{"mclk clock level": "2 (1001Mhz)", "sclk clock level": "5 (1802Mhz)"},
}
"""ROCm 3 and 4, which no unique ID was to be had from."""


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """-> install a rocm-smi that prints a text; the file in which it notes its arguments."""
    ids = [UNIQUE_ID, OTHER_ID]
    monkeypatch.setattr(torch.version, "hip", "6.3.42131")
    properties = lambda device: SimpleNamespace(uuid=ids[device.index].encode().hex())  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(environment, "ROCM_SMI_INTERVAL_S", 0.01)
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program, answered = tmp_path / "rocm-smi", tmp_path / "answer"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncat {answered}\n')

    def install(answer: str) -> Path:
        # Whole, whoever reads it meanwhile.
        (tmp_path / "next").write_text(answer)
        (tmp_path / "next").rename(answered)
        program.chmod(0o755)
        return tmp_path / "calls"

    return install


@pytest.mark.parametrize(
    ("card", "values"),
    [
        (MI250["card0"], {"sm_clock_mhz": 800, "memory_clock_mhz": 1600, "power_w": 89, "temperature_c": 35}),
        # What a card does not tell is left out.
        (MI250["card1"], {"sm_clock_mhz": 1700, "temperature_c": 36}),
        (MI300, {"sm_clock_mhz": 131, "memory_clock_mhz": 900, "power_w": 133, "temperature_c": 35}),
        (VEGA, {"sm_clock_mhz": 1802, "memory_clock_mhz": 1001, "power_w": 222, "temperature_c": 77}),
    ],
)
def test_every_version_s_keys_are_understood(card: dict[str, str], values: dict[str, float]) -> None:
    assert environment.rocm_values(card) == values


def test_cards_are_found_behind_a_warning_and_beside_what_is_none() -> None:
    given = json.dumps({**MI250, "system": {"Driver version": "5.18.13"}})
    assert environment.rocm_cards(f"WARNING: AMD GPU device(s) is/are in a low-power state.\n\n{given}\n") == MI250
    for text in ("rocm-smi: error", "{"):
        with pytest.warns(UserWarning, match="rocm-smi printed no JSON"):
            assert environment.rocm_cards(text) == {}


def test_a_rank_s_own_card_is_found_by_its_unique_id_and_asked_alone(amd: Callable[[str], Path]) -> None:
    calls = amd(json.dumps({"card0": MI250["card1"], "card1": MI250["card0"]}))
    with DeviceSampler(GPU, 0.01) as sampler:
        assert sampler.last_before(time.time()).values["power_w"] == 89
    asked = calls.read_text().splitlines()
    assert not asked[0].startswith("-d")
    assert all(call.startswith("-d 1 ") and call.endswith("--json") for call in asked[1:])
    assert len(asked) >= 2


def test_desktop_cards_are_counted(amd: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"card0": {}, "card1": VEGA}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert environment.rocm_card(GPU, cards) == "card1"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    with pytest.warns(UserWarning, match="lists no card3 for cuda:0"):
        assert environment.rocm_card(GPU, cards) is None


def test_what_rocm_smi_said_is_kept_and_a_call_that_fails_on_the_way_is_an_empty_sample(
    amd: Callable[[str], Path],
) -> None:
    answer = json.dumps({"card0": MI300})
    amd(answer)
    with warnings.catch_warnings(), DeviceSampler(GPU, 0.01) as sampler:
        warnings.simplefilter("ignore")
        for said, values in (("ERROR: no more", {}), (answer, environment.rocm_values(MI300))):
            amd(said)
            wait_for(lambda said=said: sampler.last_before(time.time()).rocm_smi_output == said)
            assert sampler.last_before(time.time()).values == values


def test_a_rocm_smi_that_hangs_is_given_up(amd: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = amd("{}")
    (calls.parent / "rocm-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(environment, "TIMEOUT_S", 0.2)
    with pytest.warns(UserWarning, match="did not answer within 0.2 s"), DeviceSampler(GPU, 0.01) as sampler:
        assert sampler.last_before(time.time()) == NOTHING


def test_without_rocm_smi_nothing_is_sampled_and_one_warning_says_so(amd: Callable[[str], Path]) -> None:
    with pytest.warns(UserWarning, match="rocm-smi is not in PATH") as said, DeviceSampler(GPU, 0.01) as sampler:
        time.sleep(0.05)
    assert (len(said), sampler.last_before(time.time())) == (1, NOTHING)
    with pytest.warns(UserWarning, match="rocm-smi is not in PATH"):
        assert environment.conditions(Ranks(0, 2, GPU))["gpus"] == []


def test_conditions_on_amd_are_of_every_rank_s_card(amd: Callable[[str], Path]) -> None:
    calls = amd(json.dumps({"card0": MI250["card1"], "card1": MI250["card0"]}))
    found = environment.conditions(Ranks(0, 2, GPU))["gpus"]
    assert [gpu["temperature_c"] for gpu in found] == [35, 36]
    assert len(calls.read_text().splitlines()) == 1


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU whose clock is the list's first number until that is taken out; without numbers it is lost."""
    clocks = [1500.0]
    monkeypatch.setattr(environment, "nvml_handle", lambda device: "a GPU")
    monkeypatch.setattr(environment, "read_nvml", lambda handle: {"sm_clock_mhz": clocks[0]})
    return clocks


def test_conditions_on_several_nodes_are_of_this_node_s_gpus(nvidia: list[float]) -> None:
    for nodes, count in {1: 8, 2: 4, 8: 1}.items():
        assert len(environment.conditions(Ranks(0, 8, GPU, node=0, nodes=nodes))["gpus"]) == count


def test_each_moment_has_the_sample_that_was_taken_last_before_it_and_a_lost_gpu_leaves_no_old_ones(
    nvidia: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    before = time.time()
    with DeviceSampler(GPU, 0.005) as sampler:
        first = time.time()
        nvidia[:] = [900.0]
        wait_for(lambda: sampler.last_before(time.time()).values == {"sm_clock_mhz": 900.0})
        second = time.time()
        nvidia.clear()
        wait_for(lambda: sampler.last_before(time.time()) == NOTHING)
    clocks = [sampler.last_before(moment).values for moment in (before, first, second, time.time() + 100)]
    assert clocks == [{}, {"sm_clock_mhz": 1500.0}, {"sm_clock_mhz": 900.0}, {}]
    assert "IndexError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "interval_s", "running"), [(torch.device("cpu"), 0.1, 0), (GPU, 0.0, 0), (GPU, 60.0, 1)]
)
def test_a_sampler_runs_only_where_something_is_to_be_taken_and_outlives_neither_its_block_nor_the_process(
    nvidia: list[float], device: torch.device, interval_s: float, running: int
) -> None:
    with DeviceSampler(device, interval_s) as sampler:
        threads = [thread for thread in threading.enumerate() if thread.name == "DeviceSampler"]
        # Daemons keep no process alive.
        assert [thread.daemon for thread in threads] == [True] * running
    assert not any(thread.is_alive() for thread in threads)
    assert running or sampler.last_before(time.time()) == NOTHING


NVML = {
    "nvmlDeviceGetClockInfo": (1500, {"sm_clock_mhz": 1500, "memory_clock_mhz": 1500}),
    "nvmlDeviceGetPowerUsage": (250_000, {"power_w": 250.0}),
    "nvmlDeviceGetTemperature": (40, {"temperature_c": 40}),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (4, {"throttle_reasons": 4}),
}
"""What its functions answer, and what is to be read of it."""


@pytest.mark.parametrize("missing", [None, *NVML])
def test_what_a_gpu_does_not_support_is_left_out_and_a_lost_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    for name, (answer, _) in NVML.items():
        error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) if name == missing else None
        monkeypatch.setattr(pynvml, name, Mock(return_value=answer, side_effect=error))
    given = {key: value for name, (_, values) in NVML.items() if name != missing for key, value in values.items()}
    assert environment.read_nvml("a GPU") == given
    lost = Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
    monkeypatch.setattr(pynvml, missing or "nvmlDeviceGetPowerUsage", lost)
    with pytest.raises(pynvml.NVMLError):
        environment.read_nvml("a GPU")


def test_the_environment_is_the_launcher_s_account_and_on_a_gpu_what_torch_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"host": "node1", "device": "cuda", "gpu": None, "gpus": ["NVIDIA H200"], "links": ["NV18"]}
    assert environment.environment(torch.device("cpu"), given) == given
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, total_memory=150_754_820_096)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 3)))
    found = environment.environment(GPU, given)
    assert (found["gpu"], found["gpu_count"], found["sm_count"]) == ("NVIDIA H200", 4, 132)
    assert (found["memory_gb"], found["nccl"]) == (150.8, "2.27.3")
    # What decides whether it stands for another measurement is the launcher's alone.
    assert environment_identity(found) == environment_identity(given)
