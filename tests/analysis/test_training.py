from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.analysis.knob_effects import KnobContribution, contributed, knob_effects
from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.training import TrainingAnalysis, TrainingRow, analyse_training
from overlap_sweep.analysis.training_frame import ANSWER_COLUMNS, COLUMNS, answer_rows, training_rows
from overlap_sweep.analysis.training_knobs import (
    DEVICE,
    SCHEDULING,
    TRAINS_DIFFERENTLY,
    USUAL,
    changed,
    knobs_of,
)
from overlap_sweep.analysis.training_warnings import warnings
from overlap_sweep.training_config import TRAINING_ON
from tests.made_sweeps import write_sweep_of_training
from tests.make_point import ENVIRONMENT, make_point, resolved, timing, timing_of

NVML = {"sm_clock_mhz": 1980.0, "temperature_c": 60.0}


def only(directory: Path) -> TrainingAnalysis:
    (analysis,) = analyse_training(read_points(directory).points)
    return analysis


def row_of(analysis: TrainingAnalysis, setting: str) -> TrainingRow:
    return next(row for row in analysis.rows if row.setting == setting)


def frame_of(directory: Path) -> pd.DataFrame:
    points = read_points(directory).points
    return to_frame(training_rows(points, analyse_training(points), directory), COLUMNS)


def contribution(analysis: TrainingAnalysis, name: str) -> KnobContribution:
    return next(one for one in contributed(analysis).contributions if one.name == name)


def knobs(**changes: Any) -> dict[str, Any]:
    return changes


def test_the_numbers_of_a_setting(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1250.0)
    (row,) = only(tmp_path).rows
    assert (row.time_us, row.none_us, row.floor_us) == (1250.0, 2000.0, 1000.0)
    assert (row.speedup, row.hidden_fraction, row.comm_us, row.exposed_us) == (1.6, 0.75, 1000.0, 250.0)
    # 64 samples on each of four ranks, with 145 tokens each.
    assert row.samples_per_s == pytest.approx(256 / 1250e-6)
    assert row.tokens_per_s == pytest.approx(256 * 145 / 1250e-6)
    assert (row.setting, row.loss, row.peak_memory_gb, row.host_limits) == (*("defaults", 0.5, 11.5, False),)


def test_settings_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    common = {"distributed.env": {"NCCL_ALGO": "Ring"}}
    for changes in (
        {},
        {"fsdp.forward_prefetch": 2},
        {"training.batch_size": 32, "compile.enabled": True},
        {"distributed.env": {"NCCL_ALGO": "Ring", "NCCL_MAX_CTAS": "8"}},
        {"fsdp.backward_prefetch": None, "runtime": {"device": "cuda", "max_connections": 1}},
    ):
        make_point("fsdp", tmp_path, resolved("fsdp", **{**common, **changes}))
    analysis = only(tmp_path)
    assert {row.setting for row in analysis.rows} == {
        "defaults",
        "forward_prefetch=2",
        "batch_size=32, compile=true",
        "NCCL_MAX_CTAS=8",
        "backward_prefetch=null, max_connections=1",
    }
    assert analysis.shared == "NCCL_ALGO=Ring"
    assert analysis.reference.setting == "defaults"


def test_the_best_is_told_as_it_is_typed(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1500.0)
    faster = {"fsdp.forward_prefetch": 1, "compile.enabled": True, "distributed.env": {"NCCL_ALGO": "Tree"}}
    make_point("fsdp", tmp_path, resolved("fsdp", **faster), step_us=1000.0)
    analysis = only(tmp_path)
    assert analysis.overrides == "fsdp.forward_prefetch=1 compile.enabled=true ++distributed.env.NCCL_ALGO=Tree"
    assert analysis.gain == pytest.approx(0.5)
    assert analysis.reason == "fastest of 2"


@pytest.mark.parametrize("value", ["Ring", "8", "LL,Simple", "a b", "null", 'a"b\\', "^x:y=$z", "0x1;#"])
def test_the_best_can_be_pasted(tmp_path: Path, value: str) -> None:
    make_point("fsdp", tmp_path, step_us=1500.0)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"distributed.env": {"NOT_LISTED": value}}), step_us=1000.0)
    (typed,) = shlex.split(only(tmp_path).overrides)
    override = OverridesParser.create().parse_override(typed)
    assert override.is_force_add()
    assert override.key_or_group == "distributed.env.NOT_LISTED"
    assert str(override.value()) == value


