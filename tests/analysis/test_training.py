"""Which setting trains fastest, and what each knob contributed. How it is told, doubts included: made/training_doubts,
made/training and fsdp among the golden files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from overlap_sweep.analysis.knob_effects import KnobContribution, contributed, knob_effects
from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.training import TrainingAnalysis, TrainingRow, analyse_training
from overlap_sweep.analysis.training_knobs import DEVICE, SCHEDULING, TRAINS_DIFFERENTLY, USUAL, changed, knobs_of
from overlap_sweep.analysis.training_warnings import warnings
from overlap_sweep.training_config import TRAINING_ON
from tests.analysis.reading import PREFETCH, train, training_of
from tests.made_sweeps import write_sweep_of_training
from tests.make_point import ENVIRONMENT, resolved

ARROW = "\N{RIGHTWARDS ARROW}"


def row_of(analysis: TrainingAnalysis, setting: str) -> TrainingRow:
    return next(row for row in analysis.rows if row.setting == setting)


def contribution(analysis: TrainingAnalysis, name: str) -> KnobContribution:
    return next(one for one in contributed(analysis).contributions if one.name == name)


def test_the_numbers_of_a_setting(tmp_path: Path) -> None:
    train(tmp_path, step_us=1250.0)
    (row,) = training_of(tmp_path).rows
    assert (row.time_us, row.none_us, row.floor_us) == (1250.0, 2000.0, 1000.0)
    assert (row.speedup, row.hidden_fraction, row.comm_us, row.exposed_us) == (1.6, 0.75, 1000.0, 250.0)
    # 64 samples on each of four ranks, with 145 tokens each.
    assert row.samples_per_s == pytest.approx(256 / 1250e-6)
    assert row.tokens_per_s == pytest.approx(256 * 145 / 1250e-6)
    assert (row.setting, row.loss, row.peak_memory_gb, row.host_limits) == ("defaults", 0.5, 11.5, False)


def test_settings_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    common = {"distributed.env": {"NCCL_ALGO": "Ring"}}
    for changes in (
        {},
        {"fsdp.forward_prefetch": 2},
        {"training.batch_size": 32, "compile.enabled": True},
        {"distributed.env": {"NCCL_ALGO": "Ring", "NCCL_MAX_CTAS": "8"}},
        {"fsdp.backward_prefetch": None, "runtime": {"device": "cuda", "max_connections": 1}},
    ):
        train(tmp_path, {**common, **changes})
    analysis = training_of(tmp_path)
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
    train(tmp_path, step_us=1500.0)
    faster = {**PREFETCH, "compile.enabled": True, "distributed.env": {"NCCL_ALGO": "Tree"}}
    train(tmp_path, faster, step_us=1000.0)
    analysis = training_of(tmp_path)
    assert analysis.overrides == "fsdp.forward_prefetch=1 compile.enabled=true ++distributed.env.NCCL_ALGO=Tree"
    assert analysis.gain == pytest.approx(0.5)
    assert analysis.reason == "fastest of 2"


@pytest.mark.parametrize("value", ["Ring", "8", "LL,Simple", "a b", "null", 'a"b\\', "^x:y=$z", "0x1;#"])
def test_the_best_can_be_pasted(tmp_path: Path, value: str) -> None:
    train(tmp_path, step_us=1500.0)
    train(tmp_path, {"distributed.env": {"NOT_LISTED": value}}, step_us=1000.0)
    (typed,) = shlex.split(training_of(tmp_path).overrides)
    override = OverridesParser.create().parse_override(typed)
    assert override.is_force_add()
    assert override.key_or_group == "distributed.env.NOT_LISTED"
    assert str(override.value()) == value


def test_knobs_that_change_nothing_make_no_other_setting(tmp_path: Path) -> None:
    for mb in (5.0, 25.0):
        train(tmp_path, {"distributed.bucket_cap_mb": mb})
        train(tmp_path, {"compile.backend": f"b{mb}", "training.max_steps": int(mb)})
    (row,) = training_of(tmp_path).rows
    assert len(row.points) == 4
    for mb in (5.0, 25.0):
        train(tmp_path, {"distributed.strategy": "ddp", "distributed.bucket_cap_mb": mb})
    settings = {row.setting for row in training_of(tmp_path).rows}
    assert settings == {"defaults", "strategy=ddp", "strategy=ddp, bucket_cap_mb=5"}


def test_every_knob_is_known() -> None:
    known = knobs_of(resolved("fsdp"))
    assert known.keys() == USUAL.keys() | {DEVICE}
    assert known.keys() >= SCHEDULING | TRAINS_DIFFERENTLY
    assert not {"training.max_steps", "distributed.dp_size"} & known.keys()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_defaults_are_the_workloads_own(device: str) -> None:
    of_workload = {f"training.{name}": value for name, value in TRAINING_ON[device].items()}
    assert changed(knobs_of(resolved("fsdp", **of_workload, runtime={"device": device}))) == []
    on_cpu = changed(knobs_of(resolved("fsdp", runtime={"device": "cpu"})))
    assert on_cpu == ["training.batch_size", "training.mixed_precision"]


@pytest.mark.parametrize(
    "changes",
    [{"ranking": {"num_layers": 4}}, {"model": {"hidden_size": 512}}, {"distributed.dp_size": 8}, {"device": "cpu"}],
    ids=["layers", "model", "ranks", "device"],
)
def test_what_is_another_model_or_machine_is_not_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    train(tmp_path)
    train(tmp_path, changes, step_us=100.0, environment={} if "device" in changes else ENVIRONMENT)
    analyses = analyse_training(read_points(tmp_path).points)
    assert [len(analysis.rows) for analysis in analyses] == [1, 1]


def test_steps_of_different_size_are_compared_by_their_samples(tmp_path: Path) -> None:
    train(tmp_path, step_us=1000.0)
    train(tmp_path, {"training.gradient_accumulation": 2}, step_us=1800.0, floor_us=1700.0)
    analysis = training_of(tmp_path)
    assert analysis.best.setting == "gradient_accumulation=2"
    assert analysis.gain == pytest.approx(2000 / 1800 - 1)
    assert not analysis.one_work


@pytest.mark.parametrize(
    ("default_us", "turned_us", "spread_us", "best", "reason"),
    [
        (1000.0, 996.0, 0.0, "defaults", "within 1.0% of the fastest, forward_prefetch=1 (0.4% faster"),
        (1000.0, 900.0, 0.0, "forward_prefetch=1", "fastest of 2"),
        (900.0, 1000.0, 0.0, "defaults", "fastest of 2"),
        (1000.0, 960.0, 60.0, "defaults", "within the noise of the fastest, forward_prefetch=1 (4.0% faster"),
    ],
)
def test_a_tie_goes_to_the_simpler(
    tmp_path: Path, default_us: float, turned_us: float, spread_us: float, best: str, reason: str
) -> None:
    train(tmp_path, step_us=default_us, spread_us=spread_us)
    train(tmp_path, PREFETCH, step_us=turned_us, spread_us=spread_us)
    analysis = training_of(tmp_path)
    assert analysis.best.setting == best
    assert reason in analysis.reason


def test_drift_cancels_where_the_floor_does_the_same(tmp_path: Path) -> None:
    # The machine was 1.5 times slower when it measured the second, which is the faster one.
    train(tmp_path, step_us=1500.0, none_us=2000.0, floor_us=1000.0)
    train(tmp_path, PREFETCH, step_us=1800.0, none_us=3000.0, floor_us=1500.0)
    analysis = training_of(tmp_path)
    assert analysis.best.setting == "forward_prefetch=1"
    times_us = {row.setting: row.time_us for row in analysis.rows}
    assert times_us == pytest.approx({"forward_prefetch=1": 1500.0, "defaults": 1875.0})
    assert {row.floor_us for row in analysis.rows} == {1250.0}
    # Compiled, the step without communication is another.
    train(tmp_path, {"compile.enabled": True}, step_us=1400.0, none_us=1800.0, floor_us=700.0, compiled="inductor")
    analysis = training_of(tmp_path)
    compiled = row_of(analysis, "compile=true")
    assert (compiled.time_us, compiled.floor_us) == (1400.0, 700.0)
    assert row_of(analysis, "defaults").floor_us == 1250.0


def test_repetitions_are_put_together(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((1400.0, 1600.0)):
        train(tmp_path, {"repetition": repetition}, step_us=step_us)
    (row,) = training_of(tmp_path).rows
    assert (row.time_us, row.step.repeats, len(row.points)) == (1500.0, 10, 2)


def test_what_each_knob_contributed(tmp_path: Path) -> None:
    analysis = training_of(write_sweep_of_training(tmp_path))
    assert len(knob_effects(analysis)) == 9
    reshard = contribution(analysis, "reshard_after_forward")
    assert (reshard.what, len(reshard.effects), reshard.taken) == (f"true {ARROW} false", 3, True)
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
    train(tmp_path, step_us=1000.0, spread_us=20.0)
    train(tmp_path, {**PREFETCH, "compile.enabled": False}, step_us=990.0, spread_us=20.0)
    (effect,) = knob_effects(training_of(tmp_path))
    assert effect.change == pytest.approx(-0.01)
    assert not effect.differs
    assert 0.02 < effect.noise < 0.06


def test_changes_begin_at_the_default(tmp_path: Path) -> None:
    for ahead in (2, 1, 0):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=1000.0 + ahead)
    for mode in ("BACKWARD_POST", None):
        train(tmp_path, {"fsdp.backward_prefetch": mode}, step_us=1100.0)
    found = {(one.name, one.what) for one in contributed(training_of(tmp_path)).contributions}
    assert found == {
        *(("forward_prefetch", f"{a} {ARROW} {b}") for a, b in ((0, 1), (0, 2), (1, 2))),
        *(("backward_prefetch", f"BACKWARD_PRE {ARROW} {b}") for b in ("BACKWARD_POST", "null")),
        ("backward_prefetch", f"BACKWARD_POST {ARROW} null"),
    }


def test_the_median_of_all_pairs_comes_first_and_has_its_own_noise(tmp_path: Path) -> None:
    # Six pairs of a knob that helps by 2 to 4 percent, of which the largest lies beside the best.
    for warmup_steps, after_us in enumerate((970.0, 980.0, 969.0, 971.0, 970.0, 960.0)):
        knob = {"training.warmup_steps": warmup_steps}
        train(tmp_path, knob, step_us=1000.0, spread_us=40.0)
        train(tmp_path, {**knob, **PREFETCH}, step_us=after_us, spread_us=40.0)
    prefetch, *others = contributed(training_of(tmp_path)).contributions
    assert (prefetch.name, len(prefetch.effects)) == ("forward_prefetch", 6)
    assert prefetch.change == pytest.approx(-0.03)
    # Each pair has a noise of some 8 percent, and yet they agree.
    assert prefetch.noise < 0.01 < 0.05 < prefetch.effects[0].noise
    assert prefetch.sure
    assert not any(other.sure for other in others)


def test_pairs_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    train(tmp_path, step_us=1000.0)
    train(tmp_path, PREFETCH, step_us=1500.0, host_us={"point": 1490.0})
    train(tmp_path, {"training.mixed_precision": "fp16"}, step_us=700.0, losses=[0.7, None])
    train(tmp_path, {"fsdp.forward_prefetch": 2}, step_us=900.0)
    train(tmp_path, {"fsdp.reshard_after_forward": False, "training.gradient_accumulation": 2}, step_us=900.0)
    effects = contributed(training_of(tmp_path))
    assert [(one.name, one.what) for one in effects.contributions] == [("forward_prefetch", f"0 {ARROW} 2")]
    assert effects.left_out == 3
    assert effects.only_left_out == ["mixed_precision"]
    assert effects.never_alone == ["reshard_after_forward", "gradient_accumulation"]


def test_the_host_may_be_the_limit(tmp_path: Path) -> None:
    train(tmp_path / "gpu", step_us=1000.0, host_us={"point": 960.0})
    train(tmp_path / "gpu", PREFETCH, step_us=1000.0, host_us={"point": 900.0})
    analysis = training_of(tmp_path / "gpu")
    assert [row.setting for row in analysis.rows if row.host_limits] == ["defaults"]
    # A step takes what it takes: nothing is left out.
    assert analysis.best.setting == "defaults"
    # On a CPU the host has no time.
    train(tmp_path / "cpu", host_us={}, peak_memory_gb=None)
    (row,) = training_of(tmp_path / "cpu").rows
    assert (row.host_us, row.host_limits, row.peak_memory_gb) == (None, False, None)


def test_the_best_of_those_that_compute_the_same(tmp_path: Path) -> None:
    train(tmp_path, step_us=1000.0)
    train(tmp_path, PREFETCH, step_us=950.0)
    train(tmp_path, {"training.batch_size": 8}, step_us=700.0, floor_us=400.0)
    assert training_of(tmp_path).best.setting == "forward_prefetch=1"
    train(tmp_path, {"training.mixed_precision": "fp16"}, step_us=400.0, floor_us=300.0)
    analysis = training_of(tmp_path)
    assert (analysis.best.setting, analysis.alike.setting) == ("mixed_precision=fp16", "forward_prefetch=1")


@pytest.mark.parametrize(
    ("losses", "suspicious"),
    [
        (([0.7, 0.6, 0.5], [0.7, 0.6, 0.5], [0.7, 0.6, 0.9]), ["fsdp_2"]),
        (([0.7, 0.6, 0.5], [0.7, 0.6, 0.5], [0.7, None, None]), ["fsdp_2"]),
        # What is next to nothing may differ.
        (([0.7, 0.1, 3.55e-7], [0.7, 0.1, 3.1e-7], [0.7, 0.1, 3.6e-7]), []),
    ],
)
def test_losses_that_cannot_be_right_are_told(
    tmp_path: Path, losses: tuple[list[float | None], ...], suspicious: list[str]
) -> None:
    for ahead, of_point in enumerate(losses):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, losses=of_point)
    # Of other data, so not compared.
    train(tmp_path, {"training.batch_size": 8}, losses=[9.0])
    assert [line.split(" ")[0] for line in warnings(training_of(tmp_path)) if "loss" in line] == suspicious


def test_what_does_not_train_is_not_the_best(tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path, PREFETCH, step_us=1100.0, losses=[0.7, None, None])
    analysis = training_of(tmp_path)
    assert analysis.best.setting == "defaults"
    assert row_of(analysis, "forward_prefetch=1").loss is None


def test_the_reference_among_equally_simple_ones_is_the_smallest_number(tmp_path: Path) -> None:
    for size in (128, 96, 16):
        train(tmp_path, {"training.batch_size": size})
    assert training_of(tmp_path).reference.setting == "batch_size=16"
