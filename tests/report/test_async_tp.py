"""What reports say of backend=symm_mem: whether to switch async TP on, and how; no file for Megatron's libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_sweep import overlap_cfg, space
from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report import async_tp
from overlap_sweep.report.files import write_reports
from overlap_sweep.report.page.answers import answers
from overlap_sweep.report.text import summary_text
from tests.made_sweeps import BEST_SLOTS, LABELS, WINS, trial, write_operators, write_proof, write_tuner
from tests.make_point import default_timing, layer_config, make_point, operator_config, pass_times
from tests.report.page.reports import page_of, parsed

SYMM_MEM = {"backend": "symm_mem"}
DECIDES = "TP=4: Async TP is one switch for the whole model: what decides is all of it against none"


def write_proven(directory: Path, default: float) -> Path:
    write_operators(directory, **SYMM_MEM)
    ratios = {**WINS, "default": default, "tuned": 0.97, "preset preset_tp4": 0.99}
    write_proof(directory, ratios=ratios, point={**layer_config(tp_size=4), **SYMM_MEM})
    write_tuner(directory, proofs=[trial("proof", LABELS)])
    return directory


def lines_of(directory: Path) -> list[str]:
    return summary_text(analyse(directory, AnalysisConfig())).splitlines()


@pytest.mark.parametrize(
    ("default", "verdict"),
    [
        (0.95, "switch async TP on, 5.0% faster than none (5.0 to 5.0%)"),
        (1.04, "leave async TP off, it is 4.0% slower than none (4.0 to 4.0%)"),
        (1.0, "leave async TP off, it is no different from none"),
    ],
)
def test_the_default_against_none_on_the_layer_decides(tmp_path: Path, default: float, verdict: str) -> None:
    lines = lines_of(write_proven(tmp_path, default))
    (said,) = (line for line in lines if line.startswith(DECIDES))
    assert said == f"{DECIDES}, not the best of each slot. The whole layer says: {verdict}."
    assert {async_tp.NOT_FOR_MEGATRON, *async_tp.HOW_TO} <= set(lines)
    # First of all, and no file is named, since PyTorch reads none.
    assert f"  TP=4: {verdict}" in lines[:3]
    assert "yaml" not in "\n".join(lines[:3])


def test_what_each_operator_has_of_it_is_said(tmp_path: Path) -> None:
    # fc1: 200 / 210 and 400 / 360; fc2: 200 / 160 and 400 / 400.
    lines = lines_of(write_proven(tmp_path, 0.95))
    by_operator = "fc1 fwd 0.95x, fc1 bwd 1.11x, fc2 fwd 1.25x, fc2 bwd 1.00x"
    assert f"TP=4: async TP against no overlap, operator by operator: {by_operator}." in lines


def test_without_a_layer_the_operators_are_no_more_than_a_reason_to_prove_it(tmp_path: Path) -> None:
    write_operators(tmp_path, **SYMM_MEM)
    (said,) = (line for line in lines_of(tmp_path) if line.startswith(DECIDES))
    sums = "Over fc1, fc2 it takes 1,130.0 us, without overlap 1,200.0"
    assert said.endswith(f"{sums}: prove it on the whole layer, which the tuner does, before you switch it on.")


def test_without_its_own_times_nothing_is_said_of_it(tmp_path: Path) -> None:
    point = operator_config(2, "fc1", "all", "bulk", **SYMM_MEM)
    make_point("operator", tmp_path, point, bwd=pass_times(90.0))
    lines = lines_of(tmp_path)
    assert async_tp.NOT_FOR_MEGATRON in lines
    assert not any("one switch for the whole model" in line or line in async_tp.HOW_TO for line in lines)


def test_each_recommendation_has_it_beside_the_best_setting(tmp_path: Path) -> None:
    write_reports(analyse(write_proven(tmp_path, 0.95), AnalysisConfig()), tmp_path, "python analyze.py here")
    entries = json.loads((tmp_path / "tuning_report.json").read_text())["recommendations"]
    said = {f"{entry['operator']} {entry['pass']}": entry["recommendation"] for entry in entries}
    assert said["fc1 bwd"].endswith("; async TP, for the whole model or not at all, is 1.11x no overlap here")


@pytest.mark.parametrize(("default", "slots"), [(0.95, {}), (1.04, BEST_SLOTS)])
def test_the_file_is_for_this_backend_and_there_is_none_for_megatrons_libraries(
    tmp_path: Path, default: float, slots: dict[str, space.Setting]
) -> None:
    analysis = analyse(write_proven(tmp_path, default), AnalysisConfig())
    write_reports(analysis, tmp_path, "python analyze.py here")
    path = tmp_path / "optimal_tp_comm_overlap_cfg_tp4.yaml"
    head = " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    assert head.startswith(f"Communication overlap for TP=4: {async_tp.WHAT}. llama3_8b, ")
    for sentence in (DECIDES, async_tp.NOT_FOR_MEGATRON, *async_tp.HOW_TO, "Proven on the whole layer"):
        assert sentence in head
    (case,) = analysis.cases
    assert overlap_cfg.read(path) == case.config(4)
    assert case.config(4).slots == slots
    assert not list(tmp_path.glob("megatron_bridge*"))
    assert not list(tmp_path.glob("ub_cfgs*"))


@pytest.mark.parametrize("default", [0.95, 0.96, 1.04])
def test_it_is_called_by_its_name(tmp_path: Path, default: float) -> None:
    """PyTorch's own default is to have it off."""
    write_proven(tmp_path, default)
    text = "\n".join(lines_of(tmp_path))
    assert "the default" not in text
    assert "use default" not in text
    # Megatron's words.
    assert "tp_comm_overlap_" not in "\n".join(text.splitlines()[:-5]).replace("optimal_tp_comm_overlap_cfg", "")
    page = " ".join(parsed(page_of(tmp_path)).text)
    assert "Use the default" not in page
    assert "the library's default" not in page
    assert '"default"' not in page


@pytest.mark.parametrize(
    ("default", "headline"), [(0.95, "Switch async TP on, 5.0% faster than none"), (1.04, "Leave")]
)
def test_the_box_of_the_page_says_how_to_switch_it_on(tmp_path: Path, default: float, headline: str) -> None:
    analysis = analyse(write_proven(tmp_path, default), AnalysisConfig())
    (answer,) = [one for case in analysis.cases for one in answers(case, "") if one.tp_size == 4]
    assert answer.headline.startswith(headline)
    assert (answer.file, answer.slots, answer.switches) == (None, [], [])
    assert (set(async_tp.HOW_TO) <= set(answer.said)) == (default < 1)


def test_nothing_more_is_to_be_swept(tmp_path: Path) -> None:
    point = operator_config(2, "fc1", "all", "bulk", **SYMM_MEM)
    path = make_point(
        "operator", tmp_path, point, bwd=pass_times(390.0, 400.0, 300.0, default=default_timing(350.0, 400.0))
    )
    assert path.exists()
    text = "\n".join(lines_of(tmp_path))
    assert "fc1 bwd: async TP as a whole, 350.0 us, was faster than the same operators set one by one." in text
    assert "sweep more settings" not in text


def test_other_backends_say_nothing_of_it(tmp_path: Path) -> None:
    for backend in ("torch", "megatron"):
        write_operators(tmp_path / backend, backend=backend)
        assert not any("async TP" in line for line in lines_of(tmp_path / backend))