def test_knobs_that_change_nothing_make_no_other_setting(tmp_path: Path) -> None:
    for mb in (5.0, 25.0):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"distributed.bucket_cap_mb": mb}))
        make_point("fsdp", tmp_path, resolved("fsdp", **{"compile.backend": f"b{mb}", "training.max_steps": int(mb)}))
    (row,) = only(tmp_path).rows
    assert len(row.points) == 4
    ddp = {"distributed.strategy": "ddp"}
    for mb in (5.0, 25.0):
        make_point("fsdp", tmp_path, resolved("fsdp", **ddp, **{"distributed.bucket_cap_mb": mb}))
    assert {row.setting for row in only(tmp_path).rows} == {"defaults", "strategy=ddp", "strategy=ddp, bucket_cap_mb=5"}


def test_every_knob_is_known() -> None:
    known = knobs_of(resolved("fsdp"))
    assert known.keys() == USUAL.keys() | {DEVICE}
    assert known.keys() >= SCHEDULING
    assert known.keys() >= TRAINS_DIFFERENTLY
    assert not {"training.max_steps", "distributed.dp_size"} & known.keys()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_defaults_are_the_workloads_own(device: str) -> None:
    of_workload = {f"training.{name}": value for name, value in TRAINING_ON[device].items()}
    point = resolved("fsdp", **of_workload, runtime={"device": device})
    assert changed(knobs_of(point)) == []
    assert changed(knobs_of(resolved("fsdp", runtime={"device": "cpu"}))) == [
        *("training.batch_size", "training.mixed_precision"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"ranking": {**resolved("fsdp")["ranking"], "num_layers": 4}},
        {"model": {**resolved("fsdp")["model"], "hidden_size": 512}},
        {"distributed.dp_size": 8},
        {"runtime": {"device": "cpu"}},
    ],
    ids=["layers", "model", "ranks", "device"],
)
def test_what_is_another_model_or_machine_is_not_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_point("fsdp", tmp_path)
    other = {} if "runtime" in changes else ENVIRONMENT
    make_point("fsdp", tmp_path, resolved("fsdp", **changes), step_us=100.0, environment=other)
    analyses = analyse_training(read_points(tmp_path).points)
    assert [len(analysis.rows) for analysis in analyses] == [1, 1]


def test_steps_of_different_size_are_compared_by_their_samples(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1000.0)
    twice = resolved("fsdp", **{"training.gradient_accumulation": 2})
    make_point("fsdp", tmp_path, twice, step_us=1800.0, floor_us=1700.0)
    analysis = only(tmp_path)
    assert analysis.best.setting == "gradient_accumulation=2"
    assert analysis.gain == pytest.approx(2000 / 1800 - 1)
    assert not analysis.one_work


@pytest.mark.parametrize(
    ("default_us", "turned_us", "best", "reason"),
    [
        (1000.0, 996.0, "defaults", "simplest of those within 1.0% of the fastest, forward_prefetch=1 (0.4% faster"),
        (1000.0, 900.0, "forward_prefetch=1", "fastest of 2"),
        (900.0, 1000.0, "defaults", "fastest of 2"),
    ],
)
def test_a_tie_goes_to_the_simpler(tmp_path: Path, default_us: float, turned_us: float, best: str, reason: str) -> None:
    make_point("fsdp", tmp_path, step_us=default_us)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": 1}), step_us=turned_us)
    analysis = only(tmp_path)
    assert analysis.best.setting == best
    assert analysis.reason.startswith(reason)


def test_within_the_noise_the_simpler_is_taken(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1000.0, spread_us=60.0)
    both = {"fsdp.forward_prefetch": 1, "fsdp.reshard_after_forward": False}
    make_point("fsdp", tmp_path, resolved("fsdp", **both), step_us=960.0, spread_us=60.0)
    analysis = only(tmp_path)
    assert analysis.best.setting == "defaults"
    assert analysis.reason.startswith("simplest of those within the noise of the fastest, forward_prefetch=1, reshard")


