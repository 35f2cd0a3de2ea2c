"""proof.json, and what tuning_report.json says of proofs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.report.files import write_reports
from tests.made_sweeps import (
    BEST_SLOTS,
    BEST_SWITCHES,
    LABELS,
    PRESET_SLOTS,
    WINS,
    trial,
    write_operators,
    write_proof,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import ENVIRONMENT

COMPARISON = {"ratio", "low", "high", "confidence", "speedup", "differs"}


def reports_of(directory: Path, *files: str) -> list[dict[str, Any]]:
    write_reports(analyse(directory, AnalysisConfig()), directory, "python analyze.py here")
    return [json.loads((directory / file).read_text()) for file in files]


def proof_of(directory: Path) -> dict[str, Any]:
    ((proof,),) = ([*report["proofs"]] for report in reports_of(directory, "proof.json"))
    return dict(proof)


def test_a_proof(tmp_path: Path) -> None:
    proof = proof_of(write_tuned_sweep(tmp_path, warnings=["GPU 3 was throttled."]))
    expected = {
        "case": "llama3_8b_megatron_NVIDIA-H200_bf16_tokens8192", "model": "llama3_8b", "backend": "megatron",
        "device": "NVIDIA H200", "precision": "bf16", "tokens": 8192, "tp_size": 4, "proven": True, "reason": None,
        "recommended": "tuned", "settings": BEST_SLOTS, "switches": BEST_SWITCHES, "best_other": "default",
        "verdict": "tuned is 4.7% faster than the default (4.7 to 4.7%), the fastest of the others: use tuned.",
        "file": "optimal_tp_comm_overlap_cfg_tp4.yaml", "point": "proof", "layer": "transformer_layer",
        "attention_backend": "fused (cuDNN 9.19.0)", "rounds": 7, "reference": "none", "left_out": {},
        "warnings": ["GPU 3 was throttled."], "sweep": ".", "measured": "2026-11-20 21:11 UTC",
        "machine": "node7; 8 x NVIDIA H200; driver 580.1, torch 2.13.0", "environment": ENVIRONMENT,
        "commands": ["python launch.py +experiment=tp_overlap_tuner"],
    }  # fmt: skip
    assert {name: proof[name] for name in expected} == expected
    decisive = proof["tuned_to_best_other"]
    assert decisive.keys() == COMPARISON
    assert (decisive["ratio"], decisive["differs"]) == (pytest.approx(0.905 / 0.95), True)
    assert decisive["confidence"] == pytest.approx(0.984375)


def test_its_variants(tmp_path: Path) -> None:
    variants = proof_of(write_tuned_sweep(tmp_path))["variants"]
    assert list(variants) == [*LABELS, "floor"]
    tuned, preset, floor = variants["tuned"], variants["preset preset_tp4"], variants["floor"]
    assert tuned["all_ms"] == pytest.approx(60.9 * 0.905)
    assert (tuned["fwd_ms"], tuned["bwd_ms"]) == (pytest.approx(18.3715), pytest.approx(36.743))
    assert (tuned["all_q1_ms"], tuned["all_q3_ms"]) == (pytest.approx(54.70725), pytest.approx(55.52175))
    assert tuned["to_reference"].keys() == COMPARISON
    assert tuned["to_reference"]["speedup"] == pytest.approx(1 / 0.905)
    assert tuned["tuned_to_this"] is None
    assert tuned["hidden_fraction"] == pytest.approx(0.095 / 0.15)
    assert (tuned["settings"], tuned["switches"]) == (BEST_SLOTS, BEST_SWITCHES)
    assert preset["tuned_to_this"]["ratio"] == pytest.approx(0.905 / 0.97)
    assert preset["settings"] == PRESET_SLOTS
    assert "settings" not in floor
    assert not variants["none"]["switches"]["tp_comm_overlap"]
    assert variants["default"]["switches"] == SWITCH_DEFAULTS


def test_what_was_tried_together(tmp_path: Path) -> None:
    (together,) = proof_of(write_tuned_sweep(tmp_path))["tried_together"]
    assert (together["point"], together["taken"], together["reference"]) == ("together", "best of each slot", "none")
    ratios = {label: entry["to_reference"]["ratio"] for label, entry in together["combinations"].items()}
    assert ratios == {"best of each slot": pytest.approx(0.91), "fc1 bwd by none": pytest.approx(0.92)}
    assert together["combinations"]["best of each slot"]["settings"] == BEST_SLOTS


def test_the_tuner_s_record(tmp_path: Path) -> None:
    report, whole = reports_of(write_tuned_sweep(tmp_path), "proof.json", "tuning_report.json")
    (tuner,) = report["tuners"]
    assert (tuner["wall_s"], tuner["search_s"], tuner["points"]) == (750.0, 485.0, 143)
    assert tuner["dropped"] == {"TP sizes": "TP=8 left out: 4 GPUs are visible"}
    assert whole["tuner"] == report["tuners"]
    assert whole["proof"] == report["proofs"]


def test_what_could_not_be_proven(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path, ratios={}, status="failed", error="[rank3] out of memory\n...")
    proof = proof_of(tmp_path)
    assert (proof["proven"], proof["recommended"], proof["settings"]) == (False, None, None)
    assert proof["reason"] == "the layer failed: [rank3] out of memory"
    assert proof["verdict"] == "not proven on the whole layer: the layer failed: [rank3] out of memory."
    assert (proof["variants"], proof["layer"]) == ({}, "transformer_layer")
    assert proof["tried_together"][0]["combinations"].keys() == {"best of each slot", "fc1 bwd by none"}


def test_a_size_that_was_dropped_stands_beside_those_that_were_proven(tmp_path: Path) -> None:
    write_operators(tmp_path, 8)
    write_operators(tmp_path, 4)
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)], dropped={"llama3_8b TP=8": "it cannot scale"})
    (report,) = reports_of(tmp_path, "proof.json")
    assert [(proof["tp_size"], proof["reason"]) for proof in report["proofs"]] == [(4, None), (8, "it cannot scale")]


def test_no_proof_no_file(tmp_path: Path) -> None:
    """Neither without a tuner nor where it was told not to prove anything."""
    write_operators(tmp_path / "a")
    write_operators(tmp_path / "b")
    write_tuner(tmp_path / "b")
    for folder in ("a", "b"):
        (whole,) = reports_of(tmp_path / folder, "tuning_report.json")
        assert not (tmp_path / folder / "proof.json").exists()
    assert whole["tuner"][0]["points"] == 143
    assert [entry["reason"] for entry in whole["proof"]] == ["the tuner ran no layer at this TP size"]


def test_analysing_again_changes_nothing(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path)
    reports_of(tmp_path)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    reports_of(tmp_path)
    changed = {path.name for path, content in first.items() if path.read_bytes() != content}
    assert changed <= {"tuning_report.json"}


def test_the_whole_report_says_what_is_in_the_file(tmp_path: Path) -> None:
    (whole,) = reports_of(write_tuned_sweep(tmp_path, ratios={**WINS, "tuned": 0.96}), "tuning_report.json")
    assert {entry["setting_in_yaml"] is None for entry in whole["best"]} == {True}
    assert whole["switches"] == []
    (whole,) = reports_of(write_tuned_sweep(tmp_path / "b"), "tuning_report.json")
    assert {entry["slot"]: entry["setting_in_yaml"] for entry in whole["best"]} == {
        "fc1_fprop": None, **BEST_SLOTS,
    }  # fmt: skip
    assert [entry["name"] for entry in whole["switches"]] == ["tp_comm_overlap_disable_fc1"]
