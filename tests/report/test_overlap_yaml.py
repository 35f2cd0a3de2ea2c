from __future__ import annotations

from pathlib import Path

import yaml

from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.files import write_reports
from tests.made_sweeps import write_sweep
from tests.make_point import default_timing, make_point, operator_config, pass_times


def written(directory: Path, file: str) -> str:
    write_reports(analyse(directory, AnalysisConfig()), directory, "python analyze.py here")
    return (directory / file).read_text()


def head(text: str) -> str:
    return "\n".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))


def test_holds_the_overlaps_that_win_and_nothing_else(tmp_path: Path) -> None:
    text = written(write_sweep(tmp_path), "optimal_tp_comm_overlap_cfg_tp2.yaml")
    assert yaml.safe_load(text) == {
        "fc1_dgrad": {"method": "bulk", "num_sm": 4},
        "fc1_wgrad": {"method": "bulk", "num_sm": 4},
        "fc2_fprop": {"method": "pipeline", "num_sm": 8, "num_splits": 4},
    }


def test_the_head_says_what_the_settings_leave_open(tmp_path: Path) -> None:
    comments = head(written(write_sweep(tmp_path), "optimal_tp_comm_overlap_cfg_tp2.yaml"))
    for expected in (
        "llama3_8b, 8192 tokens, bf16, backend transformer_engine on NVIDIA H200",
        "Measured 2026-11-20 21:14 to 2026-11-20 21:15 UTC on node7; 8 x NVIDIA H200; driver 580.1, torch 2.13.0",
        "python launch.py -m tp_size=2,4,8 method=bulk,ring_exchange",
        "python analyze.py here",
        "tp_comm_overlap: true",
        "tp_comm_overlap_disable_fc1: true  no overlap for fc1_fprop",
        "A slot that is not in this file is not 'none': it gets Transformer Engine's default overlap",
        "fc1_fprop: none wins; the best overlap, ring_agg0, is 10.0% slower",
        "not measured: qkv_fprop, qkv_dgrad, qkv_wgrad, proj_fprop, proj_dgrad, fc2_dgrad",
    ):
        assert expected in comments
    assert "hint" not in comments


def test_without_any_overlap_it_is_an_empty_mapping_and_switches(tmp_path: Path) -> None:
    text = written(write_sweep(tmp_path), "optimal_tp_comm_overlap_cfg_tp4.yaml")
    assert yaml.safe_load(text) == {}
    assert "tp_comm_bulk_dgrad: false  (--disable-tp-comm-bulk-dgrad)" in head(text)
    assert "tp_comm_bulk_wgrad: false  (--disable-tp-comm-bulk-wgrad)" in head(text)


def test_the_plain_name_is_the_smallest_tp_size(tmp_path: Path) -> None:
    text = written(write_sweep(tmp_path), "optimal_tp_comm_overlap_cfg.yaml")
    assert text == (tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").read_text()


def test_knobs_keep_their_types(tmp_path: Path) -> None:
    knobs = {"aggregate": True, "use_ce": False, "set_sm_margin": True, "cga_size": 2}
    make_point(
        "operator",
        tmp_path,
        operator_config(2, "qkv", "fprop", "ring_exchange", num_sm=1, **knobs),
        fwd=pass_times(60.0),
    )
    slots = yaml.safe_load(written(tmp_path, "optimal_tp_comm_overlap_cfg_tp2.yaml"))
    assert slots == {"qkv_fprop": {"method": "ring_exchange", "num_sm": 1, **knobs}}


def test_a_prediction_says_so(tmp_path: Path) -> None:
    for phase in ("dgrad", "wgrad"):
        make_point("operator", tmp_path, operator_config(2, "fc1", phase, "bulk", num_sm=4), bwd=pass_times(90.0))
    text = written(tmp_path, "optimal_tp_comm_overlap_cfg_tp2.yaml")
    assert set(yaml.safe_load(text)) == {"fc1_dgrad", "fc1_wgrad"}
    assert "predicted from its slots alone: measure them together" in text


def test_another_backend_is_only_a_hint(tmp_path: Path) -> None:
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4, backend="torch"), bwd=pass_times(90.0)
    )
    text = written(tmp_path, "optimal_tp_comm_overlap_cfg_tp2.yaml")
    assert "Measured with backend=torch, not with Transformer Engine's userbuffers: a hint" in head(text)


def test_cases_do_not_share_a_file(tmp_path: Path) -> None:
    for tokens, num_sm in ((4096, 4), (8192, 8)):
        point = operator_config(2, "fc1", "all", "bulk", num_sm=num_sm, tokens=tokens)
        make_point("operator", tmp_path, point, bwd=pass_times(90.0))
    written(tmp_path, "summary.txt")
    for tokens, num_sm in ((4096, 4), (8192, 8)):
        (path,) = tmp_path.glob(f"*tokens{tokens}/optimal_tp_comm_overlap_cfg_tp2.yaml")
        assert yaml.safe_load(path.read_text())["fc1_dgrad"]["num_sm"] == num_sm
    assert not list(tmp_path.glob("optimal*"))


def test_the_default_is_named_where_it_was_measured(tmp_path: Path) -> None:
    fwd, bwd = default_timing(190.0, none_us=200.0), default_timing(352.0, none_us=400.0)
    point = operator_config(2, "fc1", "dgrad", "bulk", num_sm=4)
    make_point(
        "operator",
        tmp_path,
        point,
        fwd=pass_times(200.0, 200.0, default=fwd),
        bwd=pass_times(320.0, 400.0, default=bwd),
    )
    ring = operator_config(2, "fc1", "fprop", "ring_exchange", aggregate=False)
    make_point(
        "operator", tmp_path, ring, fwd=pass_times(220.0, 200.0, default=fwd), bwd=pass_times(400.0, 400.0, default=bwd)
    )
    text = written(tmp_path, "optimal_tp_comm_overlap_cfg_tp2.yaml")
    assert "# fc1 bwd: 320.0 us, without overlap 400.0, default 352.0\n" in text
    assert "Sum over fc1: 520.0 us, without overlap 600.0, default 542.0" in head(text)
    assert "fc1_fprop: none wins; the best overlap, ring_agg0, is 10.0% slower; 200.0 us, default 190.0" in head(text)


def test_the_default_is_not_named_where_it_was_not(tmp_path: Path) -> None:
    text = written(write_sweep(tmp_path), "optimal_tp_comm_overlap_cfg_tp2.yaml")
    assert "# fc1 bwd together: 320.0 us, without overlap 400.0\n" in text
    assert "Sum over" not in text