def test_drift_cancels_where_the_floor_does_the_same(tmp_path: Path) -> None:
    # The machine was 1.5 times slower when it measured the second, which is the faster one.
    make_point("fsdp", tmp_path, step_us=1500.0, none_us=2000.0, floor_us=1000.0)
    point = resolved("fsdp", **{"fsdp.forward_prefetch": 1})
    make_point("fsdp", tmp_path, point, step_us=1800.0, none_us=3000.0, floor_us=1500.0)
    analysis = only(tmp_path)
    assert analysis.best.setting == "forward_prefetch=1"
    assert {row.setting: row.time_us for row in analysis.rows} == pytest.approx(
        {"forward_prefetch=1": 1500.0, "defaults": 1875.0}
    )
    assert {row.floor_us for row in analysis.rows} == {1250.0}
    # Compiled, the step without communication is another.
    compiled = resolved("fsdp", **{"compile.enabled": True})
    make_point("fsdp", tmp_path, compiled, step_us=1400.0, none_us=1800.0, floor_us=700.0, compiled="inductor")
    analysis = only(tmp_path)
    assert row_of(analysis, "compile=true").time_us == 1400.0
    assert row_of(analysis, "compile=true").floor_us == 700.0
    assert row_of(analysis, "defaults").floor_us == 1250.0


def test_repetitions_are_put_together(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((1400.0, 1600.0)):
        make_point("fsdp", tmp_path, resolved("fsdp", repetition=repetition), step_us=step_us)
    (row,) = only(tmp_path).rows
    assert (row.time_us, row.step.repeats, len(row.points)) == (1500.0, 10, 2)


def test_what_each_knob_contributed(tmp_path: Path) -> None:
    analysis = only(write_sweep_of_training(tmp_path))
    assert len(knob_effects(analysis)) == 9
    reshard = contribution(analysis, "reshard_after_forward")
    assert (reshard.what, len(reshard.effects), reshard.taken) == ("true \N{RIGHTWARDS ARROW} false", 3, True)
    assert reshard.beside_best
    assert reshard.beside_best.change == pytest.approx(2100 / 2200 - 1)
    assert reshard.range == (pytest.approx(2100 / 2200 - 1), pytest.approx(1450 / 1500 - 1))
    assert reshard.change == pytest.approx(1150 / 1200 - 1)
    prefetch = contribution(analysis, "forward_prefetch")
    # Nothing but it differs from the best nowhere.
    assert prefetch.beside_best is None
    assert sorted(round(effect.change, 4) for effect in prefetch.effects) == [-0.2069, -0.2, -0.12]
    accumulated = contribution(analysis, "gradient_accumulation")
    assert accumulated.beside_best
    assert accumulated.beside_best.change == pytest.approx(1050 / 1150 - 1)


def test_the_noise_of_an_effect(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1000.0, spread_us=20.0)
    point = resolved("fsdp", **{"fsdp.forward_prefetch": 1}, compile={**resolved("fsdp")["compile"], "enabled": False})
    make_point("fsdp", tmp_path, point, step_us=990.0, spread_us=20.0)
    (effect,) = knob_effects(only(tmp_path))
    assert effect.change == pytest.approx(-0.01)
    assert not effect.differs
    assert 0.02 < effect.noise < 0.06


def test_changes_begin_at_the_default(tmp_path: Path) -> None:
    for ahead in (2, 1, 0):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1000.0 + ahead)
    for mode in ("BACKWARD_POST", None):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.backward_prefetch": mode}), step_us=1100.0)
    found = {(one.name, one.what) for one in contributed(only(tmp_path)).contributions}
    arrow = "\N{RIGHTWARDS ARROW}"
    assert found == {
        *(("forward_prefetch", f"{a} {arrow} {b}") for a, b in ((0, 1), (0, 2), (1, 2))),
        *(("backward_prefetch", f"BACKWARD_PRE {arrow} {b}") for b in ("BACKWARD_POST", "null")),
        ("backward_prefetch", f"BACKWARD_POST {arrow} null"),
    }


