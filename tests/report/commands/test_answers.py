"""The answers as rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis.answers import COLUMNS, answer_rows
from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from tests.made_sweeps import write_tuned_sweep


def answers(directory: Path) -> pd.DataFrame:
    return to_frame(answer_rows(analyse(directory, AnalysisConfig())), COLUMNS)


def only(frame: pd.DataFrame, tp_size: int, slot: str) -> dict[str, object]:
    (row,) = frame.query(f"tp_size == {tp_size} and slot == '{slot}'").to_dict("records")
    return {name: value for name, value in row.items() if not pd.isna(value)}


def test_what_was_proven(tmp_path: Path) -> None:
    frame = answers(write_tuned_sweep(tmp_path))
    assert frame["proven"].all()
    assert set(frame["recommended"]) == {"tuned"}
    assert frame["layer_ratio"].tolist() == pytest.approx([0.905] * 4)
    assert only(frame, 4, "fc2_fprop")["final_setting"] == "pipeline_sm8_split4"
    assert only(frame, 4, "fc2_fprop")["default_us"] == 160.0


@pytest.mark.parametrize(
    ("best", "final"),
    [
        ("none", {"fc1_fprop": "none", "fc1_dgrad": "none", "fc1_wgrad": "none", "fc2_fprop": "none"}),
        ("default", dict.fromkeys(("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop"), "default")),
        (
            "preset preset_tp4",
            {"fc1_fprop": "default", "fc1_dgrad": "default", "fc1_wgrad": "default", "fc2_fprop": "pipeline_sm16"},
        ),
    ],
)
def test_the_final_setting_is_what_the_whole_layer_says(tmp_path: Path, best: str, final: dict[str, str]) -> None:
    """Whatever is best for the operators one by one."""
    slow = {"none": 1.0, "default": 0.99, "tuned": 1.02, "preset preset_tp4": 0.98, "floor": 0.85}
    frame = answers(write_tuned_sweep(tmp_path, ratios={**slow, best: 0.9}))
    assert dict(zip(frame["slot"], frame["final_setting"], strict=True)) == final
    assert only(frame, 4, "fc1_dgrad")["setting"] == "bulk_sm4"
    assert set(frame["recommended"]) == {best}
    assert frame["layer_ratio"].iloc[0] == pytest.approx(1.0 if best == "none" else 0.9)
