from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.analysis.points import Point, read_points
from overlap_sweep.analysis.step_communication import StepCommunication, communication_of
from overlap_sweep.analysis.tp_training import (
    Grid,
    Shares,
    TpTrainingAnalysis,
    analyse_tp_training,
    ratio_interval,
    setting_of,
    shares_of,
)
from overlap_sweep.analysis.tp_training_answers import in_words, warnings
from overlap_sweep.analysis.tp_training_frame import (
    ANSWER_COLUMNS,
    COLUMNS,
    answer_rows,
    tp_training_rows,
)
from overlap_sweep.analysis.tp_training_losses import tolerance_of
from overlap_sweep.run_directory import RESULT_FILE, TpTrainingStep
from overlap_sweep.trace.overlap import TraceRow
from tests.made_sweeps import write_sweep_of_stacks
from tests.make_point import LANGUAGE_MODEL, falling, make_point, stack_config


def analyses_of(
    directory: Path, communication: Mapping[Path, StepCommunication] | None = None
) -> list[TpTrainingAnalysis]:
    reading = read_points(directory)
    assert not reading.problems
    return analyse_tp_training(reading.points, communication or {})


def analysis_of(directory: Path) -> TpTrainingAnalysis:
    (analysis,) = analyses_of(directory)
    return analysis


def test_the_fastest_of_each_grid_and_of_all(tmp_path: Path) -> None:
    analysis = analysis_of(write_sweep_of_stacks(tmp_path))
    assert str(analysis.case) == "qwen3_tiny, 2 layers, sequences of 512, batch 2, bfloat16 on NVIDIA H200"
    assert in_words(analysis) == [
        "TP=2 DP=2: megatron is fastest, 1.10x [1.09, 1.11] as fast as async_tp, 1.65x [1.64, 1.66] as fast as autotp "
        "zero2, the slowest; it takes 10.000 ms a step, 204,800 tokens/s",
        "TP=4 DP=1: megatron and async_tp are equally fast (1.00x [0.99, 1.02] between them); fsdp_dtensor takes 1.29x "
        "[1.27, 1.30] as long; megatron takes 7.000 ms a step, 146,286 tokens/s",
        "most tokens/s per GPU: TP=2 DP=2 megatron, 51,200, 10.1% of its peak",
        "DP=1: the losses agree (largest difference 0.0004 at step 6)",
        "DP=2: the losses agree (largest difference 0.0004 at step 6)",
    ]
    assert [row.setting for row in analysis.rows][:5] == [
        "megatron",
        "async_tp",
        "fsdp_dtensor",
        "autotp",
        "autotp zero2",
    ]
    best = analysis.rows[0]
    assert (best.tokens_per_s, best.tokens_per_s_per_gpu) == (pytest.approx(204_800), pytest.approx(51_200))
    # 4e12 operations in 10 ms on 4 GPUs.
    assert best.tflops_per_gpu == pytest.approx(100.0)
    assert best.mfu == pytest.approx(100.0 / 989.4)
    assert best.memory_allocated_gb == pytest.approx(10.6)
    assert warnings(analysis) == []


def test_warm_up_takes_no_part_in_times_but_in_losses(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), losses=falling(off={0: 7.2}))
    for impl in ("megatron", "fsdp_dtensor"):
        make_point("tp_training", tmp_path, stack_config(impl))
    analysis = analysis_of(tmp_path)
    assert {row.time_us for row in analysis.rows} == {10_000.0}
    assert analysis.rows[0].step.repeats == 5
    assert [row.impl for row in analysis.rows if row.deviates] == ["autotp"]


def test_who_deviates_never_wins(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), step_us=5_000.0, losses=falling(off={4: 6.4}))
    make_point("tp_training", tmp_path, stack_config("fsdp_dtensor"), step_us=10_000.0)
    make_point("tp_training", tmp_path, stack_config("megatron"), step_us=8_000.0)
    analysis = analysis_of(tmp_path)
    assert in_words(analysis) == [
        "TP=2 DP=1: megatron is fastest, 1.25x [1.24, 1.26] as fast as fsdp_dtensor; it takes 8.000 ms a step, "
        "128,000 tokens/s; not compared, as it computes something else: autotp",
        "TP=2 DP=1 autotp computes something else: its loss deviates from step 4 on, there by 0.03",
    ]
    assert analysis.best
    assert analysis.best.impl == "megatron"


