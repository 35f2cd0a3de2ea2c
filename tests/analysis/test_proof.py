"""What a tuner's layers prove. How it is told: made/proof_verdicts, made/tuned and tuner among the golden files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.layers import Comparison
from overlap_sweep.analysis.proof import Proof, Unproven
from overlap_sweep.analysis.sweep import Analysis, CaseAnalysis, analyse
from overlap_sweep.analysis.trials import NO_OVERLAP
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from tests.made_sweeps import (
    BEST,
    BEST_SLOTS,
    BEST_SWITCHES,
    LABELS,
    OTHER,
    PRESET,
    PRESET_SLOTS,
    TOGETHER,
    TUNED,
    WINS,
    rounds,
    trial,
    write_operators,
    write_proof,
    write_together,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import layer_config, make_point, operator_config, rewrite

TUNED_CONFIG = OverlapConfig(BEST_SLOTS, BEST_SWITCHES)
PRESET_CONFIG = OverlapConfig(PRESET_SLOTS, dict(SWITCH_DEFAULTS))


def analysis_of(directory: Path) -> Analysis:
    return analyse(directory, AnalysisConfig())


def case_of(directory: Path) -> CaseAnalysis:
    (case,) = analysis_of(directory).cases
    return case


def proof_of(directory: Path) -> Proof:
    proof = case_of(directory).outcomes[4]
    assert isinstance(proof, Proof)
    return proof


def unproven_of(directory: Path) -> Unproven:
    unproven = case_of(directory).outcomes[4]
    assert isinstance(unproven, Unproven)
    return unproven


def numbers(found: Comparison) -> tuple[float, float, float]:
    return found.ratio, found.interval.low, found.interval.high


def test_what_wins_is_recommended(tmp_path: Path) -> None:
    proof = proof_of(write_tuned_sweep(tmp_path))
    assert (proof.recommended, proof.best_other) == ("tuned", "default")
    assert numbers(proof.decisive) == pytest.approx([0.905 / 0.95] * 3)
    assert {label: round(found.ratio, 6) for label, found in proof.against.items()} == {
        "none": 0.905, "default": 0.952632, "preset preset_tp4": 0.93299,
    }  # fmt: skip
    assert proof.against["none"].speedup == pytest.approx(1 / 0.905)
    assert proof.trial.rows["tuned"].hidden_fraction == pytest.approx(0.095 / 0.15)
    assert list(proof.trial.rows) == [*LABELS, "floor"]
    (together,) = proof.together
    assert [row.name for row in together.combinations] == ["best of each slot", "fc1 bwd by none"]
    assert [row.ratio for row in together.combinations] == pytest.approx([0.91, 0.92])
    assert together.taken == "best of each slot"


@pytest.mark.parametrize(
    ("given", "best_other", "recommended", "config"),
    [
        ({}, "default", "tuned", TUNED_CONFIG),
        ({"ratios": {**WINS, "tuned": 0.945}, "noise": 0.0095}, "default", "default", OverlapConfig()),
        ({"ratios": {**WINS, "preset preset_tp4": 0.89}}, *["preset preset_tp4"] * 2, PRESET_CONFIG),
        ({"ratios": {"none": 1.0, "default": 1.03, "tuned": 1.02, "floor": 0.9}}, "none", "none", NO_OVERLAP),
        # A tie of the others goes to no overlap.
        ({"ratios": {"none": 1.0, "default": 1.0, "tuned": 1.1, "floor": 0.9}}, "none", "none", NO_OVERLAP),
        # Launch-bound others have no say.
        ({"changed": {"default": {"launch_bound": True}}}, "preset preset_tp4", "tuned", TUNED_CONFIG),
    ],
    ids=["wins", "a tie", "a preset wins", "no overlap wins", "a tie of the others", "launch-bound"],
)
def test_the_best_of_the_others_is_recommended_unless_tuned_is_faster(
    tmp_path: Path, given: dict[str, Any], best_other: str, recommended: str, config: OverlapConfig
) -> None:
    proof = proof_of(write_tuned_sweep(tmp_path, **given))
    assert (proof.best_other, proof.recommended, proof.config) == (best_other, recommended, config)
    assert ("default" in proof.against) == ("changed" not in given)


def test_a_tie_is_one_by_the_interval(tmp_path: Path) -> None:
    tie = proof_of(write_tuned_sweep(tmp_path / "a", ratios={**WINS, "tuned": 0.945}, noise=0.0095))
    assert tie.decisive.ratio < 1 < tie.decisive.interval.high
    # Samples pair by round: the machine gets slower by 3 %, six times the difference.
    proof = proof_of(write_tuned_sweep(tmp_path / "b", ratios={**WINS, "tuned": 0.945}))
    assert proof.recommended == "tuned"
    assert numbers(proof.decisive) == pytest.approx([0.945 / 0.95] * 3)


@pytest.mark.parametrize(("default", "recommended"), [(1.03, "none"), (0.98, "default")])
def test_the_tuned_configuration_may_be_none(tmp_path: Path, default: float, recommended: str) -> None:
    write_operators(tmp_path)
    write_proof(tmp_path, {"none": 1.0, "default": default, "floor": 0.9})
    write_tuner(tmp_path, proofs=[trial("proof", {"none": "none", "default": "default", "tuned": "none"})])
    proof = proof_of(tmp_path)
    assert (proof.recommended, proof.trial.configs["tuned"]) == (recommended, NO_OVERLAP)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ratios": {}, "status": "failed", "error": "[rank3] out of memory\n..."}, "failed: [rank3] out of"),
        ({"ratios": {}, "status": "skipped", "error": "10 tokens"}, "was skipped: 10 tokens"),
        ({"ratios": {}, "status": "timeout", "error": "no answer"}, "timed out: no answer"),
        ({"changed": {"tuned": {"launch_bound": True}}}, "tuned was launch-bound"),
        ({"ratios": {"tuned": 1.0, "floor": 0.9}}, "nothing that tuned could be compared with"),
    ],
)
def test_what_cannot_be_judged(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    unproven = unproven_of(write_tuned_sweep(tmp_path, **given))
    assert reason in unproven.reason
    case = case_of(tmp_path)
    assert not case.proofs
    assert case.config(4) == case.plans[4].config == TUNED_CONFIG


@pytest.mark.parametrize(
    ("ratios", "instead"),
    [
        ({"none": 1.0, "floor": 0.9}, NO_OVERLAP),
        ({"none": 1.0, "default": 0.95, "floor": 0.9}, OverlapConfig()),
        ({"default": 1.0, "none": 1.0, "floor": 0.9}, NO_OVERLAP),
    ],
)
def test_a_tuned_layer_that_computes_wrong_numbers_is_not_what_is_written(
    tmp_path: Path, ratios: dict[str, float], instead: OverlapConfig
) -> None:
    warning = f"{TUNED} computes wrong numbers and was not measured: output differs."
    unproven = unproven_of(write_tuned_sweep(tmp_path, ratios=ratios, warnings=[warning]))
    assert unproven.reason.startswith("tuned computes wrong numbers")
    assert case_of(tmp_path).config(4) == unproven.instead == instead


def test_a_proof_that_left_nothing_belongs_to_the_sweep_s_only_case(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_tuner(tmp_path, proofs=[trial("nowhere", LABELS)])
    assert "nowhere left no results" in unproven_of(tmp_path).reason


def test_a_proof_that_failed_early_knows_no_gpu(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_operators(tmp_path, model="qwen3_0_6b")
    point = layer_config(model="qwen3_0_6b", precision=None)
    proof = write_proof(tmp_path, {}, status="timeout", error="no answer", point=point)
    rewrite(proof, lambda result: result["environment"].update(gpu=None))
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    first, second = analysis_of(tmp_path).cases
    assert [case.outcomes[4].trial is None for case in (first, second)] == [True, False]
    assert "timed out" in second.unproven[4].reason


def test_a_layer_of_no_case_is_a_stray(tmp_path: Path) -> None:
    write_operators(tmp_path, tokens=4096)
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    analysis = analysis_of(tmp_path)
    (stray,) = analysis.strays
    assert "are of its case, llama3_8b, 8192 tokens" in stray.reason
    assert [layer.point.name for layer in analysis.loose_layers] == ["proof"]
    assert analysis.unproven[-1] is stray


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        ({}, "the tuner ran no layer at this TP size"),
        ({"llama3_8b TP=8": "no.", "qwen TP=4": "no"}, "the tuner ran no layer at this TP size"),
        ({"llama3_8b TP=4": "it cannot scale."}, "it cannot scale"),
        (
            {f"llama3_8b TP=4 {name}": "x" if name == "fc2" else "late" for name in ("qkv", "fc1", "fc2")},
            "qkv, fc1: late; fc2: x",
        ),
    ],
)
def test_why_there_is_no_proof(tmp_path: Path, dropped: dict[str, str], reason: str) -> None:
    write_operators(tmp_path)
    write_tuner(tmp_path, dropped=dropped)
    unproven = unproven_of(tmp_path)
    assert (unproven.reason, unproven.trial) == (reason, None)


def test_another_combination_may_be_taken(tmp_path: Path) -> None:
    proof = proof_of(write_tuned_sweep(tmp_path, changed={"tuned": OTHER}))
    assert proof.together[0].taken == "fc1 bwd by none"
    assert proof.config != case_of(tmp_path).plans[4].config


def test_what_was_tried_together_is_known_without_a_proof(tmp_path: Path) -> None:
    point = layer_config()
    point["layer"]["configurations"] = {TUNED: {"slots": BEST["settings"], "switches": BEST["switches"]}}
    failed = unproven_of(write_tuned_sweep(tmp_path / "a", ratios={}, status="failed", error="boom", point=point))
    assert failed.together[0].taken == "best of each slot"
    write_operators(tmp_path / "b")
    write_together(tmp_path / "b")
    write_tuner(tmp_path / "b", together=[TOGETHER])
    unproven = unproven_of(tmp_path / "b")
    assert (unproven.trial, unproven.together[0].taken) == (None, None)
    assert not analysis_of(tmp_path / "b").loose_layers


def test_warnings_speak_of_labels(tmp_path: Path) -> None:
    warnings = [f"{PRESET} was not measured: too many SMs.", "GPU 3 was throttled."]
    told = "preset preset_tp4 was not measured: too many SMs."
    trial_of = proof_of(write_tuned_sweep(tmp_path, warnings=warnings)).trial
    assert (trial_of.warnings[0], trial_of.left_out) == (told, {})
    ratios = {label: ratio for label, ratio in WINS.items() if not label.startswith("preset")}
    trial_of = proof_of(write_tuned_sweep(tmp_path / "b", ratios=ratios, warnings=warnings)).trial
    assert (trial_of.warnings, trial_of.left_out) == (["GPU 3 was throttled."], {"preset preset_tp4": told})


def test_several_sweeps_in_one_directory(tmp_path: Path) -> None:
    """The latest proof stands, also where a later attempt failed; other models have nothing to do with it."""
    write_tuned_sweep(tmp_path / "10", started="2026-11-20T10:00:00+00:00")
    write_tuned_sweep(tmp_path / "11", ratios={**WINS, "tuned": 0.9}, started="2026-11-20T11:00:00+00:00")
    write_tuned_sweep(tmp_path / "12", ratios={}, status="failed", started="2026-11-20T12:00:00+00:00")
    write_operators(tmp_path / "13", model="qwen3_0_6b")
    write_proof(tmp_path / "13", point=layer_config(model="qwen3_0_6b"), ratios={**WINS, "tuned": 0.99})
    write_tuner(tmp_path / "13", proofs=[trial("proof", LABELS)])
    make_point("layer", tmp_path / "14", variants={"none": rounds(1.0)}, name="loose")
    analysis = analysis_of(tmp_path)
    llama, qwen = analysis.cases
    assert llama.proofs[4].directory.name == "11"
    assert [outcome.directory.name for outcome in llama.superseded] == ["10", "12"]
    assert qwen.proofs[4].recommended == "default"
    assert [proof.case.model for proof in analysis.proofs] == ["llama3_8b", "qwen3_0_6b"]
    assert [layer.point.name for layer in analysis.loose_layers] == ["loose"]
    assert analysis.records.tuners.keys() == {tmp_path / name for name in ("10", "11", "12", "13")}


def test_several_models_in_one_sweep(tmp_path: Path) -> None:
    for model, ratio in (("llama3_8b", 0.9), ("qwen3_0_6b", 0.8)):
        write_operators(tmp_path, model=model)
        write_proof(tmp_path, {**WINS, "tuned": ratio}, name=model, point=layer_config(model=model))
    write_tuner(tmp_path, proofs=[trial(name, LABELS) for name in ("qwen3_0_6b", "llama3_8b")])
    ratios = {case.case.model: case.proofs[4].against["none"].ratio for case in analysis_of(tmp_path).cases}
    assert ratios == {"llama3_8b": pytest.approx(0.9), "qwen3_0_6b": pytest.approx(0.8)}


def test_without_a_tuner_nothing_is_proven(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_proof(tmp_path)
    analysis = analysis_of(tmp_path)
    assert (analysis.cases[0].outcomes, analysis.strays, analysis.records.tuners) == ({}, [], {})
    assert analysis.loose_layers == analysis.layers


def test_records_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path)
    (tmp_path / "tuner.json").write_text('{"schema": 1, "comm')
    (tmp_path / "search.json").write_text('{"schema": 99}')
    analysis = analysis_of(tmp_path)
    for problem, name, said in zip(
        analysis.problems, ("tuner", "search"), ("run the tuner again", "has schema 99"), strict=True
    ):
        assert problem.startswith(f"{tmp_path}/{name}.json ")
        assert said in problem
    assert not analysis.proofs


def test_the_switches_are_those_of_the_recommended_configuration(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path, changed={"tuned": {"switches": {**BEST_SWITCHES, "tp_comm_bulk_wgrad": False}}})
    advice = {advice.name: (advice.value, advice.reason) for advice in case_of(tmp_path).switches(4)}
    assert advice == {
        "tp_comm_bulk_wgrad": (False, "as tuned was measured"),
        "tp_comm_overlap_disable_fc1": (True, "no overlap for fc1_fprop"),
    }


def test_a_proof_needs_no_operators_of_its_size(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, backend="megatron"))
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    case = case_of(tmp_path)
    assert case.tp_sizes == [2, 4]
    assert case.config(4) == case.proofs[4].config
    assert [advice.name for advice in case.switches(4)] == ["tp_comm_overlap_disable_fc1"]
    assert case.slots(4) == []