def test_the_median_of_all_pairs_comes_first_and_has_its_own_noise(tmp_path: Path) -> None:
    # Six pairs of a knob that helps by 2 to 4 percent, of which the largest lies beside the best.
    for warmup_steps, after_us in enumerate((970.0, 980.0, 969.0, 971.0, 970.0, 960.0)):
        knob = {"training.warmup_steps": warmup_steps}
        make_point("fsdp", tmp_path, resolved("fsdp", **knob), step_us=1000.0, spread_us=40.0)
        make_point(
            "fsdp", tmp_path, resolved("fsdp", **knob, **{"fsdp.forward_prefetch": 1}), step_us=after_us, spread_us=40.0
        )
    prefetch, *others = contributed(only(tmp_path)).contributions
    assert (prefetch.name, len(prefetch.effects)) == ("forward_prefetch", 6)
    assert prefetch.change == pytest.approx(-0.03)
    # Each pair has a noise of some 8 percent, and yet they agree.
    assert prefetch.noise < 0.01 < 0.05 < prefetch.effects[0].noise
    assert prefetch.sure
    assert not any(other.sure for other in others)


def test_pairs_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1000.0)
    slow_host = resolved("fsdp", **{"fsdp.forward_prefetch": 1})
    make_point("fsdp", tmp_path, slow_host, step_us=1500.0, host_us={"point": 1490.0})
    diverging = resolved("fsdp", **{"training.mixed_precision": "fp16"})
    make_point("fsdp", tmp_path, diverging, step_us=700.0, losses=[0.7, None])
    make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": 2}), step_us=900.0)
    two = {"fsdp.reshard_after_forward": False, "training.gradient_accumulation": 2}
    make_point("fsdp", tmp_path, resolved("fsdp", **two), step_us=900.0)
    effects = contributed(only(tmp_path))
    assert [(one.name, one.what) for one in effects.contributions] == [
        ("forward_prefetch", "0 \N{RIGHTWARDS ARROW} 2"),
    ]
    assert effects.left_out == 3
    assert effects.only_left_out == ["mixed_precision"]
    assert effects.never_alone == ["reshard_after_forward", "gradient_accumulation"]


def test_the_host_may_be_the_limit(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1000.0, host_us={"point": 960.0})
    make_point(
        "fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": 1}), step_us=1000.0, host_us={"point": 900.0}
    )
    analysis = only(tmp_path)
    assert [row.setting for row in analysis.rows if row.host_limits] == ["defaults"]
    (said,) = [line for line in warnings(analysis) if line.startswith("Launch-bound")]
    assert "in defaults;" in said
    # A step takes what it takes: nothing is left out.
    assert analysis.best.setting == "defaults"


def test_where_the_host_limits_everything_it_is_said_once(tmp_path: Path) -> None:
    for ahead in range(3):
        point = resolved("fsdp", **{"fsdp.forward_prefetch": ahead})
        make_point("fsdp", tmp_path, point, step_us=1000.0, host_us={"point": 990.0})
    (said,) = [line for line in warnings(only(tmp_path)) if line.startswith("Launch-bound")]
    assert "as the device to run it in all settings; what is hidden" in said


def test_on_a_cpu_the_host_has_no_time(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, host_us={}, peak_memory_gb=None)
    (row,) = only(tmp_path).rows
    assert (row.host_us, row.host_limits, row.peak_memory_gb) == (None, False, None)


def test_what_the_best_computes_is_told(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1000.0)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": 1}), step_us=950.0)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"training.batch_size": 8}), step_us=700.0, floor_us=400.0)
    analysis = only(tmp_path)
    assert analysis.best.setting == "forward_prefetch=1"
    make_point(
        "fsdp", tmp_path, resolved("fsdp", **{"training.mixed_precision": "fp16"}), step_us=400.0, floor_us=300.0
    )
    (said, *_) = warnings(only(tmp_path))
    assert said == (
        "The best, mixed_precision=fp16, does not compute the same as defaults: of those that compute the same, "
        "forward_prefetch=1 is the best, 1.05x the samples/s."
    )


def test_other_losses_are_told(tmp_path: Path) -> None:
    for ahead in (0, 1, 2):
        losses = [0.7, 0.6, 0.5] if ahead < 2 else [0.7, 0.6, 0.9]
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), losses=losses)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"training.batch_size": 8}), losses=[9.0])
    (said,) = [line for line in warnings(only(tmp_path)) if "loss" in line]
    assert said.startswith("fsdp_2 has a loss of 0.9 after step 3, and those that compute the same 0.5: don't trust")


def test_losses_that_are_next_to_nothing_may_differ(tmp_path: Path) -> None:
    for ahead, last in enumerate((3.55e-7, 3.1e-7, 3.6e-7)):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), losses=[0.7, 0.1, last])
    assert not [line for line in warnings(only(tmp_path)) if "loss" in line]