def test_gradients_deviate_too(tmp_path: Path) -> None:
    norms = [1.5, 1.5, 1.5, 1.4, 1.5, 1.5, 1.5]
    make_point("tp_training", tmp_path, stack_config("autotp"), step_us=5_000.0, norms=norms)
    make_point("tp_training", tmp_path, stack_config("megatron"))
    make_point("tp_training", tmp_path, stack_config("async_tp"))
    (line,) = [line for line in in_words(analysis_of(tmp_path)) if "gradient norm" in line]
    assert line == "TP=2 DP=1 autotp computes something else: its gradient norm deviates from step 3 on, there by 0.07"


def test_of_two_that_differ_nobody_is_right(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), losses=falling(off={2: 6.0}))
    make_point("tp_training", tmp_path, stack_config("megatron"))
    assert in_words(analysis_of(tmp_path)) == [
        "TP=2 DP=1: no answer, as none computes what the others do",
        "losses or gradients differ from step 2 on, and it cannot be told who is right: TP=2 DP=1 autotp, TP=2 DP=1 "
        "megatron",
    ]


def test_many_settings_of_one_implementation_do_not_outvote_the_others(tmp_path: Path) -> None:
    for stage in (0, 1, 2):
        point = stack_config("autotp", **{"tp_training.zero_stage": stage})
        make_point("tp_training", tmp_path, point, losses=falling(times=1.1))
    for impl in ("fsdp_dtensor", "megatron"):
        make_point("tp_training", tmp_path, stack_config(impl))
    assert {row.impl for row in analysis_of(tmp_path).rows if row.deviates} == {"autotp"}


@pytest.mark.parametrize(("dtype", "times", "agrees"), [("float32", 1.0005, False), ("bfloat16", 1.0005, True)])
def test_what_rounding_explains_is_no_deviation(tmp_path: Path, dtype: str, times: float, agrees: bool) -> None:
    exact = {"tp_training.dtype": dtype}
    make_point("tp_training", tmp_path, stack_config("autotp", **exact), losses=falling(times=times))
    make_point("tp_training", tmp_path, stack_config("megatron", **exact))
    assert [row.deviates for row in analysis_of(tmp_path).rows] == [not agrees] * 2
    assert tolerance_of("fp32") == (1e-4, 1e-3)


def test_a_loss_that_is_no_number_deviates_unless_all_are(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), losses=falling(off={6: None}))
    make_point("tp_training", tmp_path, stack_config("megatron"))
    make_point("tp_training", tmp_path, stack_config("async_tp"))
    analysis = analysis_of(tmp_path)
    assert {row.impl: (row.deviates, row.diverges) for row in analysis.rows}["autotp"] == (True, True)
    assert analysis.best
    assert analysis.best.impl != "autotp"
    for impl in ("autotp", "megatron"):
        make_point("tp_training", tmp_path / "all", stack_config(impl), losses=falling(off={6: None}))
    assert in_words(analysis_of(tmp_path / "all"))[0] == "TP=2 DP=1: no answer, as none has a loss that is a number"


