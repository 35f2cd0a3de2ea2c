"""What failed is neither chosen nor switched on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.sweep import CaseAnalysis, analyse
from overlap_sweep.config import AnalysisConfig
from tests.make_point import make_point, operator_config, pass_times


def case_of(directory: Path) -> CaseAnalysis:
    (case,) = analyse(directory, AnalysisConfig()).cases
    return case


def fwd(num_sm: int, **knobs: Any) -> dict[str, Any]:
    return {**operator_config(method="ring_exchange", phase="fprop", num_sm=num_sm, **knobs), "phases": None}


def wrong(directory: Path, point: dict[str, Any], tensor: str = "output") -> None:
    point = {**point, "workload": {**point["workload"], "tolerance": None}}
    make_point("operator", directory, point, status="failed", error="wrong numbers", relative_error={tensor: 1.4})


@pytest.mark.parametrize(("tensor", "use_ce"), [("output", True), ("input_grad", False)])
def test_what_is_wrong_at_one_num_sm_is_not_chosen_at_another(tmp_path: Path, tensor: str, use_ce: bool) -> None:
    """Wrong gradients say nothing of the forward pass."""
    make_point("operator", tmp_path, fwd(4, use_ce=False), fwd=pass_times(60.0))
    make_point("operator", tmp_path, fwd(1, use_ce=True), fwd=pass_times(80.0))
    wrong(tmp_path, fwd(8, use_ce=False), tensor)
    assert case_of(tmp_path).plans[2].choices[0].chosen.settings["fc1_fprop"]["use_ce"] == use_ce


def test_a_slot_of_which_every_overlap_failed_is_switched_off(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(), fwd=pass_times(100.0))
    wrong(tmp_path, fwd(1))
    case = case_of(tmp_path)
    assert case.plans[2].choices[0].tried_slots == {"fc1_fprop"}
    assert case.config(2).switches["tp_comm_overlap_disable_fc1"] or not case.config(2).switches["tp_comm_overlap"]


def test_a_setting_that_crashed_once_is_not_chosen(tmp_path: Path) -> None:
    make_point("operator", tmp_path, fwd(4), fwd=pass_times(60.0))
    make_point("operator", tmp_path, fwd(8), fwd=pass_times(80.0))
    again = {**fwd(4), "repetition": 1}
    make_point("operator", tmp_path, again, status="failed", error="illegal memory access", name="again")
    chosen = case_of(tmp_path).plans[2].choices[0].chosen
    assert chosen.settings["fc1_fprop"]["num_sm"] == 8


def test_a_pair_that_computed_wrong_numbers_is_not_predicted(tmp_path: Path) -> None:
    for phase in ("dgrad", "wgrad"):
        point = operator_config(method="bulk", phase=phase, num_sm=8)
        make_point("operator", tmp_path, point, bwd=pass_times(160.0, none_us=200.0))
    (pair,) = [c for c in case_of(tmp_path).plans[2].choices[1].candidates if len(c.settings) == 2]
    assert not pair.measured
    wrong(tmp_path, operator_config(method="bulk", num_sm=16), "input_grad")
    assert not [c for c in case_of(tmp_path).plans[2].choices[1].candidates if len(c.settings) == 2]
