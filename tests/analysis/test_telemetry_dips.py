"""Steps of training runs that stand out, and what the device says of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep.analysis.telemetry import Device, Run, read_telemetry
from overlap_sweep.analysis.telemetry_dips import Dip, device_finding, find_dips, slow_devices
from overlap_sweep.analysis.telemetry_steps import select, spread
from tests.analysis.telemetry_logs import SLOW_DEVICE, USUAL_DEVICE, write_run

Dips = Mapping[tuple[int, int], Mapping[str, Any]]


def only_run(directory: Path) -> Run:
    (run,) = read_telemetry(directory).runs
    return run


def dips_of(directory: Path, dips: Dips, ranks: int = 2) -> list[Dip]:
    run = only_run(write_run(directory, ranks=ranks, dips=dips))
    return find_dips(run, select(run).measured)


EXPOSED = {"hidden_ms": 10.0, "exposed_ms": 30.0}
NOISY = {(n, r): {"compute_ms": 80.0 + (n * 37 % 11) * 2} for n in range(1, 30) for r in range(2)}


@pytest.mark.parametrize(
    ("dips", "expected"),
    [
        ({}, []),
        ({(9, 1): EXPOSED}, [(9, 1, [])]),
        # Noisy steps dip only far beyond their noise.
        (NOISY, []),
        (NOISY | {(12, r): {"compute_ms": 160.0} for r in range(2)}, [(12, 0, [1])]),
        # 4 % slower is far beyond the noise here, but nothing to look at.
        ({(12, r): {"compute_ms": 83.5, "hidden_ms": 30.0} for r in range(2)}, []),
    ],
    ids=["all alike", "exposed", "noisy", "beyond the noise", "small"],
)
def test_steps_that_stand_out_dip(tmp_path: Path, dips: Dips, expected: list[tuple[int, int, list[int]]]) -> None:
    assert [(dip.step, dip.rank, dip.other_ranks) for dip in dips_of(tmp_path, dips)] == expected


def test_a_dip_that_the_device_explains(tmp_path: Path) -> None:
    slow = {"compute_ms": 96.0, "hidden_ms": 17.0, "exposed_ms": 24.0, "device": SLOW_DEVICE}
    waits = {"compute_ms": 80.0, "exposed_ms": 40.0}
    (dip,) = dips_of(tmp_path, {(17, 3): slow, **{(17, rank): waits for rank in range(3)}}, ranks=4)
    assert (dip.step, dip.rank, dip.other_ranks) == (17, 3, [0, 1, 2])
    assert dip.hidden_share == pytest.approx(17 / 41)
    assert dip.usual_hidden_share == pytest.approx(0.8, abs=0.01)
    assert (dip.less_hidden, dip.slower) == (True, True)
    assert dip.slowdown == pytest.approx(120 / 88.3 - 1, abs=0.01)
    assert dip.device
    assert (dip.device.explains, dip.device.reasons) == (True, ["SW power cap"])
    assert dip.device.usual.sm_clock_mhz == 1980


@pytest.mark.parametrize(
    ("dips", "of_device"),
    [
        ({(9, 1): EXPOSED}, (1, False, False)),
        ({(9, 1): {**EXPOSED, "device": {}}}, None),
        # Its clock is low, but it is the others that wait for it.
        ({(9, 0): EXPOSED, (9, 1): {"device": SLOW_DEVICE}}, (1, True, True)),
        # A step hotter than all others.
        ({(9, 1): {**EXPOSED, "device": {**USUAL_DEVICE, "temperature_c": 75.0}}}, (1, False, True)),
    ],
    ids=["not explained", "no samples", "another rank's", "hottest"],
)
def test_what_the_device_says(tmp_path: Path, dips: Dips, of_device: tuple[int, bool, bool] | None) -> None:
    """Whose device it is, whether it explains the dip, and whether the step is the hottest."""
    (dip,) = dips_of(tmp_path, dips)
    assert (dip.device and (dip.device.rank, dip.device.explains, dip.device.hottest)) == of_device


def test_less_hidden_and_slower_are_two_things(tmp_path: Path) -> None:
    (dip,) = dips_of(tmp_path, NOISY | {(12, r): {"compute_ms": 160.0} for r in range(2)})
    assert (dip.slower, dip.less_hidden) == (True, False)


def test_spread_is_not_widened_by_what_it_is_to_find() -> None:
    assert spread([10.0] * 20 + [100.0] * 5) == spread([10.0] * 25)
    assert spread([10.0] * 25, relative=0.05).tolerance == 0.5
    assert spread([9.0, 10.0, 11.0]).tolerance == pytest.approx(4 * 1.4826)


USUAL = msgspec.convert(USUAL_DEVICE, Device)
CAPPED = Device(sm_clock_mhz=1700.0, throttle_reasons=4)


@pytest.mark.parametrize(
    ("bits", "clock", "usual", "reasons", "explains"),
    [
        (0x4, 1965.0, USUAL, ["SW power cap"], False),
        (0x4, 1410.0, USUAL, ["SW power cap"], True),
        (0x8 | 0x40, 1410.0, USUAL, ["HW slowdown", "HW thermal slowdown"], True),
        (0x20, 1000.0, USUAL, ["SW thermal slowdown"], True),
        (0x80, 1980.0, USUAL, ["HW power brake"], False),
        (0x1, 1980.0, USUAL, ["GPU idle"], False),
        (0x0, 1410.0, USUAL, [], True),
        (0x0, 1965.0, USUAL, [], False),
        (0x200, 1980.0, USUAL, [], False),
        # What is there in most steps explains nothing, unless the clock drops.
        (0x4, 1700.0, CAPPED, [], False),
        (0x4, 1400.0, CAPPED, ["SW power cap"], True),
    ],
)
def test_throttle_reasons_by_their_names(
    bits: int, clock: float, usual: Device, reasons: list[str], explains: bool
) -> None:
    finding = device_finding(0, Device(sm_clock_mhz=clock, throttle_reasons=bits), usual, slowdown=0.1)
    assert finding
    assert (finding.reasons, finding.explains) == (reasons, explains)


@pytest.mark.parametrize(("slowdown", "explains"), [(-0.1, True), (0.1, True), (0.4, True), (0.5, False), (3.2, False)])
def test_a_clock_explains_what_it_has_a_sizeable_part_in(slowdown: float, explains: bool) -> None:
    """It is a tenth slower."""
    finding = device_finding(0, Device(sm_clock_mhz=1800.0), Device(sm_clock_mhz=1980.0), slowdown)
    assert finding
    assert (finding.slower_clock, finding.explains) == (True, explains)


def test_a_rank_with_a_slow_clock_throughout_is_named(tmp_path: Path) -> None:
    slow = {(n, 2): {"device": {**USUAL_DEVICE, "sm_clock_mhz": 1500.0}} for n in range(30)}
    run = only_run(write_run(tmp_path / "run", ranks=4, dips=slow))
    assert slow_devices(run, select(run).measured) == ["run: rank 2 runs at 1,500 MHz, the ranks' median is 1,980 MHz."]
