"""Which stack is fastest. How it is told: made/stack_answers, made/stacks and tp_training among the golden files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.step_communication import StepCommunication, communication_of
from overlap_sweep.analysis.tp_training import (
    Shares,
    TpTrainingAnalysis,
    analyse_tp_training,
    ratio_interval,
    setting_of,
    shares_of,
)
from overlap_sweep.analysis.tp_training_answers import warnings
from overlap_sweep.analysis.tp_training_frame import answer_rows
from overlap_sweep.analysis.tp_training_losses import tolerance_of
from overlap_sweep.run_directory import TpTrainingStep
from tests.analysis.reading import trace_row
from tests.made_sweeps import write_sweep_of_stacks
from tests.make_point import LANGUAGE_MODEL, falling, make_point, stack_config

Stacks = Mapping[str, Mapping[str, Any]]


def analyses_of(
    directory: Path, communication: Mapping[Path, StepCommunication] | None = None
) -> list[TpTrainingAnalysis]:
    reading = read_points(directory)
    assert not reading.problems
    return analyse_tp_training(reading.points, communication or {})


def analysis_of(directory: Path) -> TpTrainingAnalysis:
    (analysis,) = analyses_of(directory)
    return analysis


def of_stacks(directory: Path, stacks: Stacks) -> TpTrainingAnalysis:
    """Of one point for each stack, and what is special about its run."""
    for impl, run in stacks.items():
        make_point("tp_training", directory, stack_config(impl), **run)
    return analysis_of(directory)


def test_the_fastest_of_each_grid_and_of_all(tmp_path: Path) -> None:
    analysis = analysis_of(write_sweep_of_stacks(tmp_path))
    settings = ["megatron", "async_tp", "fsdp_dtensor", "autotp", "autotp zero2"]
    assert [row.setting for row in analysis.rows][:5] == settings
    best = analysis.rows[0]
    assert (best.tokens_per_s, best.tokens_per_s_per_gpu) == (pytest.approx(204_800), pytest.approx(51_200))
    # 4e12 operations in 10 ms on 4 GPUs.
    assert best.tflops_per_gpu == pytest.approx(100.0)
    assert best.mfu == pytest.approx(100.0 / 989.4)
    assert best.memory_allocated_gb == pytest.approx(10.6)
    assert warnings(analysis) == []
    first, second = answer_rows([analysis])
    assert (first["next"], first["tied"], first["best_of_all"]) == ("async_tp", None, True)
    assert (first["over_next"], first["over_slowest"]) == (pytest.approx(1.1), pytest.approx(1.65))
    assert (second["next"], second["tied"], second["best_of_all"]) == ("fsdp_dtensor", "async_tp", False)


OTHERS: Stacks = {"megatron": {}, "async_tp": {"step_us": 12_000.0}}
NO_NUMBERS = {"losses": falling(off={6: None})}


@pytest.mark.parametrize(
    ("autotp", "others", "deviating", "best"),
    [
        # Warm-up takes no part in times, but in losses.
        ({"losses": falling(off={0: 7.2})}, OTHERS, {"autotp"}, "megatron"),
        ({"losses": falling(off={4: 6.4})}, OTHERS, {"autotp"}, "megatron"),
        ({"norms": [1.5, 1.5, 1.5, 1.4, 1.5, 1.5, 1.5]}, OTHERS, {"autotp"}, "megatron"),
        # A loss that is no number deviates, unless all are; of two that differ nobody is right.
        (NO_NUMBERS, OTHERS, {"autotp"}, "megatron"),
        (NO_NUMBERS, {"megatron": NO_NUMBERS}, set(), None),
        ({"losses": falling(off={2: 6.0})}, {"megatron": {}}, {"autotp", "megatron"}, None),
    ],
    ids=["warm-up", "loss", "gradients", "no number", "no numbers", "two"],
)
def test_who_deviates_never_wins(
    tmp_path: Path, autotp: Mapping[str, Any], others: Stacks, deviating: set[str], best: str | None
) -> None:
    stacks = {"autotp": {"step_us": 5_000.0, **autotp}, **others}
    analysis = of_stacks(tmp_path, stacks)
    assert {row.impl for row in analysis.rows if row.deviates} == deviating
    assert {row.impl for row in analysis.rows if row.diverges} == {
        impl for impl, run in stacks.items() if run.get("losses") == NO_NUMBERS["losses"]
    }
    assert (analysis.best.impl if analysis.best else None) == best


def test_warm_up_takes_no_part_in_times(tmp_path: Path) -> None:
    analysis = of_stacks(tmp_path, {"autotp": {}, "megatron": {}})
    assert [(row.time_us, row.step.repeats) for row in analysis.rows] == [(10_000.0, 5)] * 2


def test_many_settings_of_one_implementation_do_not_outvote_the_others(tmp_path: Path) -> None:
    for stage in (0, 1, 2):
        point = stack_config("autotp", **{"tp_training.zero_stage": stage})
        make_point("tp_training", tmp_path, point, losses=falling(times=1.1))
    analysis = of_stacks(tmp_path, {"fsdp_dtensor": {}, "megatron": {}})
    assert {row.impl for row in analysis.rows if row.deviates} == {"autotp"}


@pytest.mark.parametrize(("dtype", "times", "agrees"), [("float32", 1.0005, False), ("bfloat16", 1.0005, True)])
def test_what_rounding_explains_is_no_deviation(tmp_path: Path, dtype: str, times: float, agrees: bool) -> None:
    exact = {"tp_training.dtype": dtype}
    make_point("tp_training", tmp_path, stack_config("autotp", **exact), losses=falling(times=times))
    make_point("tp_training", tmp_path, stack_config("megatron", **exact))
    assert [row.deviates for row in analysis_of(tmp_path).rows] == [not agrees] * 2
    assert tolerance_of("fp32") == (1e-4, 1e-3)


def test_losses_are_compared_where_the_data_are_the_same(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path / "other", stack_config("autotp", 2, 1))
    make_point("tp_training", tmp_path / "other", stack_config("autotp", 1, 2), losses=falling(times=2.0))
    other = analysis_of(tmp_path / "other")
    assert ([row.losses for row in other.rows], other.losses) == ([None, None], [])
    assert {row["losses_agree"] for row in answer_rows([other])} == {None}
    make_point("tp_training", tmp_path / "same", stack_config("megatron", 2, 1))
    make_point("tp_training", tmp_path / "same", stack_config("megatron", 4, 1), losses=falling(times=1.1))
    assert all(row.deviates for row in analysis_of(tmp_path / "same").rows)


def test_repetitions_are_one_row(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((9_000.0, 11_000.0)):
        make_point("tp_training", tmp_path, stack_config(repetition=repetition), step_us=step_us)
    make_point("tp_training", tmp_path, stack_config(runtime={"device": "cuda", "max_connections": 1}), step_us=8_000.0)
    analysis = analysis_of(tmp_path)
    rows = sorted((row.setting, len(row.points), row.step.repeats) for row in analysis.rows)
    assert rows == [("fsdp_dtensor", 2, 10), ("fsdp_dtensor #2", 1, 5)]
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


def test_one_timed_step_beats_nothing(tmp_path: Path) -> None:
    short = {"tp_training.num_training_steps": 3}
    make_point("tp_training", tmp_path, stack_config("autotp", **short), step_us=10_000.0)
    make_point("tp_training", tmp_path, stack_config("megatron", **short), step_us=9_000.0)
    analysis = analysis_of(tmp_path)
    assert [row.setting for row in analysis.answers[0].ties] == ["megatron", "autotp"]
    assert math.isnan(analysis.rows[0].step.noise_us)
    assert len(warnings(analysis)) == 1


def test_a_ratio_is_positive_however_large_the_noise(tmp_path: Path) -> None:
    stacks = {"autotp": {"spread_us": 4_900.0}, "megatron": {"step_us": 20_000.0, "spread_us": 9_900.0}}
    autotp, megatron = of_stacks(tmp_path, stacks).rows
    interval = ratio_interval(megatron, autotp)
    # Of both notches, 1.57 x 9.8 / sqrt(5) of 10 ms and 1.57 x 19.8 / sqrt(5) of 20 ms.
    noise = math.hypot(1.57 * 0.98, 1.57 * 0.99) / math.sqrt(5)
    assert (interval.low, interval.high) == pytest.approx((2 / (1 + noise), 2 * (1 + noise)))


def test_who_waits_for_another_rank_is_told(tmp_path: Path) -> None:
    seen = {}
    for impl, waiting_us in (("autotp", 600.0), ("megatron", 400.0), ("fsdp_dtensor", 2_000.0)):
        total_us = 3_000.0 if impl == "fsdp_dtensor" else 300.0
        directory = make_point("tp_training", tmp_path, stack_config(impl))
        seen[directory] = StepCommunication(total_us, 100.0, waiting_us)
    (analysis,) = analyses_of(tmp_path, seen)
    (said,) = warnings(analysis)
    assert said.endswith(": TP=2 DP=1 autotp (0.600 ms).")


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
    parts = dict(zip(("forward_us", "backward_us", "optimizer_us"), parts_us, strict=True))
    step = TpTrainingStep(step=0, warmup=False, loss=1.0, grad_norm=1.0, step_us=100.0, **parts)
    assert shares_of([step, step]) == pytest.approx(shares)


def test_communication_is_that_of_the_rank_that_waits_least() -> None:
    rows = [
        trace_row(0, 0, "all", 100.0, comm_busy_us=90.0, exposed_comm_us=90.0),
        trace_row(1, 0, "all", 200.0, comm_busy_us=40.0, exposed_comm_us=10.0),
        trace_row(0, 1, "all", 300.0, comm_busy_us=60.0, exposed_comm_us=30.0),
        trace_row(1, 1, "all", 200.0, comm_busy_us=10.0, exposed_comm_us=0.0),
    ]
    found = communication_of(rows)
    assert found == StepCommunication(total_us=25.0, exposed_us=5.0, waiting_us=50.0)
    assert (found.hidden_us, found.hidden_fraction) == (20.0, 0.8)
    assert communication_of([]) is None
