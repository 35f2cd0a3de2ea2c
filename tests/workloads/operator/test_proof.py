"""What is pooled, which TP size pays, settings that hold for whole processes, and what a tuner's layers prove. Which
settings are chosen, and most verdicts, with their files: answers/operator, made/rare_layers, made/rare_proofs,
made/damaged, tuner and layer among the golden files."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.compare.sweeps import compared_fields, read_dataset
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.report.files import write_reports
from overlap_sweep.report.section import Analysis
from overlap_sweep.workloads import analyse
from overlap_sweep.workloads.operator.answer import CaseAnalysis, scale
from overlap_sweep.workloads.operator.choice import default_sum_us
from overlap_sweep.workloads.operator.proof import Unproven
from overlap_sweep.workloads.operator.result import DefaultTiming, PassTimes
from tests.made_sweeps import (
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
from tests.make_point import default_timing, layer_config, make_point, operator_config, pass_times, rewrite
from tests.results.reading import choices, operators_of


def analysis_of(directory: Path) -> Analysis:
    return analyse(directory, AnalysisConfig())


def case_of(directory: Path) -> CaseAnalysis:
    (case,) = operators_of(directory).cases
    return case


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


# Choices.


BWD = (2, "fc1", "bwd")


def bwd(time_us: float, spread_us: float = 0.0, default: DefaultTiming | None = None) -> PassTimes:
    return pass_times(time_us, none_us=200.0, floor_us=150.0, spread_us=spread_us, default=default)


def bulk(directory: Path, num_sm: int, times: PassTimes | None = None, phase: str = "all", **result: Any) -> None:
    make_point("operator", directory, operator_config(2, "fc1", phase, "bulk", num_sm=num_sm), bwd=times, **result)


def test_none_needs_no_point_of_its_own_and_is_pooled_when_it_has_some(tmp_path: Path) -> None:
    bulk(tmp_path, 4, bwd(180.0))
    assert choices(tmp_path)[BWD].none.estimate.repeats == 5
    make_point("operator", tmp_path, operator_config(), bwd=bwd(200.0))
    choice = choices(tmp_path)[BWD]
    assert choice.none.estimate.repeats == 10
    assert choice.tried_slots == {"fc1_dgrad", "fc1_wgrad"}


def test_a_default_that_several_points_carry_counts_once_and_is_summed_where_all_were_measured(tmp_path: Path) -> None:
    first, second = default_timing(180.0, 200.0, minute=0), default_timing(190.0, 200.0, minute=5)
    for num_sm, default in ((1, first), (2, first), (4, first), (8, second)):
        bulk(tmp_path, num_sm, bwd(150.0, default=default))
    found = choices(tmp_path)
    default = found[BWD].default
    assert default
    assert (default.repeats, default.time_us) == (10, pytest.approx(185.0))
    sums = [default_sum_us(some) for some in ([found[BWD]], list(found.values()), [])]
    assert sums == [default.time_us, None, None]


def test_the_largest_tp_size_that_scales_is_optimal() -> None:
    result = scale({1: 2000.0, 2: 1100.0, 4: 600.0, 8: 400.0}, tolerance=0.2)
    assert result.optimal_tp_size == 4
    assert result.scaling_ratios == {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.6}
    assert result.scaling_efficient == {1: True, 2: True, 4: True, 8: False}
    # Without tensor parallelism where nothing scales; undecided without a baseline.
    assert scale({1: 100.0, 2: 90.0, 4: 80.0}, tolerance=0.2).optimal_tp_size == 1
    undecided = scale({2: 90.0, 4: 80.0}, tolerance=0.2)
    assert (undecided.optimal_tp_size, undecided.reason) == (None, "no TP=1 baseline was measured.")


EIGHT = "CUDA_DEVICE_MAX_CONNECTIONS=8"


def write(directory: Path, ring_us: float, **changes: Any) -> Path:
    for _ in range(2):
        ring = operator_config(2, "fc1", "fprop", "ring_exchange", num_sm=1, **changes)
        make_point("operator", directory, ring, fwd=pass_times(ring_us, spread_us=0.1))
    return directory


def test_connections_are_separate_cases_whose_files_say_what_to_set(tmp_path: Path) -> None:
    write(write(tmp_path, 80.0), 72.0, runtime={"max_connections": 8})
    analysis = analyse(tmp_path, AnalysisConfig())
    (section,) = analysis.sections
    usual, eight = section.answers
    assert EIGHT in eight.title
    assert EIGHT not in usual.title
    write_reports(analysis, tmp_path)
    texts = {path: path.read_text() for path in tmp_path.rglob("optimal_tp_comm_overlap_cfg_tp2.yaml")}
    assert len(texts) == 2
    to_set = f"# Set {EIGHT} in training"
    assert sorted((EIGHT.replace("=", "-") in path.parent.name, to_set in text) for path, text in texts.items()) == [
        (False, False),
        (True, True),
    ]
    assert any(f"Set {EIGHT} in training" in sentence for card in eight.cards for sentence in card.sentences)


def test_two_sweeps_that_differ_in_it_alone_are_compared(tmp_path: Path) -> None:
    datasets = [
        read_dataset("one", write(tmp_path / "one", 80.0)),
        read_dataset("eight", write(tmp_path / "eight", 72.0, runtime={"max_connections": 8})),
    ]
    assert "process_wide" in compared_fields(datasets)