def test_other_data_are_not_compared(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp", 2, 1))
    make_point("tp_training", tmp_path, stack_config("autotp", 1, 2), losses=falling(times=2.0))
    analysis = analysis_of(tmp_path)
    assert [row.losses for row in analysis.rows] == [None, None]
    assert analysis.losses == []
    assert {row["losses_agree"] for row in answer_rows([analysis])} == {None}


def test_tensor_parallel_sizes_of_the_same_data_are_compared(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("megatron", 2, 1))
    make_point("tp_training", tmp_path, stack_config("megatron", 4, 1), losses=falling(times=1.1))
    assert all(row.deviates for row in analysis_of(tmp_path).rows)


def test_repetitions_are_one_row(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((9_000.0, 11_000.0)):
        make_point("tp_training", tmp_path, stack_config(repetition=repetition), step_us=step_us)
    make_point("tp_training", tmp_path, stack_config(runtime={"device": "cuda", "max_connections": 1}), step_us=8_000.0)
    analysis = analysis_of(tmp_path)
    assert sorted((row.setting, len(row.points), row.step.repeats) for row in analysis.rows) == [
        ("fsdp_dtensor", 2, 10),
        ("fsdp_dtensor #2", 1, 5),
    ]
    assert len(analysis.of_points) == 3


@pytest.mark.parametrize(
    ("impl", "options", "setting"),
    [
        ("autotp", {}, "autotp"),
        ("autotp", {"zero_stage": 2, "vocab_parallel": False}, "autotp zero2 whole vocabulary"),
        ("fsdp_dtensor", {"compile": True, "sequence_parallel": True}, "fsdp_dtensor sequence parallel compiled"),
        ("async_tp", {"attn_impl": "eager", "autocast": True}, "async_tp eager autocast"),
        ("megatron", {"tp_comm_overlap_cfg": "/a/tp_comm_overlap_cfg.yaml"}, "megatron tuned"),
        ("megatron", {"tp_comm_overlap_cfg": "/a/tp_comm_overlap_cfg_tp4.yaml"}, "megatron tuned tp4"),
        ("megatron", {"tp_comm_overlap_cfg": "/a/my_best.yaml"}, "megatron tuned my_best"),
        (
            "megatron",
            {"tp_comm_overlap": False, "sequence_parallel": False},
            "megatron no overlap no sequence parallel",
        ),
        ("megatron", {"activation_checkpointing": True}, "megatron checkpointing"),
    ],
)
def test_a_setting_names_what_is_not_at_its_default(impl: str, options: dict[str, Any], setting: str) -> None:
    changed = {f"tp_training.{name}": value for name, value in options.items()}
    assert setting_of(stack_config(impl, **changed)) == setting


@pytest.mark.parametrize(
    "other",
    [
        {"tp_training.seq_length": 1024},
        {"tp_training.seed": 1},
        {"tp_training.dtype": "float16"},
        {"tp_training.gradient_accumulation_steps": 2},
        {"language_model": {**LANGUAGE_MODEL, "hidden_size": 128}},
    ],
    ids=str,
)
def test_what_trains_otherwise_is_another_case(tmp_path: Path, other: dict[str, Any]) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"))
    make_point("tp_training", tmp_path, stack_config("megatron", **other))
    assert len(analyses_of(tmp_path)) == 2


def test_options_beside_their_defaults_are_told_with_the_case(tmp_path: Path) -> None:
    point = stack_config(**{"tp_training.learning_rate": 0.001, "tp_training.gradient_accumulation_steps": 4})
    make_point("tp_training", tmp_path, point)
    told = "batch 2, 4 micro batches, bfloat16, learning_rate=0.001 on NVIDIA H200"
    assert str(analysis_of(tmp_path).case).endswith(told)


def test_one_timed_step_beats_nothing(tmp_path: Path) -> None:
    short = {"tp_training.num_training_steps": 3}
    make_point("tp_training", tmp_path, stack_config("autotp", **short), step_us=10_000.0)
    make_point("tp_training", tmp_path, stack_config("megatron", **short), step_us=9_000.0)
    analysis = analysis_of(tmp_path)
    said = "TP=2 DP=1: megatron and autotp differ by less than the noise (1.11x between them); megatron takes"
    assert in_words(analysis)[0].startswith(said)
    assert math.isnan(analysis.rows[0].step.noise_us)
    assert warnings(analysis) == ["Fewer than 5 timed steps, so the noise is hardly known: all settings."]


def test_a_ratio_is_positive_however_large_the_noise(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), step_us=10_000.0, spread_us=4_900.0)
    make_point("tp_training", tmp_path, stack_config("megatron"), step_us=20_000.0, spread_us=9_900.0)
    analysis = analysis_of(tmp_path)
    autotp, megatron = analysis.rows
    interval = ratio_interval(megatron, autotp)
    # Of both notches, 1.57 x 9.8 / sqrt(5) of 10 ms and 1.57 x 19.8 / sqrt(5) of 20 ms.
    noise = math.hypot(1.57 * 0.98, 1.57 * 0.99) / math.sqrt(5)
    assert (interval.low, interval.high) == pytest.approx((2 / (1 + noise), 2 * (1 + noise)))
    assert "[1.01, 3.96]" in in_words(analysis)[0]


def test_what_has_nothing_beside_it_is_told_as_that(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"))
    assert in_words(analysis_of(tmp_path)) == [
        "TP=2 DP=1: autotp takes 10.000 ms a step, 102,400 tokens/s, nothing to compare it with"
    ]


def test_who_waits_for_another_rank_is_told(tmp_path: Path) -> None:
    seen = {}
    for impl, waiting_us in (("autotp", 600.0), ("megatron", 400.0), ("fsdp_dtensor", 2_000.0)):
        total_us = 3_000.0 if impl == "fsdp_dtensor" else 300.0
        directory = make_point("tp_training", tmp_path, stack_config(impl))
        seen[directory] = StepCommunication(total_us, 100.0, waiting_us)
    (analysis,) = analyses_of(tmp_path, seen)
    assert warnings(analysis) == [
        "In the profiled steps one rank waits for another, longer than it takes to communicate; comm and exposed are "
        "without that: TP=2 DP=1 autotp (0.600 ms)."
    ]


@pytest.mark.parametrize(
    ("environment", "options", "mfu"),
    [
        ({"gpu": "NVIDIA H100 80GB HBM3"}, {}, 100 / 989.4),
        ({"gpu": "NVIDIA H20"}, {}, 100 / 148),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, {}, 100 / 312),
        ({"gpu": "AMD Instinct MI300X"}, {}, 100 / 1307.4),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, {"dtype": "float32"}, 100 / 19.5),
        ({"gpu": "Tesla V100-SXM2-32GB"}, {}, None),
        ({"gpu": "Tesla V100-PCIE-16GB"}, {"dtype": "float16"}, 100 / 112),
        ({"gpu": "NVIDIA H100 PCIe"}, {}, 100 / 756),
        ({"gpu": "NVIDIA GB300"}, {}, 100 / 2500),
        ({"gpu": "something else"}, {}, None),
        ({"device": "cpu"}, {}, None),
        ({"device": "cpu"}, {"peak_tflops": 200.0}, 0.5),
        ({"gpu": "NVIDIA H200"}, {"peak_tflops": 200.0}, 0.5),
    ],
)
def test_utilisation_is_of_the_peak_that_is_known(
    tmp_path: Path, environment: dict[str, Any], options: dict[str, Any], mfu: float | None
) -> None:
    changed = {f"tp_training.{name}": value for name, value in options.items()}
    make_point("tp_training", tmp_path, stack_config(**changed), environment=environment)
    (row,) = analysis_of(tmp_path).rows
    assert row.mfu == (None if mfu is None else pytest.approx(mfu))