def test_the_reference_among_equally_simple_ones_is_the_smallest_number(tmp_path: Path) -> None:
    for size in (128, 96, 16):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"training.batch_size": size}))
    assert only(tmp_path).reference.setting == "batch_size=16"


def test_a_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path)
    diverged = resolved("fsdp", **{"fsdp.forward_prefetch": 1})
    make_point("fsdp", tmp_path, diverged, step_us=1100.0, losses=[0.7, None, None])
    analysis = only(tmp_path)
    assert analysis.best.setting == "defaults"
    assert row_of(analysis, "forward_prefetch=1").loss is None
    assert [line for line in warnings(analysis) if "loss" in line] == [
        "fsdp_1 has a loss that is no number from step 2 on: it does not train.",
    ]
    assert list(frame_of(tmp_path)["loss"].isna()) == [False, True]


def test_what_could_not_be_compiled_is_told(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, resolved("fsdp", **{"compile.enabled": True}), compiled="no: no C++ compiler\nfound")
    assert "The layers could not be compiled in compile=true: no C++ compiler." in (warnings(only(tmp_path)))


def test_drift_slowdowns_and_the_points_own_warnings_are_told(tmp_path: Path) -> None:
    slow = {"conditions": {"after": {"gpus": [{**NVML, "throttle_reasons": 0x40}]}}, "warnings": ["beware"]}
    for ahead, floor_us in enumerate((1000.0, 1000.0, 1100.0)):
        more = {**slow, "started": f"2026-11-21T2{ahead}:00:00+00:00"}
        point = resolved("fsdp", **{"fsdp.forward_prefetch": ahead})
        make_point("fsdp", tmp_path, point, floor_us=floor_us, **more)
    lines = warnings(only(tmp_path))
    assert any(line.startswith("Baselines drifted: the step without communication by up to +10%") for line in lines)
    assert "GPUs were slowed down (hardware thermal slowdown) around 3 points, first fsdp_0." in lines
    assert lines.count("beware") == 1


def test_where_nothing_is_to_be_hidden_it_is_told(tmp_path: Path) -> None:
    samples = {"point": [980, 1000, 1010, 1030, 1060], "none": [1045, 965, 1005, 985, 1025]}
    step = {name: timing_of([float(one) for one in of_one]) for name, of_one in samples.items()}
    make_point("fsdp", tmp_path, step={**step, "floor": timing(1000.0, 20.0)})
    analysis = only(tmp_path)
    assert not analysis.best.communicates
    (said,) = warnings(analysis)
    assert said.startswith("What communication costs without overlap cannot be told from noise in defaults: hidden")


def test_the_table_has_a_row_for_each_point(tmp_path: Path) -> None:
    frame = frame_of(write_sweep_of_training(tmp_path))
    assert list(frame.columns) == list(COLUMNS)
    assert dict(frame["status"].value_counts()) == {"ok": 7, "failed": 1, "skipped": 1}
    row = frame.set_index("point").loc["fsdp_3"]
    assert (row["setting"], row["turned"]) == ("forward_prefetch=1, reshard_after_forward=false", 2)
    assert (row["forward_prefetch"], row["reshard_after_forward"], row["batch_size"]) == (1, "false", 64)
    assert (row["step_us"], row["none_us"], row["floor_us"]) == (1150.0, 1800.0, 1000.0)
    assert row["samples_per_s"] == pytest.approx(256 / 1150e-6)
    assert row["hidden_fraction"] == pytest.approx(650 / 800)
    assert list(frame[frame["chosen"].fillna(False)]["point"]) == ["fsdp_6"]
    failed = frame.set_index("point").loc["large"]
    assert (failed["batch_size"], failed["error"]) == (4096, "CUDA out of memory")
    assert math.isnan(failed["step_us"])


def test_the_answers_are_a_row_for_each_case(tmp_path: Path) -> None:
    write_sweep_of_training(tmp_path)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"distributed.dp_size": 8}))
    answers = to_frame(answer_rows(analyse_training(read_points(tmp_path).points)), ANSWER_COLUMNS)
    assert list(answers["ranks"]) == [4, 8]
    best = answers.iloc[0]
    assert best["overrides"].endswith("training.gradient_accumulation=2")
    assert best["gain"] == pytest.approx(3000 / 2100 - 1)
    assert best["reference"] == "defaults"
