"""Which stack is fastest; how it is said: made/stack_answers, made/every_workload and tp_training among the golden
files."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.traces import TraceReading
from overlap_sweep.study.words import cautions
from overlap_sweep.workloads.tp_training.rows import StepCommunication, step_communication, tolerance_of
from overlap_sweep.workloads.tp_training.study import STUDY, Analysis
from tests.make_point import LANGUAGE_MODEL, falling, make_point, stack_config
from tests.results.reading import stacks_of, trace_row


def analysis_of(directory: Path) -> Analysis:
    (analysis,) = stacks_of(directory)
    return analysis


def test_losses_of_the_warm_up_are_compared_too(tmp_path: Path) -> None:
    for impl, step_us, losses in (
        ("autotp", 5_000.0, falling(off={0: 7.2})),
        ("megatron", 10_000.0, falling()),
        ("async_tp", 12_000.0, falling()),
    ):
        make_point("tp_training", tmp_path, stack_config(impl), step_us=step_us, losses=losses)
    analysis = analysis_of(tmp_path)
    assert [(row.config.impl, row.deviates) for row in analysis.rows] == [
        ("autotp", True),
        ("megatron", False),
        ("async_tp", False),
    ]
    assert analysis.best.config.impl == "megatron"


def test_many_settings_of_one_implementation_do_not_outvote_the_others(tmp_path: Path) -> None:
    for stage in (0, 1, 2):
        point = stack_config("autotp", **{"tp_training.zero_stage": stage})
        make_point("tp_training", tmp_path, point, losses=falling(times=1.1))
    for impl in ("fsdp_dtensor", "megatron"):
        make_point("tp_training", tmp_path, stack_config(impl))
    assert {row.config.impl for row in analysis_of(tmp_path).rows if row.deviates} == {"autotp"}


@pytest.mark.parametrize(("dtype", "times", "agrees"), [("float32", 1.0005, False), ("bfloat16", 1.0005, True)])
def test_what_rounding_explains_is_no_deviation(tmp_path: Path, dtype: str, times: float, agrees: bool) -> None:
    exact = {"tp_training.dtype": dtype}
    make_point("tp_training", tmp_path, stack_config("autotp", **exact), losses=falling(times=times))
    make_point("tp_training", tmp_path, stack_config("megatron", **exact))
    assert [row.deviates for row in analysis_of(tmp_path).rows] == [not agrees] * 2
    assert tolerance_of("fp32") == {"loss": 1e-4, "grad_norm": 1e-3}


def test_losses_are_compared_where_the_data_are_the_same(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path / "other", stack_config("autotp", 2, 1))
    make_point("tp_training", tmp_path / "other", stack_config("autotp", 1, 2), losses=falling(times=2.0))
    other = analysis_of(tmp_path / "other")
    assert [row.losses for row in other.rows] == [None, None]
    make_point("tp_training", tmp_path / "same", stack_config("megatron", 2, 1))
    make_point("tp_training", tmp_path / "same", stack_config("megatron", 4, 1), losses=falling(times=1.1))
    assert all(row.deviates for row in analysis_of(tmp_path / "same").rows)


def test_where_nothing_trains_as_it_should_no_output_has_an_answer(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, stack_config("autotp"), losses=falling(times=1.3))
    make_point("tp_training", tmp_path, stack_config("megatron"), step_us=20_000.0)
    analysis = analysis_of(tmp_path)
    (answer,) = STUDY.answers.records([analysis])
    assert (analysis.answer, answer["setting"], answer["time_us"], answer["gain"]) == (None, None, None, 0.0)
    assert answer["reason"] == "no setting trains as it should"
    assert not any("best" in row.standing for row in analysis.rows)


def test_tuned_files_of_one_name_are_compared_apart(tmp_path: Path) -> None:
    for folder, cfg in (("a", {"fc1_fprop": {"method": "ring_exchange"}}), ("b", {"fc1_dgrad": {"method": "bulk"}})):
        file = {"tp_training.tp_comm_overlap_cfg": f"/{folder}/tp_comm_overlap_cfg.yaml"}
        make_point("tp_training", tmp_path, stack_config("megatron", overlap_cfg=cfg, **file))
    analysis = analysis_of(tmp_path)
    assert len({STUDY.key(analysis, row) for row in analysis.rows}) == 2


def test_repetitions_are_one_row(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((9_000.0, 11_000.0)):
        make_point("tp_training", tmp_path, stack_config(repetition=repetition), step_us=step_us)
    make_point("tp_training", tmp_path, stack_config(runtime={"device": "cuda", "max_connections": 1}), step_us=8_000.0)
    analysis = analysis_of(tmp_path)
    rows = sorted((row.setting, len(row.points), row.step.repeats) for row in analysis.rows)
    assert rows == [("defaults", 2, 10), ("max_connections=1", 1, 5)]


def test_grids_of_ranks_are_compared_by_the_time_per_token_and_gpu(tmp_path: Path) -> None:
    """Twice the ranks take 0.6 of the time: they have the shortest step, and the fewest tokens per GPU."""
    for repetition in range(3):
        for tp_size, dp_size, step_us in ((2, 1, 10_000.0), (4, 1, 6_000.0), (2, 2, 9_000.0)):
            point = stack_config("megatron", tp_size, dp_size, repetition=repetition)
            make_point("tp_training", tmp_path, point, step_us=step_us)
    analysis = analysis_of(tmp_path)
    grids = [(row.config.tp_size, row.config.dp_size) for row in analysis.rows]
    assert (grids, analysis.best, analysis.per) == ([(2, 2), (2, 1), (4, 1)], analysis.rows[0], "per token and GPU")
    assert STUDY.to_use(analysis) == "tp_size=2 dp_size=2"
    # More data-parallel ranks have a larger batch.
    (caution,) = [text for text in cautions(STUDY, analysis) if "trains differently" in text]
    assert "dp_size=2, trains differently from tp_size=2, dp_size=1" in caution


@pytest.mark.parametrize(
    ("impl", "options", "setting"),
    [
        ("autotp", {}, ""),
        ("autotp", {"zero_stage": 2, "vocab_parallel": False}, ", zero_stage=2, vocab_parallel=false"),
        ("fsdp_dtensor", {"compile": True, "sequence_parallel": True}, ", sequence_parallel=true, compile=true"),
        ("async_tp", {"attn_impl": "eager", "autocast": True}, ", attn_impl=eager, autocast=true"),
        ("megatron", {"tp_comm_overlap_cfg": "/a/tp4.yaml"}, ", tp_comm_overlap_cfg=tp4"),
        (
            "megatron",
            {"tp_comm_overlap": False, "sequence_parallel": False},
            ", sequence_parallel=false, tp_comm_overlap=false",
        ),
        ("megatron", {"activation_checkpointing": True}, ", activation_checkpointing=true"),
    ],
)
def test_a_setting_names_what_is_not_at_its_default(
    tmp_path: Path, impl: str, options: dict[str, Any], setting: str
) -> None:
    changed = {f"tp_training.{name}": value for name, value in options.items()}
    make_point("tp_training", tmp_path, stack_config(impl, **changed))
    (row,) = analysis_of(tmp_path).rows
    assert row.setting == f"impl={impl}, tp_size=2, dp_size=1{setting}"


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
    assert len(stacks_of(tmp_path)) == 2


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
        ((30.0, 50.0, 10.0), (0.3, 0.5, 0.1, 0.1)),
        # Different ranks were the slowest.
        ((60.0, 60.0, 30.0), (0.4, 0.4, 0.2, 0.0)),
    ],
)
def test_shares_add_up(tmp_path: Path, parts_us: tuple[float, float, float], shares: tuple[float, ...]) -> None:
    make_point("tp_training", tmp_path, stack_config(), step_us=100.0, spread_us=0.0)
    (row,) = analysis_of(tmp_path).rows
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
