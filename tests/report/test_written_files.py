"""Files that other tools read: configurations to train with, tuning_report.json, results_*.json."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.overlap.space import SLOTS
from overlap_sweep.report.files import write_reports
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.results.traces import TraceReading, read_traces
from overlap_sweep.tuner import Report
from overlap_sweep.workloads import analyse
from overlap_sweep.workloads.operator.answer import OperatorAnalysis
from overlap_sweep.workloads.operator.choice import slots_in_pass
from overlap_sweep.workloads.tp_training.rows import StepCommunication, results, step_communication, tolerance_of
from overlap_sweep.workloads.tp_training.tables import RESULTS as STACKS
from tests.golden.archives import unpack
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
from tests.make_point import falling, layer_config, make_point, operator_config, pass_times, stack_config
from tests.report.page.reports import analysis_of
from tests.results.reading import operator_rows, operators_of, stacks_of, trace_row

YAML = "optimal_tp_comm_overlap_cfg_tp4.yaml"
BEST_CONFIG = OverlapConfig(BEST_SLOTS, BEST_SWITCHES)
BULK = operator_config(2, "fc1", "all", "bulk", num_sm=4)
pytestmark = pytest.mark.usefixtures("no_page")


def written(directory: Path) -> OperatorAnalysis:
    write_reports(analysis_of(directory), directory)
    return operators_of(directory)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# Configurations to train with, and proofs.


def test_every_file_is_the_recommended_configuration(tmp_path: Path) -> None:
    """Golden files hold it for the other configurations that a proof may recommend."""
    written(write_tuned_sweep(tmp_path, ratios={**WINS, "preset preset_tp4": 0.8}))
    assert overlap_cfg.read(tmp_path / YAML) == OverlapConfig(PRESET_SLOTS, dict(SWITCH_DEFAULTS))
    assert read(tmp_path / "ub_cfgs_tp4.json") == PRESET_SLOTS
    preset = (tmp_path / "megatron_bridge_preset_tp4.py").read_text()
    given = {line.split("=")[0].strip() for line in preset.splitlines() if "OverlapCfg(num" in line}
    best = read(tmp_path / "tuning_report.json")["best"]
    assert given == {entry["slot"] for entry in best if entry["setting_in_yaml"]} == set(PRESET_SLOTS)


def test_each_size_has_its_plan_and_the_plain_name_that_of_the_smallest(tmp_path: Path) -> None:
    (case,) = written(write_sweep(tmp_path)).cases
    for tp_size, plan in case.plans.items():
        assert overlap_cfg.read(tmp_path / YAML.replace("4", str(tp_size))) == plan.config == case.config(tp_size)
        assert read(tmp_path / f"ub_cfgs_tp{tp_size}.json") == (plan.config.slots or None)
    smallest = (tmp_path / YAML.replace("4", "2")).read_text()
    assert (tmp_path / "optimal_tp_comm_overlap_cfg.yaml").read_text() == smallest


@pytest.mark.parametrize(("unmeasured", "overlaps"), [("off", False), ("default", True)])
def test_where_nothing_measured_wins_every_form_says_not_to_overlap(
    tmp_path: Path, unmeasured: str, overlaps: bool
) -> None:
    ring = operator_config(4, "fc1", "fprop", "ring_exchange", num_sm=1, aggregate=False)
    make_point("operator", tmp_path, ring, fwd=pass_times(110.0))
    analysis = analyse(tmp_path, AnalysisConfig(unmeasured=unmeasured))
    write_reports(analysis, tmp_path)
    config, report = overlap_cfg.read(tmp_path / YAML), Report(tmp_path)
    assert (config.slots, config.switches["tp_comm_overlap"]) == ({}, overlaps)
    assert report.ub_cfgs(4) == read(tmp_path / "ub_cfgs_tp4.json") == ({} if overlaps else None)
    preset = (tmp_path / "megatron_bridge_preset_tp4.py").read_text()
    assert f"CommOverlapConfig(tp_comm_overlap={overlaps}" in preset
    # And what becomes of the others.
    others = {slot for slot, methods in SLOTS.items() if methods} - {"fc1_fprop"}
    assert read(tmp_path / "tuning_report.json")["unmeasured"] == unmeasured
    assert {(one.slot, one.runs) for one in report.unmeasured_slots} == {(slot, unmeasured) for slot in others}
    for text in ((tmp_path / YAML).read_text(), preset):
        assert f"# Slots not measured on their own: qkv_fprop ({unmeasured})," in text


@pytest.mark.parametrize(
    ("variables", "given", "says"),
    [
        ({"UB_SKIPMC": "1"}, False, "off"),
        ({}, False, "off"),
        ({"UB_SKIPMC": None}, True, "on"),
        ({"UB_SKIPMC": "0"}, True, "on"),
    ],
)
def test_the_head_says_with_which_transport_it_was_measured(
    tmp_path: Path, variables: dict[str, str], given: bool, says: str
) -> None:
    point = {**BULK, "backend": "megatron", "runtime": {**BULK["runtime"], "device": "cuda", "multicast": given}}
    make_point("operator", tmp_path, point, bwd=pass_times(90.0), environment={"gpu": "H200", "variables": variables})
    written(tmp_path)
    assert read(tmp_path / "tuning_report.json")["cases"][0]["multicast"] == says
    for name in ("optimal_tp_comm_overlap_cfg_tp2.yaml", "megatron_bridge_preset_tp2.py"):
        assert f"# Measured with NVLink multicast {says} (runtime.multicast=" in (tmp_path / name).read_text()


def test_a_size_with_a_proof_and_no_operators_has_its_files(tmp_path: Path) -> None:
    make_point("operator", tmp_path, {**BULK, "backend": "megatron"}, bwd=pass_times(90.0))
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    written(tmp_path)
    assert overlap_cfg.read(tmp_path / YAML) == BEST_CONFIG
    assert "one by one" not in (tmp_path / YAML).read_text()
    assert overlap_cfg.read(tmp_path / YAML.replace("4", "2")).slots["fc1_dgrad"] == {"method": "bulk", "num_sm": 4}


def test_each_case_has_files_of_its_own(tmp_path: Path) -> None:
    for model, tuned in (("llama3_8b", 0.9), ("qwen3_0_6b", 0.99)):
        write_operators(tmp_path, model=model)
        write_proof(tmp_path, {**WINS, "tuned": tuned}, name=model, point=layer_config(model=model))
    write_tuner(tmp_path, proofs=[trial(name, LABELS) for name in ("llama3_8b", "qwen3_0_6b")])
    written(tmp_path)
    (llama,), (qwen,) = (tmp_path.glob(f"{model}*/{YAML}") for model in ("llama3_8b_meg", "qwen3_0_6b_meg"))
    assert (overlap_cfg.read(llama), overlap_cfg.read(qwen)) == (BEST_CONFIG, OverlapConfig())
    files = [entry["file"] for entry in read(tmp_path / "tuning_report.json")["proof"]]
    assert files == [path.relative_to(tmp_path).as_posix() for path in (llama, qwen)]


def test_a_proof_that_failed_has_its_reason_and_no_settings(tmp_path: Path) -> None:
    (case,) = written(write_tuned_sweep(tmp_path, ratios={}, status="failed", error="[rank3] out of memory\n...")).cases
    (proof,) = read(tmp_path / "tuning_report.json")["proof"]
    assert not proof["proven"]
    assert proof.keys().isdisjoint({"recommended", "settings"})
    assert proof["reason"] == "the layer point failed: [rank3] out of memory"
    assert (proof["variants"], proof["kind"]) == ({}, "transformer_layer")
    assert proof["tried_together"][0]["variants"].keys() >= {"best of each slot", "fc1 bwd by none"}
    assert overlap_cfg.read(tmp_path / YAML) == case.plans[4].config


def test_a_size_that_was_dropped_is_listed_beside_those_that_were_proven(tmp_path: Path) -> None:
    for tp_size in (8, 4):
        write_operators(tmp_path, tp_size)
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)], dropped={"llama3_8b TP=8": "it cannot scale"})
    written(tmp_path)
    proofs = read(tmp_path / "tuning_report.json")["proof"]
    assert [(proof["tp_size"], proof.get("reason")) for proof in proofs] == [(4, None), (8, "it cannot scale")]


def test_a_tuner_without_a_proof_has_proven_nothing(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_tuner(tmp_path)
    written(tmp_path)
    assert [entry["proven"] for entry in read(tmp_path / "tuning_report.json")["proof"]] == [False]


# tuning_report.json, beside what recorded ones hold


def test_the_best_setting_of_a_slot_is_not_in_the_yaml_where_a_switch_overrules_it(tmp_path: Path) -> None:
    # One switch holds for both: off loses 10 at fc2, on would lose 40 at proj.
    for operator, time_us in (("proj", 120.0), ("fc2", 70.0)):
        ring = operator_config(2, operator, "dgrad", "ring_exchange", aggregate=False)
        make_point("operator", tmp_path, ring, bwd=pass_times(time_us, none_us=80.0))
    written(tmp_path)
    report = read(tmp_path / "tuning_report.json")
    best = {entry["slot"]: entry for entry in report["best"]}
    assert best["proj_dgrad"]["config_id"] == "tp2_proj_dgrad_none"
    assert (best["fc2_dgrad"]["time_us"], best["fc2_dgrad"]["setting_in_yaml"]) == (70.0, None)
    assert [(entry["name"], entry["value"]) for entry in report["switches"]] == [("tp_comm_overlap", False)]
    assert len(report["cases"][0]["overruled"]["2"]) == 1


# results_{impl}_tp{n}_dp{m}.json, whose names a recorded sweep holds


def test_rates_of_a_stack_are_of_all_data_parallel_ranks_and_leave_out_the_warm_up(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("megatron", 2, 2), step_us=10_000.0, spread_us=100.0)
    (analysis,) = stacks_of(tmp_path)
    content = results(analysis.best, STACKS)
    assert [step["step"] for step in content["steps"]] == [2, 3, 4, 5, 6]
    # 2048 tokens of 4 samples in 9.8 ms.
    per_s = {"tokens_per_sec": 2048 / 0.0098, "samples_per_sec": 4 / 0.0098}
    assert {name: content["steps"][0][name] for name in per_s} == pytest.approx(per_s)
    means = {"avg_step_time_ms": 10.0, "std_step_time_ms": math.sqrt(0.1 / 4), "avg_loss": 6.6}
    assert {name: content["summary"][name] for name in means} == pytest.approx(means)
    rates = {"tokens_per_s_per_gpu": 2048 / 0.01 / 4, "mfu": 100 / 989.4}
    assert {name: content["measured"][name] for name in rates} == pytest.approx(rates)


def test_a_stack_whose_losses_deviate_has_the_step(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), losses=falling(off={3: None}))
    for impl in ("megatron", "fsdp_dtensor"):
        make_point("tp_training", tmp_path, stack_config(impl))
    (analysis,) = stacks_of(tmp_path)
    found = {row.config.impl: results(row, STACKS) for row in analysis.rows}
    assert {impl: content["deviates"] for impl, content in found.items()} == {
        "autotp": "loss is NaN instead of 6.7 at step 3",
        "megatron": "",
        "fsdp_dtensor": "",
    }
    # Of the timed steps that have one.
    assert found["autotp"]["summary"]["avg_loss"] == pytest.approx((6.8 + 6.6 + 6.5 + 6.4) / 4)


def test_a_bad_trace_of_a_stack_is_a_problem_and_no_more(tmp_path: Path) -> None:
    directory = make_point("tp_training", tmp_path, traces=[trace_file(0), trace_file(1)])
    (directory / trace_file(0)).write_text("no trace")
    found = read_traces(read_points(tmp_path).points)[directory]
    assert (len(found.problems), trace_file(0) in found.problems[0], step_communication(found)) == (1, True, None)


# points.csv, of recorded sweeps


@pytest.mark.parametrize("name", ["operators", "tuner"])
def test_a_config_id_names_one_configuration_of_its_pass(tmp_path: Path, name: str) -> None:
    sweep = unpack(name, tmp_path)
    points = {point.name: point for point in read_points(sweep).points}
    named = defaultdict(set)
    for row in operator_rows(sweep):
        result = points[row["point"]].result
        if row["status"] == "ok" and result:
            named[row["config_id"]].add((row["slot"], str(slots_in_pass(result.settings, row["pass"]))))
    assert not {name: settings for name, settings in named.items() if len(settings) > 1}


# Shares of a step of a stack, and its communication.


def test_in_fp32_little_is_rounding() -> None:
    assert tolerance_of("fp32") == {"loss": 1e-4, "grad_norm": 1e-3}


@pytest.mark.parametrize(
    ("parts_us", "shares"),
    [
        ((30.0, 50.0, 10.0), (0.3, 0.5, 0.1, 0.1)),
        # Different ranks were the slowest.
        ((60.0, 60.0, 30.0), (0.4, 0.4, 0.2, 0.0)),
    ],
)
def test_shares_add_up(tmp_path: Path, parts_us: tuple[float, float, float], shares: tuple[float, ...]) -> None:
    make_point("tp_training", tmp_path, stack_config(), step_us=100.0, spread_us=0.0)
    (analysis,) = stacks_of(tmp_path)
    (row,) = analysis.rows
    for step in row.steps:
        step.forward_us, step.backward_us, step.optimizer_us = parts_us
    assert list(row.shares) == ["forward", "backward", "optimizer", "other"]
    assert list(row.shares.values()) == pytest.approx(shares)


def test_communication_is_that_of_the_rank_that_waits_least() -> None:
    rows = [
        trace_row(0, 0, "all", 100.0, comm_us=90.0, exposed_comm_us=90.0),
        trace_row(1, 0, "all", 200.0, comm_us=40.0, exposed_comm_us=10.0),
        trace_row(0, 1, "all", 300.0, comm_us=60.0, exposed_comm_us=30.0),
        trace_row(1, 1, "all", 200.0, comm_us=10.0, exposed_comm_us=0.0),
    ]
    found = step_communication(TraceReading(rows=rows))
    assert found == StepCommunication(total_us=25.0, exposed_us=5.0, waiting_us=50.0)
    assert found.hidden_fraction == 0.8
    assert step_communication(TraceReading()) is None
