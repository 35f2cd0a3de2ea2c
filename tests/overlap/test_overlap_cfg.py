"""Files that Megatron-LM takes as tp_comm_overlap_cfg, ours and others', and Megatron-Core's switches."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig, methods_allowed
from overlap_sweep.report.files import write_reports
from overlap_sweep.workloads import analyse
from tests.golden import overlaps
from tests.golden.command_lines import answers
from tests.made_sweeps import write_sweep
from tests.make_point import make_point, operator_config, pass_times

ANSWERS = answers(overlaps.FILE)


@pytest.mark.parametrize("line", ANSWERS)
def test_what_is_read_of_a_file_and_what_is_planned_of_times(line: str) -> None:
    """With switches from slots and comments. Under which kinds of layer it is refused, golden refusals say, too."""
    assert overlaps.answer(line) == ANSWERS[line]


def test_defaults_overlap_as_transformer_engine_does() -> None:
    assert {slot: " or ".join(sorted(methods)) for slot, methods in methods_allowed(SWITCH_DEFAULTS).items()} == {
        **dict.fromkeys(("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"), "ring_exchange"),
        **dict.fromkeys(("proj_fprop", "fc2_fprop"), "pipeline or ring_exchange"),
        **dict.fromkeys(("qkv_dgrad", "fc1_dgrad", "qkv_wgrad", "fc1_wgrad"), "bulk"),
    }


def config(slots: dict[str, Any], **switches: bool) -> OverlapConfig:
    return OverlapConfig(slots, {**SWITCH_DEFAULTS, **switches})


def reported(directory: Path, tp_size: int) -> OverlapConfig:
    """What `analyze.py` wrote for the TP size, read again."""
    write_reports(analyse(directory, AnalysisConfig()), directory)
    return overlap_cfg.read(directory / f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml")


def test_our_own_report_comes_back_with_its_switches(tmp_path: Path) -> None:
    """At TP 4, where nothing overlaps, all of it is off; at TP 8 dgrads scatter their own output."""
    bulk = {"method": "bulk", "num_sm": 4}
    slots = {"fc1_dgrad": bulk, "fc1_wgrad": bulk, "fc2_fprop": {"method": "pipeline", "num_sm": 8, "num_splits": 4}}
    assert reported(write_sweep(tmp_path), 2) == config(slots, tp_comm_overlap_ag=False)
    assert reported(tmp_path, 4) == config({}, tp_comm_overlap=False)
    for operator in ("qkv", "fc1"):
        ring = operator_config(8, operator, "dgrad", "ring_exchange", num_sm=2)
        make_point("operator", tmp_path, ring, bwd=pass_times(90.0))
    scattering = reported(tmp_path, 8)
    assert (set(scattering.slots), scattering.switches["tp_comm_overlap_rs_dgrad"]) == (
        {"qkv_dgrad", "fc1_dgrad"},
        True,
    )
    assert overlap_cfg.switches_refusal(scattering) is None


def test_a_file_that_is_not_there_or_no_text_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("nowhere.yaml", "", "binary.yaml"):
        with pytest.raises(UserError, match=r"cannot be read \(.*\)"):
            overlap_cfg.read(tmp_path / name)
