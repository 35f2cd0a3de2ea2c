"""Sweeps of operators and layers beside each other, with numbers that one can compute by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import space
from overlap_sweep.analysis.comparison.datasets import plain_setting, read_dataset
from overlap_sweep.analysis.comparison.matching import MARGIN, Match, verdict
from overlap_sweep.analysis.comparison.ratios import geometric_mean
from overlap_sweep.analysis.comparison.rows import point_rows
from overlap_sweep.analysis.comparison.sweeps import SweepComparison, compare_sweeps
from overlap_sweep.analysis.estimate import Estimate
from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import PassTimes
from tests.made_sweeps import trial, write_tuner
from tests.make_point import ENVIRONMENT, default_timing, make_point, operator_config, pass_times, variant

BOTH = "dgrad bulk_sm{0} + wgrad bulk_sm{0}"


def compared(*directories: Path, reference: str | None = None) -> SweepComparison:
    datasets = [read_dataset(directory.name, directory) for directory in directories]
    return compare_sweeps(datasets, reference or directories[0].name)


def bulk(directory: Path, num_sm: int, bwd: PassTimes, launch_bound: bool = False, **changed: Any) -> Path:
    point = operator_config(2, "fc1", "all", "bulk", num_sm=num_sm, **changed)
    return make_point("operator", directory, point, bwd=bwd, launch_bound=launch_bound)


def ring(directory: Path, time_us: float, default_us: float | None = None, **changed: Any) -> Path:
    default = None if default_us is None else default_timing(default_us)
    point = operator_config(2, "fc1", "fprop", "ring_exchange", aggregate=False, **changed)
    return make_point("operator", directory, point, fwd=pass_times(time_us, default=default))


def by_setting(found: SweepComparison) -> dict[str, Match]:
    return {match.ours.key.setting: match for match in found.matches}


def write(directory: Path, **times_us: float) -> Path:
    """fc1 backward, none 400, floor 300, and bulk by `sm4`, `sm8` ..."""
    for num_sm, time_us in times_us.items():
        bulk(directory, int(num_sm.removeprefix("sm")), pass_times(time_us, 400.0, 300.0))
    return directory


def old_and_new(directory: Path) -> tuple[Path, Path]:
    return write(directory / "old", sm4=320.0, sm8=360.0), write(directory / "new", sm4=400.0, sm8=310.0, sm16=330.0)


def test_ratios_verdicts_hidden_fractions_and_the_best_of_each_slot(tmp_path: Path) -> None:
    found = compared(*old_and_new(tmp_path))
    matches = by_setting(found)
    assert {name: (match.ratio, match.verdict) for name, match in matches.items()} == {
        "none": (1.0, "same"),
        BOTH.format(4): (pytest.approx(1.25), "slower"),
        BOTH.format(8): (pytest.approx(310 / 360), "faster"),
    }
    slower = matches[BOTH.format(4)]
    assert (slower.theirs.hidden_fraction, slower.ours.hidden_fraction) == (pytest.approx(0.8), pytest.approx(0.0))
    assert (slower.none_ratio, slower.floor_ratio) == (1.0, 1.0)
    assert [slot.slot for slot in found.slots] == ["fc1_dgrad", "fc1_wgrad"]
    (slot, _) = found.slots
    assert (slot.reference_setting, slot.setting, slot.changed) == ("bulk_sm4", "bulk_sm8", True)
    assert (slot.ratio, slot.verdict) == (pytest.approx(310 / 320), "faster")
    # What keeping the old choice costs.
    assert (slot.reference_choice_us, slot.regret) == (pytest.approx(400.0), pytest.approx(400 / 310 - 1))
    back = compared(tmp_path / "old", tmp_path / "new", reference="new")
    assert back.slots[0].regret == pytest.approx(360 / 320 - 1)


def test_aggregates_are_geometric_means(tmp_path: Path) -> None:
    found = compared(*old_and_new(tmp_path))
    of_pass, whole = found.aggregates
    assert (of_pass.tp_size, of_pass.operator, of_pass.pass_name, of_pass.points) == (2, "fc1", "bwd", 3)
    assert (whole.tp_size, whole.operator, whole.pass_name) == (None, None, None)
    assert of_pass.counts == whole.counts == {"faster": 1, "slower": 1, "same": 1}
    assert of_pass.ratio == whole.ratio == pytest.approx((1.25 * 310 / 360) ** (1 / 3))
    assert of_pass.best_ratio == pytest.approx(310 / 320)
    old, new = found.totals
    assert (old.passes, old.best_us, old.none_us, old.floor_us) == (1, 320.0, 400.0, 300.0)
    assert (new.best_us, new.speedup, new.hidden_fraction) == (310.0, pytest.approx(400 / 310), pytest.approx(0.9))
    assert math.isnan(geometric_mean([]))
    assert geometric_mean([0.5, math.nan, 2.0]) == pytest.approx(1.0)


def test_what_is_only_in_one_is_named_with_its_fate(tmp_path: Path) -> None:
    old, new = old_and_new(tmp_path)
    make_point("operator", old, operator_config(2, "fc1", "all", "bulk", num_sm=16), status="failed", error="x")
    write(old, sm32=330.0)
    bulk(new, 32, pass_times(1.0, 400.0, 300.0), launch_bound=True)
    found = {(only.only_in, only.missing_in): only.names for only in compared(old, new).unmatched}
    assert found == {
        ("new", "old"): [f"TP=2 fc1 bwd {BOTH.format(16)} (failed)"],
        ("old", "new"): [f"TP=2 fc1 bwd {BOTH.format(32)} (launch-bound)"],
    }


def test_the_noise_of_both_and_the_margin_make_ties(tmp_path: Path) -> None:
    # Spread 10: an interquartile range of 20 of five samples, a notch of 1.57 x 20 / sqrt(5) = 14 for each.
    for name, time_us in (("old", 320.0), ("inside", 335.0), ("outside", 380.0)):
        bulk(tmp_path / name, 4, pass_times(time_us, 400.0, 300.0, spread_us=10.0))
    found = compared(tmp_path / "old", tmp_path / "inside", tmp_path / "outside")
    verdicts = {m.dataset: m.verdict for m in found.matches if m.ours.key.setting == BOTH.format(4)}
    assert verdicts == {"inside": "same", "outside": "slower"}
    without_noise = Estimate(100.0, 0.0, 5)
    times_us = (100.0 * (1 + MARGIN), 100.0 * (1 + MARGIN) + 0.1, 100.0 * (1 - MARGIN) - 0.1)
    assert [verdict(Estimate(us, 0.0, 5), without_noise) for us in times_us] == ["same", "slower", "faster"]


def test_repetitions_are_pooled_through_the_none_beside_them(tmp_path: Path) -> None:
    """Twice as slow a machine in the second repetition is drift, and cancels."""
    for name, repetition, factor in (("old", 0, 1.0), ("old", 1, 2.0), ("new", 0, 1.5)):
        times = pass_times(320.0 * factor, 400.0 * factor, 300.0 * factor)
        bulk(tmp_path / name, 4, times, repetition=repetition)
    match = by_setting(compared(tmp_path / "old", tmp_path / "new"))[BOTH.format(4)]
    assert (match.theirs.time.time_us, match.ratio) == (pytest.approx(480.0), pytest.approx(1.0))


def test_a_machine_that_is_slower_as_a_whole_shows_in_none_and_floor(tmp_path: Path) -> None:
    write(tmp_path / "old", sm4=320.0, sm8=360.0)
    for num_sm, time_us in ((4, 640.0), (8, 720.0)):
        bulk(tmp_path / "new", num_sm, pass_times(time_us, 800.0, 600.0))
    (_, whole) = compared(tmp_path / "old", tmp_path / "new").aggregates
    assert [round(r, 9) for r in (whole.ratio, whole.none_ratio, whole.floor_ratio, whole.best_ratio)] == [2.0] * 4


def test_backends_and_devices_are_compared(tmp_path: Path) -> None:
    """torch records neither the cluster size nor that aggregate and num_splits are as ever."""
    te_ring = {"aggregate": False, "num_sm": 1, "use_ce": True, "cga_size": 1}
    for name, backend, gpu, of_ring, of_pipeline in (
        ("te", "transformer_engine", "NVIDIA H200", te_ring, {}),
        ("torch", "torch", "NVIDIA H100", {}, {"num_splits": 4}),
    ):
        for point in (
            operator_config(2, "fc1", "fprop", "ring_exchange", backend=backend, **of_ring),
            operator_config(2, "fc2", "fprop", "pipeline", backend=backend, num_sm=8, **of_pipeline),
        ):
            environment = {**ENVIRONMENT, "gpu": gpu}
            make_point("operator", tmp_path / name, point, fwd=pass_times(80.0), environment=environment)
    found = compared(tmp_path / "te", tmp_path / "torch")
    assert found.compared == {
        "backend": {"te": "transformer_engine", "torch": "torch"},
        "device": {"te": "NVIDIA H200", "torch": "NVIDIA H100"},
    }
    assert set(by_setting(found)) == {"none", "ring_agg0", "pipeline_sm8_split4"}
    assert found.unmatched == []
    assert [difference.name for difference in found.environment] == ["gpu"]


def test_of_several_backends_in_one_each_is_matched_with_itself(tmp_path: Path) -> None:
    for name in ("old", "new"):
        for backend, time_us in (("torch", 80.0), ("transformer_engine", 60.0)):
            ring(tmp_path / name, time_us, backend=backend)
    found = compared(tmp_path / "old", tmp_path / "new")
    assert found.compared == {}
    assert [(m.ours.key.backend, m.theirs.key.backend, m.ratio) for m in found.matches] == [
        (backend, backend, 1.0) for backend in ("torch", "torch", "transformer_engine", "transformer_engine")
    ]


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [("precision", "bf16", "fp8_delayed"), ("tokens", 2048, 8192), ("model", "llama3_8b", "llama3_70b")],
)
def test_what_differs_throughout_is_compared_when_nothing_matches(
    tmp_path: Path, field: str, value: Any, other: Any
) -> None:
    bulk(tmp_path / "old", 4, pass_times(320.0, 400.0, 300.0), **{field: value})
    bulk(tmp_path / "new", 4, pass_times(160.0, 200.0, 150.0), **{field: other})
    found = compared(tmp_path / "old", tmp_path / "new")
    assert found.compared == {field: {"old": value, "new": other}}
    assert by_setting(found)[BOTH.format(4)].ratio == pytest.approx(0.5)


def test_single_points_of_different_settings_are_compared(tmp_path: Path) -> None:
    found = compared(write(tmp_path / "sm4", sm4=320.0), write(tmp_path / "sm8", sm8=360.0))
    assert found.compared == {"setting": {"sm4": BOTH.format(4), "sm8": BOTH.format(8)}}
    assert [(m.theirs.key.setting, m.ours.key.setting, round(m.ratio, 3)) for m in found.matches] == [
        ("none", "none", 1.0),
        (BOTH.format(4), BOTH.format(8), 1.125),
    ]
    (row,) = [row for row in point_rows(found) if row["setting"] != "none"]
    assert (row["reference_setting"], row["setting"]) == (BOTH.format(4), BOTH.format(8))


def test_nothing_in_common_is_an_error_that_says_what_each_has(tmp_path: Path) -> None:
    write(tmp_path / "old", sm4=320.0)
    make_point("operator", tmp_path / "new", operator_config(2, "fc2", "fprop", "ring_exchange"), fwd=pass_times(80.0))
    with pytest.raises(UserError, match=r"old has operator fc1, .*new has operator fc2, .*points in common\.$"):
        compared(tmp_path / "old", tmp_path / "new")


def test_several_cases_are_told_apart(tmp_path: Path) -> None:
    for name, factor in (("old", 1.0), ("new", 2.0)):
        for model, time_us in (("llama3_8b", 320.0 * factor), ("llama3_70b", 1000.0)):
            bulk(tmp_path / name, 4, pass_times(time_us, 2000.0, 300.0), model=model)
    bulk(tmp_path / "new", 8, pass_times(320.0, 2000.0, 300.0), model="llama3_70b")
    found = compared(tmp_path / "old", tmp_path / "new")
    assert found.telling == ["model"]
    ratios = [(aggregate.case, round(aggregate.ratio**2, 6)) for aggregate in found.aggregates[:2]]
    assert ratios == [("llama3_70b", 1.0), ("llama3_8b", 2.0)]
    assert found.unmatched[0].names == [f"llama3_70b TP=2 fc1 bwd {BOTH.format(8)}"]


def test_configuration_that_changed(tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        bulk(tmp_path / name, 4, pass_times(320.0, 400.0, 300.0), workload={"seed": seed})
    (difference,) = compared(tmp_path / "old", tmp_path / "new").configuration
    assert (difference.name, difference.values) == ("workload.seed", {"old": [0], "new": [1]})


def test_the_default_is_compared_too(tmp_path: Path) -> None:
    for name, default_us in (("old", 90.0), ("new", 99.0)):
        ring(tmp_path / name, 80.0, default_us)
    assert by_setting(compared(tmp_path / "old", tmp_path / "new"))["default"].ratio == pytest.approx(1.1)


def test_layers_match_by_the_names_of_their_variants(tmp_path: Path) -> None:
    for name, none_us, file_us in (("old", 60.0, 57.0), ("new", 30.0, 27.0)):
        times_us = {"none": none_us, "floor": none_us - 6, f"file:/{name}/best.yaml": file_us}
        variants = {variant_name: variant([time_us] * 6) for variant_name, time_us in times_us.items()}
        make_point("layer", tmp_path / name, variants=variants)
    found = compared(tmp_path / "old", tmp_path / "new")
    matches = by_setting(found)
    assert set(matches) == {"none", "floor", "file:best.yaml"}
    best = matches["file:best.yaml"]
    assert (best.ratio, best.ours.key.operator) == (pytest.approx(27 / 57), "transformer_layer")
    assert [of.hidden_fraction for of in (best.theirs, best.ours)] == [pytest.approx(0.5)] * 2
    assert found.slots == []
    assert math.isnan(found.aggregates[-1].best_ratio)


def test_what_a_tuner_proved_matches_by_its_labels(tmp_path: Path) -> None:
    for name, tuned_us in (("old", 54.0), ("new", 45.0)):
        file = f"file:/{name}/tuned.yaml"
        variants = {"none": variant([60.0] * 6), "default": variant([58.0] * 6), file: variant([tuned_us] * 6)}
        make_point("layer", tmp_path / name, variants=variants, name="proof")
        names = {"none": "none", "default": "default", "tuned": file}
        write_tuner(tmp_path / name, proofs=[trial("proof", names)])
    matches = by_setting(compared(tmp_path / "old", tmp_path / "new"))
    assert matches["tuned"].ratio == pytest.approx(45 / 54)
    assert set(matches) == {"none", "default", "tuned"}


@pytest.mark.parametrize("slot", ["fc1_fprop", "fc2_fprop", "fc1_dgrad"])
def test_settings_that_mean_the_same_have_one_name(slot: str) -> None:
    of_ring = {"method": "ring_exchange", "num_sm": 3, "use_ce": True}
    plain = plain_setting(slot, of_ring)
    assert "num_sm" not in plain
    assert space.brief_name(plain) == ("ring_agg0" if slot == "fc1_fprop" else "ring")
    assert plain_setting(slot, {**of_ring, "use_ce": False})["num_sm"] == 3
