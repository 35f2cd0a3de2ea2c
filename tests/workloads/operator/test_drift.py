"""How far a sweep's times can be trusted: baselines that drift, GPUs that were throttled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.provenance import slowed_gpus
from overlap_sweep.workloads.operator.answer import baseline_drift
from tests.make_point import make_point, pass_times
from tests.results.reading import only_case


def test_times_without_overlap_drift_in_the_order_of_measuring(tmp_path: Path) -> None:
    # Written in another order than measured.
    for minute, none_us in ((3, 110.0), (1, 100.0), (2, 100.0), (4, 110.0)):
        started = f"2026-11-20T21:0{minute}:00+00:00"
        make_point("operator", tmp_path, fwd=pass_times(90.0, none_us), started=started)
    assert baseline_drift(only_case(tmp_path)) == {"fc1 fwd, TP=2": pytest.approx(0.1), "fc1 bwd, TP=2": 0.0}


def test_what_was_measured_once_does_not_drift(tmp_path: Path) -> None:
    make_point("operator", tmp_path)
    assert baseline_drift(only_case(tmp_path)) == {}


def gpu(temperature_c: float, sm_clock_mhz: float, throttle_reasons: int) -> dict[str, Any]:
    return {"temperature_c": temperature_c, "sm_clock_mhz": sm_clock_mhz, "throttle_reasons": throttle_reasons}


def test_who_was_slowed_down(tmp_path: Path) -> None:
    # The power cap, 0x04, and idling, 0x01, do not count as throttling.
    for name, before, after in (
        ("cool", gpu(30, 1980, 0), gpu(41, 1700, 0x04)),
        ("hot", gpu(45, 1500, 0x01), gpu(88, 1200, 0x44)),
    ):
        make_point(
            "operator", tmp_path, name=name, conditions={"before": {"gpus": [before]}, "after": {"gpus": [after]}}
        )
    assert slowed_gpus(only_case(tmp_path)) == [
        "GPUs were throttled (hardware thermal slowdown) in 1 point, first in hot: times may be too long."
    ]
