"""Asserts what a tuner's layers prove and how variants of a layer compare. Most verdicts, with the files that follow
from them: made/rare_layers, made/rare_proofs, made/damaged, tuner and layer among the golden files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.report.section import Analysis
from overlap_sweep.workloads import analyse
from overlap_sweep.workloads.layer.answer import analyse_layer
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.proof import NO_OVERLAP, Proof, Unproven
from tests.made_sweeps import (
    BEST_SLOTS,
    BEST_SWITCHES,
    LABELS,
    TOGETHER,
    WINS,
    rounds,
    trial,
    write_operators,
    write_proof,
    write_together,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import layer_config, make_point, operator_config, rewrite, variant
from tests.results.reading import layer_point, operators_of

TUNED_CONFIG = OverlapConfig(BEST_SLOTS, BEST_SWITCHES)


def analysis_of(directory: Path) -> Analysis:
    return analyse(directory, AnalysisConfig())


def case_of(directory: Path) -> CaseAnalysis:
    (case,) = operators_of(directory).cases
    return case


def proof_of(directory: Path) -> Proof:
    proof = case_of(directory).outcomes[4]
    assert isinstance(proof, Proof)
    return proof


def unproven_of(directory: Path) -> Unproven:
    unproven = case_of(directory).outcomes[4]
    assert isinstance(unproven, Unproven)
    return unproven


def layers_alone(analysis: Analysis) -> list[str]:
    """The names of the layers that are not reported with operators."""
    return [
        answer.points[0].name for section in analysis.sections if section.name == "layers" for answer in section.answers
    ]


@pytest.mark.parametrize(
    ("given", "best_other", "recommended", "config"),
    [
        ({}, "default", "tuned", TUNED_CONFIG),
        # Rounds are paired: the machine gets slower by 3 %, six times the difference.
        ({"ratios": {**WINS, "tuned": 0.945}}, "default", "tuned", TUNED_CONFIG),
        # A tie of the others goes to no overlap.
        ({"ratios": {"none": 1.0, "default": 1.0, "tuned": 1.1, "floor": 0.9}}, "none", "none", NO_OVERLAP),
        # Launch-bound others have no say.
        ({"changed": {"default": {"launch_bound": True}}}, "preset preset_tp4", "tuned", TUNED_CONFIG),
    ],
    ids=["wins", "drift", "a tie of the others", "launch-bound"],
)
def test_the_best_of_the_others_is_recommended_unless_tuned_is_faster(
    tmp_path: Path, given: dict[str, Any], best_other: str, recommended: str, config: OverlapConfig
) -> None:
    proof = proof_of(write_tuned_sweep(tmp_path, **given))
    assert (proof.best_other, proof.recommended, proof.config) == (best_other, recommended, config)
    assert ("default" in proof.against) == ("changed" not in given)


@pytest.mark.parametrize(
    ("ratios", "given", "instead"),
    [
        ({"none": 1.0, "default": 0.95, "floor": 0.9}, {}, OverlapConfig()),
        ({}, {"status": "skipped", "error": "default: refused"}, None),
    ],
)
def test_a_layer_that_breaks_with_the_tuned_settings_is_unproven_for_that_reason(
    tmp_path: Path, ratios: dict[str, float], given: dict[str, Any], instead: OverlapConfig | None
) -> None:
    write_operators(tmp_path)
    write_proof(tmp_path, {}, status="failed", error="illegal memory access")
    write_proof(tmp_path, ratios, name="without", started="2026-11-20T22:00:00+00:00", **given)
    others = {label: name for label, name in LABELS.items() if label != "tuned"}
    write_tuner(tmp_path, proofs=[trial("proof", LABELS), trial("without", others)])
    unproven = unproven_of(tmp_path)
    assert unproven.reason == "the layer point failed: illegal memory access"
    assert unproven.instead == instead


def test_a_proof_that_failed_early_knows_no_gpu(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_operators(tmp_path, model="qwen3_0_6b")
    point = layer_config(model="qwen3_0_6b")
    proof = write_proof(tmp_path, {}, status="timeout", error="no answer", point=point)
    rewrite(proof, lambda result: result["environment"].update(gpu=None))
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    first, second = operators_of(tmp_path).cases
    assert [case.outcomes[4].trial is None for case in (first, second)] == [True, False]
    assert isinstance(second.outcomes[4], Unproven)
    assert "timed out" in second.outcomes[4].reason


def test_what_was_tried_together_is_known_without_a_proof(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_together(tmp_path)
    write_tuner(tmp_path, together=[TOGETHER])
    unproven = unproven_of(tmp_path)
    assert unproven.trial is None
    assert "best of each slot" in unproven.together[0].rows
    assert layers_alone(analysis_of(tmp_path)) == []


def test_the_latest_proof_stands_also_where_a_later_attempt_failed(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path / "10", started="2026-11-20T10:00:00+00:00")
    write_tuned_sweep(tmp_path / "11", ratios={**WINS, "tuned": 0.9}, started="2026-11-20T11:00:00+00:00")
    write_tuned_sweep(tmp_path / "12", ratios={}, status="failed", started="2026-11-20T12:00:00+00:00")
    make_point("layer", tmp_path / "13", variants={"none": rounds(1.0)}, name="loose")
    case = case_of(tmp_path)
    assert case.proofs[4].directory.name == "11"
    assert layers_alone(analysis_of(tmp_path)) == ["loose"]


def test_the_switches_are_those_of_the_recommended_configuration(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path, changed={"tuned": {"switches": {**BEST_SWITCHES, "tp_comm_bulk_wgrad": False}}})
    advice = {advice.name: (advice.value, advice.reason) for advice in case_of(tmp_path).switches(4)}
    assert advice == {
        "tp_comm_bulk_wgrad": (False, "as measured on the whole layer"),
        "tp_comm_overlap_ag": (False, "no overlap for fc1_fprop; qkv_fprop, proj_dgrad, fc2_dgrad not measured"),
    }


def test_a_proof_needs_no_operators_of_its_size(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, backend="megatron"))
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    case = case_of(tmp_path)
    assert case.tp_sizes == [2, 4]
    assert case.config(4) == case.proofs[4].config
    assert [advice.name for advice in case.switches(4)] == ["tp_comm_overlap_ag"]
    assert case.slots(4) == []


NONE = [1000.0, 1010.0, 1020.0, 1030.0, 1040.0, 1050.0]
"""Six rounds of a machine that gets slower by 5 %."""


def times(ratio: float) -> list[float]:
    """What is by this ratio slower than NONE, in every round."""
    return [ratio * time_us for time_us in NONE]


@pytest.mark.parametrize(
    ("whole_us", "ratio", "differs"),
    [
        # 0.5 % faster in every round, while the machine drifts by ten times that.
        (times(0.995), 0.995, True),
        # Points differ by more than that.
        (times(0.999), 0.999, False),
        # Some rounds contradict.
        ([0.98 * time_us for time_us in NONE[:4]] + [1.01 * time_us for time_us in NONE[4:]], 0.98, False),
    ],
)
def test_rounds_are_paired_so_that_drift_cancels(
    tmp_path: Path, whole_us: Sequence[float], ratio: float, differs: bool
) -> None:
    make_point("layer", tmp_path, variants={"none": variant(NONE), "default": variant(whole_us)})
    _, default = analyse_layer(layer_point(tmp_path)).rows
    assert default.gain.ratio == pytest.approx(ratio)
    assert default.gain.low < ratio < default.gain.high
    assert default.gain.sure == differs
