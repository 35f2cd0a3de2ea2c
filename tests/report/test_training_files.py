"""The files to train with, and those that tell where they come from: what was proven, or the best of each slot."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep import overlap_cfg, space
from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.analysis.trials import NO_OVERLAP
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.report.files import write_reports
from overlap_sweep.report.page.answers import answers
from tests.made_sweeps import (
    BEST_SLOTS,
    BEST_SWITCHES,
    LABELS,
    PRESET_SLOTS,
    WINS,
    trial,
    write_operators,
    write_proof,
    write_sweep,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import layer_config, make_point, operator_config, pass_times
from tests.report.page.reports import analysis_of, page_of, parsed

YAML = "optimal_tp_comm_overlap_cfg_tp4.yaml"
BEST_CONFIG = OverlapConfig(BEST_SLOTS, BEST_SWITCHES)
pytestmark = pytest.mark.usefixtures("no_page")


def written(directory: Path) -> Analysis:
    analysis = analysis_of(directory)
    write_reports(analysis, directory, "python analyze.py here")
    return analysis


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (WINS, BEST_CONFIG),
        ({**WINS, "tuned": 0.96}, OverlapConfig()),
        ({**WINS, "preset preset_tp4": 0.8}, OverlapConfig(PRESET_SLOTS, dict(SWITCH_DEFAULTS))),
        ({**WINS, "none": 0.8}, NO_OVERLAP),
    ],
)
def test_every_file_is_the_recommended_configuration(
    tmp_path: Path, ratios: dict[str, float], expected: OverlapConfig
) -> None:
    written(write_tuned_sweep(tmp_path, ratios=ratios))
    assert overlap_cfg.read(tmp_path / YAML) == expected
    assert yaml.safe_load((tmp_path / YAML).read_text()) == expected.slots
    assert (tmp_path / "optimal_tp_comm_overlap_cfg.yaml").read_bytes() == (tmp_path / YAML).read_bytes()
    assert read(tmp_path / "ub_cfgs_tp4.json") == expected.slots
    preset = (tmp_path / "megatron_bridge_preset_tp4.py").read_text()
    ast.parse(preset)
    given = {line.split("=")[0].strip() for line in preset.splitlines() if "OverlapCfg(num" in line}
    assert given == set(expected.slots)
    whole = read(tmp_path / "tuning_report.json")
    assert {entry["slot"] for entry in whole["best"] if entry["setting_in_yaml"]} == set(expected.slots)


def test_without_a_proof_they_are_the_plan(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path / "a", ratios={}, status="failed", error="boom")
    write_sweep(tmp_path / "b")
    for folder in ("a", "b"):
        (case,) = written(tmp_path / folder).cases
        for tp_size, plan in case.plans.items():
            file = tmp_path / folder / YAML.replace("4", str(tp_size))
            assert overlap_cfg.read(file) == plan.config == case.config(tp_size)
            assert read(tmp_path / folder / f"ub_cfgs_tp{tp_size}.json") == plan.config.slots
            assert (tmp_path / folder / f"megatron_bridge_preset_tp{tp_size}.py").exists()
    # The plain name is that of the smallest size.
    smallest = (tmp_path / "b" / YAML.replace("4", "2")).read_text()
    assert (tmp_path / "b" / "optimal_tp_comm_overlap_cfg.yaml").read_text() == smallest
    assert yaml.safe_load(smallest).keys() == {"fc1_dgrad", "fc1_wgrad", "fc2_fprop"}


def test_knobs_keep_their_types(tmp_path: Path) -> None:
    knobs = {"num_sm": 1, "aggregate": True, "use_ce": False, "set_sm_margin": True, "cga_size": 2}
    point = operator_config(2, "qkv", "fprop", "ring_exchange", **knobs)
    make_point("operator", tmp_path, point, fwd=pass_times(60.0))
    written(tmp_path)
    slots = yaml.safe_load((tmp_path / YAML.replace("4", "2")).read_text())
    assert slots == {"qkv_fprop": {"method": "ring_exchange", **knobs}}


def test_a_size_without_operators_has_its_files(tmp_path: Path) -> None:
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4, backend="megatron")
    make_point("operator", tmp_path, bulk, bwd=pass_times(90.0))
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    written(tmp_path)
    assert overlap_cfg.read(tmp_path / YAML) == BEST_CONFIG
    assert "one by one" not in (tmp_path / YAML).read_text()
    assert overlap_cfg.read(tmp_path / YAML.replace("4", "2")).slots["fc1_dgrad"] == {"method": "bulk", "num_sm": 4}


def test_cases_do_not_share_files(tmp_path: Path) -> None:
    for model, tuned in (("llama3_8b", 0.9), ("qwen3_0_6b", 0.99)):
        write_operators(tmp_path, model=model)
        write_proof(tmp_path, {**WINS, "tuned": tuned}, name=model, point=layer_config(model=model))
    write_tuner(tmp_path, proofs=[trial(name, LABELS) for name in ("llama3_8b", "qwen3_0_6b")])
    written(tmp_path)
    (llama,), (qwen,) = (tmp_path.glob(f"{model}*/{YAML}") for model in ("llama3_8b_meg", "qwen3_0_6b_meg"))
    assert (overlap_cfg.read(llama), overlap_cfg.read(qwen)) == (BEST_CONFIG, OverlapConfig())
    files = [entry["file"] for entry in read(tmp_path / "proof.json")["proofs"]]
    assert files == [path.relative_to(tmp_path).as_posix() for path in (llama, qwen)]
    assert not list(tmp_path.glob("optimal*"))


# proof.json, beside what a recorded one holds


def test_what_could_not_be_proven(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path, ratios={}, status="failed", error="[rank3] out of memory\n...")
    written(tmp_path)
    (proof,) = read(tmp_path / "proof.json")["proofs"]
    assert (proof["proven"], proof["recommended"], proof["settings"]) == (False, None, None)
    assert proof["reason"] == "the layer failed: [rank3] out of memory"
    assert (proof["variants"], proof["layer"]) == ({}, "transformer_layer")
    assert proof["tried_together"][0]["combinations"].keys() == {"best of each slot", "fc1 bwd by none"}


def test_a_size_that_was_dropped_stands_beside_those_that_were_proven(tmp_path: Path) -> None:
    write_operators(tmp_path, 8)
    write_operators(tmp_path, 4)
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)], dropped={"llama3_8b TP=8": "it cannot scale"})
    written(tmp_path)
    proofs = read(tmp_path / "proof.json")["proofs"]
    assert [(proof["tp_size"], proof["reason"]) for proof in proofs] == [(4, None), (8, "it cannot scale")]


def test_no_proof_no_file(tmp_path: Path) -> None:
    """Neither without a tuner nor where it was told not to prove anything."""
    for folder in ("a", "b"):
        write_operators(tmp_path / folder)
    write_tuner(tmp_path / "b")
    for folder in ("a", "b"):
        written(tmp_path / folder)
        assert not (tmp_path / folder / "proof.json").exists()
    assert [entry["proven"] for entry in read(tmp_path / "b" / "tuning_report.json")["proof"]] == [False]


# backend=symm_mem: one switch for the whole model


@pytest.mark.parametrize(("default", "slots"), [(0.95, {}), (0.96, {}), (1.04, BEST_SLOTS)])
def test_async_tp_has_no_file_for_megatrons_libraries_and_is_called_by_its_name(
    tmp_path: Path, default: float, slots: dict[str, space.Setting]
) -> None:
    symm_mem = {"backend": "symm_mem"}
    write_operators(tmp_path, **symm_mem)
    ratios = {**WINS, "default": default, "tuned": 0.97, "preset preset_tp4": 0.99}
    write_proof(tmp_path, ratios, point={**layer_config(), **symm_mem})
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    (case,) = written(tmp_path).cases
    assert overlap_cfg.read(tmp_path / YAML) == case.config(4)
    assert case.config(4).slots == slots
    assert not [*tmp_path.glob("megatron_bridge*"), *tmp_path.glob("ub_cfgs*")]
    (answer,) = (one for one in answers(case, "") if one.tp_size == 4)
    assert (answer.file, answer.slots, answer.switches) == (None, [], [])
    assert answer.headline.startswith("Switch async TP on" if slots == {} else "Leave")
    # PyTorch's own default is to have it off.
    text = (tmp_path / "summary.txt").read_text() + " ".join(parsed(page_of(tmp_path)).text)
    for other_name in ("the default", "use default", "Use the default", "the library's default", '"default"'):
        assert other_name not in text