@pytest.mark.parametrize(
    ("parts_us", "shares"),
    [
        ((30.0, 50.0, 10.0), Shares(0.3, 0.5, 0.1, 0.1)),
        # Different ranks were the slowest.
        ((60.0, 60.0, 30.0), Shares(0.4, 0.4, 0.2, 0.0)),
    ],
)
def test_shares_add_up(parts_us: tuple[float, float, float], shares: Shares) -> None:
    forward_us, backward_us, optimizer_us = parts_us
    step = TpTrainingStep(
        **{"step": 0, "warmup": False, "loss": 1.0, "grad_norm": 1.0, "step_us": 100.0},
        **{"forward_us": forward_us, "backward_us": backward_us, "optimizer_us": optimizer_us},
    )
    assert shares_of([step, step]) == pytest.approx(shares)


def trace_row(iteration: int, rank: int, span_us: float, comm_us: float, exposed_us: float) -> TraceRow:
    counts = dict.fromkeys(("num_gemm_events", "num_comm_events", "num_wait_events", "num_compute_events"), 1)
    times = dict.fromkeys(("gemm_busy_us", "wait_us", "overlap_us", "idle_us"), 0.0)
    return TraceRow(
        **{"file": f"rank{rank}", "rank": rank, "iteration": iteration, "phase": "all", "overlap_ratio": None},
        **{"span_us": span_us, "comm_busy_us": comm_us, "exposed_comm_us": exposed_us},
        **times,
        **counts,
    )


