from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.analysis.drift import Drift, baseline_drift
from tests.analysis.reading import only_case
from tests.make_point import default_timing, make_point, operator_config, pass_times


def forward_drift(directory: Path) -> dict[str, Drift]:
    return {drift.baseline: drift for drift in baseline_drift(only_case(directory)) if drift.pass_name == "fwd"}


def test_each_baseline_drifts_on_its_own_in_the_order_of_measuring(tmp_path: Path) -> None:
    # Written in another order than measured.
    for minute, none_us, floor_us in ((3, 110.0, 50.0), (1, 100.0, 50.0), (2, 100.0, 60.0), (4, 110.0, 60.0)):
        times = pass_times(90.0, none_us, floor_us)
        make_point(
            "operator", tmp_path, operator_config(method="none"), fwd=times, started=f"2026-11-20T21:0{minute}:00+00:00"
        )
    drifts = forward_drift(tmp_path)
    assert list(drifts) == ["none", "floor"]
    assert drifts["none"].change == pytest.approx(0.1)
    assert drifts["floor"].change == 0.0
    assert drifts["floor"] == Drift(2, "fc1", "fwd", "floor", 4, 55.0, 50.0, 60.0, 0.0)


def test_the_default_drifts_over_its_distinct_measurements(tmp_path: Path) -> None:
    late, early = default_timing(120.0, minute=9), default_timing(100.0, minute=1)
    for default in (late, early, early, early, late):
        make_point("operator", tmp_path, operator_config(method="none"), fwd=pass_times(90.0, default=default))
    default = forward_drift(tmp_path)["default"]
    assert (default.measurements, default.change) == (2, pytest.approx(0.2))


def test_what_was_measured_once_cannot_drift(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(method="none"), fwd=pass_times(90.0, default=default_timing(90.0)))
    assert forward_drift(tmp_path) == {}
