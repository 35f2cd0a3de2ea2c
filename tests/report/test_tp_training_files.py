"""results_{impl}_tp{n}_dp{m}.json, whose names scripts rely on."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.step_communication import StepCommunication, read_communication
from overlap_sweep.analysis.tp_training import TpTrainingAnalysis, analyse_tp_training
from overlap_sweep.report.tp_training_files import results, results_file, write_results
from overlap_sweep.run_directory import trace_file
from overlap_sweep.tp_training_config import TpTraining
from tests.make_point import ENVIRONMENT, falling, make_point, stack_config

TRACE = Path(__file__).parent.parent / "data" / "traces" / "cpu_gloo_tp2_rank0.json.gz"

CONFIG = {
    *("model_name", "impl", "tp_size", "dp_size", "batch_size", "seq_length", "autocast", "num_layers", "attn_impl"),
    *("zero_stage", "use_vocab_parallel", "num_training_steps", "learning_rate", "weight_decay"),
    *("gradient_accumulation_steps", "max_grad_norm", "dtype", "activation_checkpointing", "warmup_steps"),
    *("log_interval", "output_dir", "seed"),
}
STEP = {
    *("step", "loss", "step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "tokens_per_sec"),
    *("samples_per_sec", "memory_allocated_gb", "memory_peak_gb"),
}
SUMMARY = {
    *("num_steps", "avg_step_time_ms", "std_step_time_ms", "avg_tokens_per_sec", "avg_samples_per_sec", "avg_loss"),
    *("final_loss", "peak_memory_gb", "timing_breakdown"),
}
"""Of the reference."""


def analysed(directory: Path) -> TpTrainingAnalysis:
    (analysis,) = analyse_tp_training(read_points(directory).points, {})
    return analysis


def test_names_are_those_that_scripts_read(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp", 4, 2))
    (row,) = analysed(tmp_path).of_points
    assert results_file(row) == "results_autotp_tp4_dp2.json"
    content = results(row)
    assert list(content) == ["config", "steps", "summary"]
    options = set(asdict(TpTraining())) - {"vocab_parallel", "output_dir"}
    assert content["config"].keys() >= CONFIG | options
    assert content["steps"][0].keys() == STEP | {"grad_norm"}
    assert content["summary"].keys() > SUMMARY
    assert list(content["summary"]["timing_breakdown"]) == ["forward_pct", "backward_pct", "optimizer_pct", "other_pct"]
    config = content["config"]
    assert (config["impl"], config["tp_size"], config["dp_size"], config["num_layers"]) == ("autotp", 4, 2, 2)
    assert (config["use_vocab_parallel"], config["zero_stage"]) == (True, 1)


def test_numbers_are_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("megatron", 2, 2), step_us=10_000.0, spread_us=100.0)
    (row,) = analysed(tmp_path).of_points
    content = results(row)
    assert [step["step"] for step in content["steps"]] == [2, 3, 4, 5, 6]
    first, summary = content["steps"][0], content["summary"]
    # 2048 tokens of both data-parallel ranks in 9.8 ms.
    assert first["step_time_s"] == pytest.approx(0.0098)
    assert first["tokens_per_sec"] == pytest.approx(2048 / 0.0098)
    assert first["samples_per_sec"] == pytest.approx(4 / 0.0098)
    assert first["forward_time_s"] == pytest.approx(0.3 * 0.0098)
    assert (first["loss"], first["grad_norm"]) == (6.8, 1.5)
    assert summary["num_steps"] == 5
    assert summary["avg_step_time_ms"] == pytest.approx(10.0)
    assert summary["std_step_time_ms"] == pytest.approx(math.sqrt(0.1 / 4))
    times_s = (0.0098, 0.0102, 0.0100, 0.0101, 0.0099)
    assert summary["avg_tokens_per_sec"] == pytest.approx(sum(2048 / time_s for time_s in times_s) / 5)
    assert summary["avg_loss"] == pytest.approx(6.6)
    assert summary["final_loss"] == pytest.approx(6.4)
    assert summary["timing_breakdown"] == pytest.approx(
        {"forward_pct": 30.0, "backward_pct": 50.0, "optimizer_pct": 10.0, "other_pct": 10.0}
    )
    assert summary["tflops_per_gpu"] == pytest.approx(100.0)
    assert summary["mfu_pct"] == pytest.approx(100 * 100 / 989.4)
    assert summary["tokens_per_sec_per_gpu"] == pytest.approx(2048 / 0.01 / 4)
    assert (summary["communication"], summary["losses_agree"], summary["deviates"]) == (None, None, None)


def test_who_deviates_is_told_where(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), losses=falling(off={3: None}))
    for impl in ("megatron", "fsdp_dtensor"):
        make_point("tp_training", tmp_path, stack_config(impl))
    summaries = {row.impl: results(row)["summary"] for row in analysed(tmp_path).of_points}
    assert summaries["megatron"]["losses_agree"] is True
    assert summaries["autotp"]["losses_agree"] is False
    assert summaries["autotp"]["deviates"] == {"what": "loss", "step": 3, "relative": None}
    # Of the timed steps that have one.
    assert summaries["autotp"]["avg_loss"] == pytest.approx((6.8 + 6.6 + 6.5 + 6.4) / 4)


def test_communication_is_that_of_the_traces(tmp_path: Path) -> None:
    directory = make_point("tp_training", tmp_path, traces=[trace_file(0), trace_file(1)])
    shutil.copy(TRACE, directory / trace_file(0))
    points = read_points(tmp_path).points
    found = read_communication(points)
    assert (found.problems, found.warnings) == ([], [])
    communication = found.of_point[directory]
    assert 0 <= communication.exposed_us < communication.total_us
    (analysis,) = analyse_tp_training(points, {directory: StepCommunication(4000.0, 1000.0, 500.0)})
    assert results(analysis.of_points[0])["summary"]["communication"] == {
        **{"total_ms": 4.0, "hidden_ms": 3.0, "exposed_ms": 1.0, "hidden_pct": 75.0, "waiting_ms": 0.5},
    }


def test_a_bad_trace_is_a_problem_and_no_more(tmp_path: Path) -> None:
    directory = make_point("tp_training", tmp_path, traces=[trace_file(0)])
    (directory / trace_file(0)).write_text("no trace")
    found = read_communication(read_points(tmp_path).points)
    (problem,) = found.problems
    assert trace_file(0) in problem
    assert found.of_point == {}


def test_each_run_directory_has_its_own(tmp_path: Path) -> None:
    for repetition in (0, 1):
        make_point("tp_training", tmp_path, stack_config(repetition=repetition), step_us=10_000.0 + repetition)
    written = write_results([analysed(tmp_path)])
    assert len(written) == 2
    medians = {json.loads(path.read_text())["summary"]["median_step_time_ms"] for path in written}
    assert medians == {10.0, 10.001}
    assert {path.parent for path in written} == {path.parent for path in tmp_path.rglob("result.json")}


def test_on_a_cpu_there_is_no_memory_and_no_peak(tmp_path: Path) -> None:
    directory = make_point(
        "tp_training",
        tmp_path,
        stack_config(device="cpu"),
        host_ahead_us=None,
        environment={**ENVIRONMENT, "gpu": None},
    )
    content = json.loads((directory / "result.json").read_text())
    for step in content["tp_training"]["steps"]:
        step |= {"memory_allocated_gb": None, "memory_peak_gb": None}
    (directory / "result.json").write_text(json.dumps(content))
    (row,) = analysed(tmp_path).of_points
    summary = results(row)["summary"]
    names = ("peak_memory_gb", "mfu_pct", "peak_tflops_per_gpu", "host_ahead_ms")
    assert {summary[name] for name in names} == {None}