def test_communication_is_that_of_the_rank_that_waits_least() -> None:
    rows = [
        *(trace_row(0, 0, 100.0, 90.0, 90.0), trace_row(0, 1, 200.0, 40.0, 10.0)),
        *(trace_row(1, 0, 300.0, 60.0, 30.0), trace_row(1, 1, 200.0, 10.0, 0.0)),
    ]
    found = communication_of(rows)
    assert found == StepCommunication(total_us=25.0, exposed_us=5.0, waiting_us=50.0)
    assert (found.hidden_us, found.hidden_fraction) == (20.0, 0.8)
    assert communication_of([]) is None


def test_rows_have_every_column(tmp_path: Path) -> None:
    directory = write_sweep_of_stacks(tmp_path)
    points = read_points(directory).points
    ok = next(point for point in points if point.status == "ok")
    analyses = analyse_tp_training(points, {ok.directory: StepCommunication(4000.0, 1000.0)})
    rows = tp_training_rows(points, analyses, directory)
    assert len(rows) == 11
    assert all(list(row) == list(COLUMNS) for row in rows)
    assert [row["comm_us"] for row in rows if row["comm_us"]] == [4000.0]
    assert sorted(row["impl"] for row in rows if row["chosen"]) == ["megatron", "megatron"]
    failed = next(row for row in rows if row["status"] == "failed")
    assert (failed["setting"], failed["tp_size"], failed["dp_size"], failed["step_us"]) == ("fsdp_dtensor", 1, 4, None)
    first, second = answer_rows(analyses)
    assert list(first) == list(ANSWER_COLUMNS)
    assert (first["next"], first["tied"], first["best_of_all"]) == ("async_tp", None, True)
    assert first["over_next"] == pytest.approx(1.1)
    assert first["over_slowest"] == pytest.approx(1.65)
    assert (second["next"], second["tied"], second["best_of_all"]) == ("fsdp_dtensor", "async_tp", False)


