"""How far a sweep's times can be trusted: baselines that drift, GPUs that were slowed down, points measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.provenance import slowed_gpus
from overlap_sweep.workloads.operator.answer import Drift, baseline_drift, repeated
from tests.make_point import default_timing, make_point, operator_config, pass_times
from tests.results.reading import only_case


def forward_drift(directory: Path) -> list[Drift]:
    return [drift for drift in baseline_drift(only_case(directory)) if drift.pass_name == "fwd"]


def test_each_baseline_drifts_on_its_own_in_the_order_of_measuring(tmp_path: Path) -> None:
    # Written in another order than measured.
    for minute, none_us, floor_us in ((3, 110.0, 50.0), (1, 100.0, 50.0), (2, 100.0, 60.0), (4, 110.0, 60.0)):
        started = f"2026-11-20T21:0{minute}:00+00:00"
        make_point("operator", tmp_path, fwd=pass_times(90.0, none_us, floor_us), started=started)
    assert forward_drift(tmp_path) == [
        Drift(2, "fc1", "fwd", "none", 4, 105.0, 100.0, 110.0, pytest.approx(0.1)),
        Drift(2, "fc1", "fwd", "floor", 4, 55.0, 50.0, 60.0, 0.0),
    ]


def test_the_default_drifts_over_its_distinct_measurements(tmp_path: Path) -> None:
    late, early = default_timing(120.0, minute=9), default_timing(100.0, minute=1)
    make_point("operator", tmp_path, fwd=pass_times(90.0, default=late))
    # What was measured once cannot drift.
    assert forward_drift(tmp_path) == []
    for default in (early, early, early, late):
        make_point("operator", tmp_path, fwd=pass_times(90.0, default=default))
    default_drift = forward_drift(tmp_path)[-1]
    assert (default_drift.baseline, default_drift.measurements) == ("default", 2)
    assert default_drift.change == pytest.approx(0.2)


def gpu(temperature_c: float, sm_clock_mhz: float, throttle_reasons: int) -> dict[str, Any]:
    return {"temperature_c": temperature_c, "sm_clock_mhz": sm_clock_mhz, "throttle_reasons": throttle_reasons}


def test_who_was_slowed_down(tmp_path: Path) -> None:
    # The power cap, 0x04, and idling, 0x01, do not count as being slowed down.
    for name, before, after in (
        ("cool", gpu(30, 1980, 0), gpu(41, 1700, 0x04)),
        ("hot", gpu(45, 1500, 0x01), gpu(88, 1200, 0x44)),
    ):
        make_point(
            "operator", tmp_path, name=name, conditions={"before": {"gpus": [before]}, "after": {"gpus": [after]}}
        )
    assert slowed_gpus(only_case(tmp_path)) == [
        "GPUs were slowed down (hardware thermal slowdown) around 1 points, first hot."
    ]


def test_the_same_point_measured_again_is_a_repeat_and_the_widest_comes_first(tmp_path: Path) -> None:
    for num_sm, times_us in ((2, (100.0,)), (4, (100.0, 101.0)), (8, (100.0, 102.0, 97.0))):
        for repetition, time_us in enumerate(times_us):
            point = operator_config(method="bulk", phase="dgrad", num_sm=num_sm, repetition=repetition)
            make_point("operator", tmp_path, point, bwd=pass_times(time_us))
    for _ in range(2):
        make_point("operator", tmp_path, operator_config(method="bulk"), launch_bound=True)
    found = repeated(only_case(tmp_path))
    assert [(sorted(one.medians_us), one.pass_name) for one in found] == [
        ([97.0, 100.0, 102.0], "bwd"),
        ([100.0, 101.0], "bwd"),
    ]
    assert [one.spread for one in found] == pytest.approx([0.05, 1 / 100.5])
