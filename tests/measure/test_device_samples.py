"""Samples of a GPU that this machine lacks: NVML is replaced by functions, rocm-smi by a program in PATH."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overlap_sweep.measure import device_samples, nvml, rocm_smi
from overlap_sweep.measure.device_samples import NOTHING, DeviceSampler, Sample
from overlap_sweep.measure.environment import conditions
from overlap_sweep.ranks import Ranks

GPU = torch.device("cuda", 0)
UNIQUE_ID = "719d230578348e8c"

MI250 = {
    "card0": {
        "Unique ID": f"0x{UNIQUE_ID}",
        **{"Temperature (Sensor edge) (C)": "32.0", "Temperature (Sensor junction) (C)": "35.0"},
        "Temperature (Sensor memory) (C)": "43.0",
        **{"fclk clock speed:": "(400Mhz)", "fclk clock level:": "0", "mclk clock speed:": "(1600Mhz)"},
        **{"mclk clock level:": "3", "sclk clock speed:": "(800Mhz)", "sclk clock level:": "1"},
        **{"Max Graphics Package Power (W)": "560.0", "Average Graphics Package Power (W)": "89.0"},
    },
    "card1": {
        **{"Unique ID": "0x719d230578348e8d", "Temperature (Sensor junction) (C)": "36.0"},
        **{"sclk clock speed:": "(1700Mhz)", "Average Graphics Package Power (W)": "N/A (Secondary die)"},
    },
    "system": {"Driver version": "5.18.13"},
}
"""ROCm 5. The two are the dies of one card."""
MI300 = {
    "card0": {
        **{"Unique ID": f"0x{UNIQUE_ID}", "Current Socket Graphics Package Power (W)": "133.0"},
        **{"Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "35.0"},
        **{"mclk clock speed:": "(900Mhz)", "sclk clock speed:": "(131Mhz)"},
    }
}
"""ROCm 6."""
VEGA = {
    "card0": {
        **{"Unique ID": "N/A", "Temperature (Sensor edge) (c)": "77.0", "Average Graphics Package Power (W)": "222.0"},
        **{"mclk clock level": "2 (1001Mhz)", "sclk clock level": "5 (1802Mhz)"},
    }
}
"""ROCm 3 and 4, which no unique ID was to be had from."""


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """-> install a rocm-smi that prints a text; the file in which it notes its arguments."""
    monkeypatch.setattr(torch.version, "hip", "6.3.42131")
    uuid = UNIQUE_ID.encode().hex()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(device_samples, "ROCM_SMI_INTERVAL_S", 0.01)
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
        (MI300["card0"], {"sm_clock_mhz": 131, "memory_clock_mhz": 900, "power_w": 133, "temperature_c": 35}),
        (VEGA["card0"], {"sm_clock_mhz": 1802, "memory_clock_mhz": 1001, "power_w": 222, "temperature_c": 77}),
    ],
)
def test_every_version_s_keys_are_understood(card: dict[str, str], values: dict[str, float]) -> None:
    assert rocm_smi.values_of(card) == values


@pytest.mark.parametrize("before", ["", "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n"])
def test_cards_are_found_behind_a_warning_and_beside_what_is_none(before: str) -> None:
    assert rocm_smi.cards_in(f"{before}{json.dumps(MI250)}\n") == {name: MI250[name] for name in ("card0", "card1")}


@pytest.mark.parametrize("text", ["", "rocm-smi: error", "{", "[1]"])
def test_no_document_is_no_card(text: str) -> None:
    with pytest.warns(UserWarning, match="rocm-smi told nothing"):
        assert rocm_smi.cards_in(text) == {}


def test_a_rank_s_own_card_is_found_by_its_unique_id_and_asked_alone(amd: Callable[[str], Path]) -> None:
    cards = {"card0": MI250["card1"], "card1": MI250["card0"]}
    calls = amd(json.dumps(cards))
    with DeviceSampler(GPU, 0.01) as sampler:
        assert sampler.last_before(time.time()).values["power_w"] == 89
    asked = calls.read_text().splitlines()
    assert not asked[0].startswith("-d")
    assert all(call.startswith("-d 1 ") and call.endswith("--json") for call in asked[1:])
    assert len(asked) >= 2


def test_desktop_cards_are_counted(amd: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    amd("")
    cards = {"card0": {}, "card1": VEGA["card0"]}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert rocm_smi.card_of(GPU, cards) == "card1"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    with pytest.warns(UserWarning, match="knows no card3 for cuda:0"):
        assert rocm_smi.card_of(GPU, cards) is None


def test_what_rocm_smi_said_is_kept_and_a_call_that_fails_on_the_way_is_an_empty_sample(
    amd: Callable[[str], Path],
) -> None:
    answer = json.dumps(MI300)
    amd(answer)
    with warnings.catch_warnings(), DeviceSampler(GPU, 0.01) as sampler:
        warnings.simplefilter("ignore")
        amd("ERROR: no more")
        _until(lambda: sampler.last_before(time.time()) == Sample({}, "ERROR: no more"))
        amd(answer)
        _until(lambda: bool(sampler.last_before(time.time()).values))
    found = sampler.last_before(time.time())
    assert (found.rocm_smi_output, found.values) == (answer, rocm_smi.values_of(MI300["card0"]))


def test_a_rocm_smi_that_hangs_is_given_up(amd: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = amd("{}")
    (calls.parent / "rocm-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(rocm_smi, "TIMEOUT_S", 0.2)
    with pytest.warns(UserWarning, match="did not answer in 0.2 s"), DeviceSampler(GPU, 0.01) as sampler:
        assert sampler.last_before(time.time()) == NOTHING


def test_without_rocm_smi_nothing_is_sampled_and_one_warning_says_so(amd: Callable[[str], Path]) -> None:
    with pytest.warns(UserWarning, match="rocm-smi is not in PATH") as said, DeviceSampler(GPU, 0.01) as sampler:
        time.sleep(0.05)
    assert (len(said), sampler.last_before(time.time())) == (1, NOTHING)
    with pytest.warns(UserWarning, match="rocm-smi is not in PATH"):
        assert conditions(Ranks(0, 2, GPU))["gpus"] == []


def test_conditions_on_amd_are_of_every_rank_s_card(
    amd: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = amd(json.dumps(MI250))
    ids = {0: "719d230578348e8d", 1: UNIQUE_ID}
    of = lambda device: SimpleNamespace(uuid=ids[device.index].encode().hex())  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", of)
    found = conditions(Ranks(0, 2, GPU))["gpus"]
    assert [gpu["temperature_c"] for gpu in found] == [36, 35]
    assert len(calls.read_text().splitlines()) == 1


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU whose clock is the list's first number until that is taken out; without numbers it is lost."""
    clocks = [1500.0]
    monkeypatch.setattr(nvml, "handle_of", lambda device: "a GPU")
    monkeypatch.setattr(nvml, "read", lambda handle: {"sm_clock_mhz": clocks[0]})
    return clocks


def test_each_moment_has_the_sample_that_was_taken_last_before_it(nvidia: list[float]) -> None:
    before = time.time()
    with DeviceSampler(GPU, 0.005) as sampler:
        first = time.time()
        nvidia[:] = [900.0]
        _until(lambda: sampler.last_before(time.time()).values == {"sm_clock_mhz": 900.0})
    assert sampler.last_before(before) == NOTHING
    assert sampler.last_before(first).values == {"sm_clock_mhz": 1500.0}
    assert sampler.last_before(time.time() + 100).values == {"sm_clock_mhz": 900.0}


def test_a_gpu_that_is_lost_meanwhile_is_told_of_and_leaves_no_old_samples(
    nvidia: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with DeviceSampler(GPU, 0.005) as sampler:
        first = time.time()
        nvidia.clear()
        _until(lambda: sampler.last_before(time.time()) == NOTHING)
    assert sampler.last_before(first).values == {"sm_clock_mhz": 1500.0}
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


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