def missing(directory: Path, config: dict[str, Any]) -> Point:
    (directory / "missing" / ".hydra").mkdir(parents=True)
    (directory / "missing" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    (point,) = read_points(directory).points
    return point


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16"), (None, None)])
def test_a_missing_point_is_as_hydra_composed_it(tmp_path: Path, dtype: str | None, precision: str | None) -> None:
    composed = stack_config(backend="auto", precision=None) | {"impl": None, "dp_size": None}
    composed["tp_training"] |= {"dtype": dtype, "seq_length": None, "num_training_steps": None, "warmup_steps": None}
    composed["workload"]["tokens"] = None
    del composed["language_model"]
    point = missing(tmp_path, composed)
    assert (point.status, point.is_tp_training) == ("missing", True)
    assert point.case == ("qwen3_tiny", "fsdp_dtensor", "cuda", precision, None)
    assert Grid(point.config["tp_size"], point.config["dp_size"]) == Grid(2, 1)
    (row,) = tp_training_rows([point], [], tmp_path)
    assert (row["setting"], row["dtype"], row["status"]) == ("fsdp_dtensor", dtype, "missing")


Change = Callable[[dict[str, Any]], Any]


def _step(number: int, **changes: Any) -> Change:
    return lambda r: r["tp_training"]["steps"][number].update(changes)


BAD: dict[str, tuple[Change, str]] = {
    "nothing measured": (lambda r: r.update(tp_training=None), "ok without a timed step"),
    "no step": (lambda r: r["tp_training"].update(steps=[]), "ok without a timed step"),
    "warm-up only": (lambda r: [s.update(warmup=True) for s in r["tp_training"]["steps"]], "ok without a timed step"),
    "zero": (_step(3, step_us=0.0), "a step 3 without whole times"),
    "negative": (_step(3, forward_us=-1.0), "a step 3 without whole times"),
    "huge": (_step(3, backward_us=1e300), "a step 3 without whole times"),
    "norm": (_step(3, grad_norm=-1.0), "a step 3 whose loss or gradient norm is none"),
    "memory": (_step(3, memory_peak_gb=1e300), "a step 3 with a memory that is none"),
    "twice": (_step(3, step=2), "steps that don't follow each other"),
    "backwards": (lambda r: r["tp_training"]["steps"].reverse(), "steps that don't follow each other"),
    "late": (_step(6, step=10**12), "steps that don't follow each other"),
    "samples": (lambda r: r["tp_training"].update(samples_per_step=7), "7 samples in a step of 2"),
    "tokens": (lambda r: r["tp_training"].update(tokens_per_step=7), "7 tokens in a step of 1024"),
    "parameters": (lambda r: r["tp_training"].update(parameters=0), "0 parameters"),
    "flops": (lambda r: r["tp_training"].update(flops_per_step=-1.0), "-1 operations"),
    "host": (lambda r: r["tp_training"].update(host_ahead_us=1e300), "a host that is 1e+300 us ahead"),
    "details": (lambda r: r["tp_training"].update(details={"a": [0] * 200_000}), "holds more than"),
    "impl": (lambda r: r["point"].update(impl="\x1b[2J"), "which is none of autotp"),
    "no impl": (lambda r: r["point"].update(impl=None), "no result of a point"),
    "dp_size": (lambda r: r["point"].update(dp_size=0), "describes no point"),
    "tp_size": (lambda r: r["point"].update(tp_size=10**12), "describes no point"),
    "dtype": (lambda r: r["point"]["tp_training"].update(dtype="float64"), "which is none of bfloat16"),
    "batch": (lambda r: r["point"]["tp_training"].update(batch_size=None), "describes no point"),
    "sequence": (lambda r: r["point"]["tp_training"].update(seq_length=None), "no result of a point"),
    "rate": (lambda r: r["point"]["tp_training"].update(learning_rate="a"), "describes no point"),
    "no learning rate": (lambda r: r["point"]["tp_training"].pop("learning_rate"), "learning_rate"),
    "no vocabulary": (lambda r: r["point"]["tp_training"].pop("vocab_parallel"), "vocab_parallel"),
    "peak": (lambda r: r["point"]["tp_training"].update(peak_tflops=0.0), "describes no point"),
    "attention": (lambda r: r["point"]["tp_training"].update(attn_impl="x" * 200), "too long or not printable"),
    "file": (lambda r: r["point"]["tp_training"].update(tp_comm_overlap_cfg="\u202egnp"), "too long or not printable"),
    "layers": (lambda r: r["point"]["language_model"].update(num_hidden_layers=0), "no result of a point"),
    "no model": (lambda r: r["point"].pop("language_model"), "no result of a point"),
    "no section": (lambda r: r["point"].pop("tp_training"), "describes no point"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_a_result_that_cannot_be_is_one_sentence(tmp_path: Path, change: Change, said: str) -> None:
    path = make_point("tp_training", tmp_path) / RESULT_FILE
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    reading = read_points(tmp_path)
    (problem,) = reading.problems
    assert said in problem
    assert str(path) in problem
    assert len(problem.splitlines()) == 1
    assert not reading.points


def test_options_of_a_later_version_are_no_problem(tmp_path: Path) -> None:
    path = make_point("tp_training", tmp_path) / RESULT_FILE
    result = json.loads(path.read_text())
    result["point"]["tp_training"]["something_new"] = {"a": 1}
    path.write_text(json.dumps(result))
    assert analysis_of(tmp_path).rows
