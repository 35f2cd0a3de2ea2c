"""Steps of training runs that stand out, and what the device says of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from overlap_sweep.analysis.telemetry import Device, Run, read_telemetry
from overlap_sweep.analysis.telemetry_dips import Dip, device_finding, find_dips, slow_devices
from overlap_sweep.analysis.telemetry_steps import select, spread
from tests.analysis.telemetry_logs import SLOW_DEVICE, USUAL_DEVICE, write_run


def only_run(directory: Path) -> Run:
    (run,) = read_telemetry(directory).runs
    return run


def dips_of(directory: Path) -> list[Dip]:
    run = only_run(directory)
    return find_dips(run, select(run).measured)


def test_steps_that_are_all_alike_do_not_dip(tmp_path: Path) -> None:
    assert dips_of(write_run(tmp_path)) == []


def test_a_dip_that_the_device_explains(tmp_path: Path) -> None:
    slow = {"compute_ms": 96.0, "hidden_ms": 17.0, "exposed_ms": 24.0, "device": SLOW_DEVICE}
    waits = {"compute_ms": 80.0, "exposed_ms": 40.0}
    (dip,) = dips_of(write_run(tmp_path, ranks=4, dips={(17, 3): slow, **{(17, rank): waits for rank in range(3)}}))
    assert (dip.step, dip.rank, dip.other_ranks) == (17, 3, [0, 1, 2])
    assert dip.hidden_share == pytest.approx(17 / 41)
    assert dip.usual_hidden_share == pytest.approx(0.8, abs=0.01)
    assert dip.less_hidden
    assert dip.slower
    assert dip.slowdown == pytest.approx(120 / 88.3 - 1, abs=0.01)
    assert dip.device
    assert dip.device.explains
    assert dip.device.reasons == ["SW power cap"]
    assert dip.device.usual.sm_clock_mhz == 1980


def test_a_dip_that_it_does_not_explain(tmp_path: Path) -> None:
    (dip,) = dips_of(write_run(tmp_path, dips={(9, 1): {"hidden_ms": 10.0, "exposed_ms": 30.0}}))
    assert (dip.step, dip.rank, dip.other_ranks) == (9, 1, [])
    assert dip.device
    assert not dip.device.explains


def test_a_step_without_samples_of_the_device(tmp_path: Path) -> None:
    dips = {(9, 1): {"hidden_ms": 10.0, "exposed_ms": 30.0, "device": {}}}
    (dip,) = dips_of(write_run(tmp_path, dips=dips))
    assert dip.device is None


def test_the_device_of_a_rank_that_does_not_stand_out_itself(tmp_path: Path) -> None:
    """Its clock is low, but it is the others that wait for it."""
    dips = {(9, 0): {"hidden_ms": 10.0, "exposed_ms": 30.0}, (9, 1): {"device": SLOW_DEVICE}}
    (dip,) = dips_of(write_run(tmp_path, dips=dips))
    assert dip.rank == 0
    assert dip.device
    assert (dip.device.rank, dip.device.explains) == (1, True)


def test_noisy_steps_dip_only_far_beyond_their_noise(tmp_path: Path) -> None:
    noisy = {(n, r): {"compute_ms": 80.0 + (n * 37 % 11) * 2} for n in range(1, 30) for r in range(2)}
    assert dips_of(write_run(tmp_path / "noisy", dips=noisy)) == []
    slow = {(12, r): {"compute_ms": 160.0} for r in range(2)}
    (dip,) = dips_of(write_run(tmp_path / "slow", dips=noisy | slow))
    assert (dip.step, dip.slower, dip.less_hidden) == (12, True, False)


def test_small_changes_of_quiet_steps_are_no_dips(tmp_path: Path) -> None:
    """The floor: 4 % slower is far beyond the noise here, but nothing to look at."""
    small = {(12, r): {"compute_ms": 83.5, "hidden_ms": 30.0} for r in range(2)}
    assert dips_of(write_run(tmp_path, dips=small)) == []


def test_spread_is_not_widened_by_what_it_is_to_find() -> None:
    assert spread([10.0] * 20 + [100.0] * 5) == spread([10.0] * 25)
    assert spread([10.0] * 25, relative=0.05).tolerance == 0.5
    assert spread([9.0, 10.0, 11.0]).tolerance == pytest.approx(4 * 1.4826)


@pytest.mark.parametrize(
    ("bits", "clock", "reasons", "explains"),
    [
        (0x4, 1965.0, ["SW power cap"], False),
        (0x4, 1410.0, ["SW power cap"], True),
        (0x8 | 0x40, 1410.0, ["HW slowdown", "HW thermal slowdown"], True),
        (0x20, 1000.0, ["SW thermal slowdown"], True),
        (0x80, 1980.0, ["HW power brake"], False),
        (0x1, 1980.0, ["GPU idle"], False),
        (0x0, 1410.0, [], True),
        (0x0, 1965.0, [], False),
        (0x200, 1980.0, [], False),
    ],
)
def test_throttle_reasons_by_their_names(bits: int, clock: float, reasons: list[str], explains: bool) -> None:
    usual = msgspec.convert(USUAL_DEVICE, Device)
    finding = device_finding(0, Device(sm_clock_mhz=clock, throttle_reasons=bits), usual, slowdown=0.3)
    assert finding
    assert (finding.reasons, finding.explains) == (reasons, explains)


def test_what_is_there_in_most_steps_explains_nothing_unless_the_clock_drops() -> None:
    capped = Device(sm_clock_mhz=1700.0, throttle_reasons=4)
    always = device_finding(0, capped, capped, slowdown=0.1)
    assert always
    assert not always.explains
    dropped = device_finding(0, Device(sm_clock_mhz=1400.0, throttle_reasons=4), capped, slowdown=0.1)
    assert dropped
    assert (dropped.reasons, dropped.explains) == (["SW power cap"], True)


@pytest.mark.parametrize(("slowdown", "explains"), [(-0.1, True), (0.1, True), (0.4, True), (0.5, False), (3.2, False)])
def test_a_clock_explains_what_it_has_a_sizeable_part_in(slowdown: float, explains: bool) -> None:
    """It is a tenth slower."""
    finding = device_finding(0, Device(sm_clock_mhz=1800.0), Device(sm_clock_mhz=1980.0), slowdown)
    assert finding
    assert (finding.slower_clock, finding.explains) == (True, explains)


def test_a_step_hotter_than_all_others(tmp_path: Path) -> None:
    slow = {"compute_ms": 160.0, "device": {**USUAL_DEVICE, "temperature_c": 75.0}}
    (dip,) = dips_of(write_run(tmp_path, ranks=1, dips={(12, 0): slow}))
    assert dip.device
    assert (dip.device.hottest, dip.device.explains) == (True, False)


def test_a_rank_with_a_slow_clock_throughout_is_named(tmp_path: Path) -> None:
    slow = {(n, 2): {"device": {**USUAL_DEVICE, "sm_clock_mhz": 1500.0}} for n in range(30)}
    run = only_run(write_run(tmp_path / "run", ranks=4, dips=slow))
    assert slow_devices(run, select(run).measured) == ["run: rank 2 runs at 1,500 MHz, the ranks' median is 1,980 MHz."]
