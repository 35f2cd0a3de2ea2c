from __future__ import annotations

from pathlib import Path

from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.text import summary_text
from tests.make_point import make_point, operator_config, pass_times


def test_a_gpu_that_was_slowed_down_is_named_beside_its_temperature(tmp_path: Path) -> None:
    hot = {"gpus": [{"temperature_c": 91, "sm_clock_mhz": 1200, "throttle_reasons": 0x40}]}
    make_point("operator", tmp_path, operator_config(), name="here", conditions={"before": hot, "after": hot})
    text = summary_text(analyse(tmp_path, AnalysisConfig()))
    assert "GPUs were slowed down (hardware thermal slowdown) around 1 points, first here." in text
    assert "91 to 91 C, 1200 to 1200 MHz" in text


def test_how_well_points_repeat_is_said(tmp_path: Path) -> None:
    for time_us in (100.0, 101.0):
        make_point(
            "operator", tmp_path, operator_config(method="bulk", phase="dgrad", num_sm=4), bwd=pass_times(time_us)
        )
    text = summary_text(analyse(tmp_path, AnalysisConfig()))
    assert "Repeated points: the medians of 1 passes, each measured up to 2 times, spread by 1.0% in the middle" in text
