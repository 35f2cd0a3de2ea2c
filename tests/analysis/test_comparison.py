"""Sweeps beside each other, with numbers that one can compute by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import space
from overlap_sweep.analysis.comparison.datasets import plain_setting, read_dataset
from overlap_sweep.analysis.comparison.matching import MARGIN, Match, verdict
from overlap_sweep.analysis.comparison.ratios import geometric_mean
from overlap_sweep.analysis.comparison.rows import POINT_COLUMNS, SLOT_COLUMNS, point_rows, slot_rows
from overlap_sweep.analysis.comparison.summary import summary
from overlap_sweep.analysis.comparison.sweeps import SweepComparison, compare_sweeps
from overlap_sweep.analysis.estimate import Estimate
from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import PassTimes
from tests.made_sweeps import trial, write_tuner
from tests.make_point import ENVIRONMENT, default_timing, layer_config, make_point, operator_config, pass_times, variant

RING = {"method": "ring_exchange", "aggregate": False}


def compared(*directories: Path, reference: str | None = None) -> SweepComparison:
    datasets = [read_dataset(directory.name, directory) for directory in directories]
    return compare_sweeps(datasets, reference or directories[0].name)


def bulk(directory: Path, num_sm: int, bwd: PassTimes, **changed: Any) -> Path:
    return make_point(
        "operator", directory, operator_config(2, "fc1", "all", "bulk", num_sm=num_sm, **changed), bwd=bwd
    )


def by_setting(found: SweepComparison) -> dict[str, Match]:
    return {match.ours.key.setting: match for match in found.matches}


def write_old(directory: Path) -> Path:
    """fc1 backward, none 400, floor 300: bulk sm4 320, sm8 360."""
    for num_sm, time_us in ((4, 320.0), (8, 360.0)):
        bulk(directory, num_sm, pass_times(time_us, 400.0, 300.0))
    return directory


def write_new(directory: Path) -> Path:
    """none 400, floor 300: bulk sm4 400, sm8 310, sm16 330."""
    for num_sm, time_us in ((4, 400.0), (8, 310.0), (16, 330.0)):
        bulk(directory, num_sm, pass_times(time_us, 400.0, 300.0))
    return directory


BOTH = "dgrad bulk_sm{0} + wgrad bulk_sm{0}"


def test_ratios_verdicts_and_hidden_fractions(tmp_path: Path) -> None:
    found = compared(write_old(tmp_path / "old"), write_new(tmp_path / "new"))
    matches = by_setting(found)
    assert set(matches) == {"none", BOTH.format(4), BOTH.format(8)}
    assert {name: (match.ratio, match.verdict) for name, match in matches.items()} == {
        "none": (1.0, "same"),
        BOTH.format(4): (pytest.approx(1.25), "slower"),
        BOTH.format(8): (pytest.approx(310 / 360), "faster"),
    }
    slower = matches[BOTH.format(4)]
    assert (slower.theirs.hidden_fraction, slower.ours.hidden_fraction) == (pytest.approx(0.8), pytest.approx(0.0))
    assert (slower.none_ratio, slower.floor_ratio) == (1.0, 1.0)
    assert {key: match.dataset for key, match in matches.items()} == dict.fromkeys(matches, "new")


def test_the_best_of_each_slot_and_what_keeping_the_old_choice_costs(tmp_path: Path) -> None:
    found = compared(write_old(tmp_path / "old"), write_new(tmp_path / "new"))
    assert [slot.slot for slot in found.slots] == ["fc1_dgrad", "fc1_wgrad"]
    (slot, _) = found.slots
    assert (slot.reference_setting, slot.setting, slot.changed) == ("bulk_sm4", "bulk_sm8", True)
    assert (slot.ratio, slot.verdict) == (pytest.approx(310 / 320), "faster")
    assert (slot.reference_choice_us, slot.regret) == (pytest.approx(400.0), pytest.approx(400 / 310 - 1))
    back = compared(tmp_path / "old", tmp_path / "new", reference="new")
    assert back.slots[0].regret == pytest.approx(360 / 320 - 1)


def test_aggregates_are_geometric_means(tmp_path: Path) -> None:
    found = compared(write_old(tmp_path / "old"), write_new(tmp_path / "new"))
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
    write_new(tmp_path / "new")
    write_old(tmp_path / "old")
    failed = operator_config(2, "fc1", "all", "bulk", num_sm=16)
    make_point("operator", tmp_path / "old", failed, status="failed", error="out of memory")
    (missing,) = compared(tmp_path / "old", tmp_path / "new").unmatched
    assert (missing.only_in, missing.missing_in) == ("new", "old")
    assert missing.names == [f"TP=2 fc1 bwd {BOTH.format(16)} (failed)"]


def test_the_noise_of_both_and_the_margin_make_ties(tmp_path: Path) -> None:
    # Spread 10: an interquartile range of 20 of five samples, a notch of 1.57 x 20 / sqrt(5) = 14 for each.
    for name, time_us in (("old", 320.0), ("inside", 335.0), ("outside", 380.0)):
        bulk(tmp_path / name, 4, pass_times(time_us, 400.0, 300.0, spread_us=10.0))
    found = compared(tmp_path / "old", tmp_path / "inside", tmp_path / "outside")
    verdicts = {(m.dataset, m.ours.key.setting): m.verdict for m in found.matches}
    assert verdicts["inside", BOTH.format(4)] == "same"
    assert verdicts["outside", BOTH.format(4)] == "slower"
    without_noise = Estimate(100.0, 0.0, 5)
    assert verdict(Estimate(100.0 * (1 + MARGIN), 0.0, 5), without_noise) == "same"
    assert verdict(Estimate(100.0 * (1 + MARGIN) + 0.1, 0.0, 5), without_noise) == "slower"
    assert verdict(Estimate(100.0 * (1 - MARGIN) - 0.1, 0.0, 5), without_noise) == "faster"


def test_repetitions_are_pooled_through_the_none_beside_them(tmp_path: Path) -> None:
    """Twice as slow a machine in the second repetition is drift, and cancels."""
    bulk(tmp_path / "old", 4, pass_times(320.0, 400.0, 300.0))
    bulk(tmp_path / "old", 4, pass_times(640.0, 800.0, 600.0), repetition=1)
    bulk(tmp_path / "new", 4, pass_times(480.0, 600.0, 450.0))
    match = by_setting(compared(tmp_path / "old", tmp_path / "new"))[BOTH.format(4)]
    assert (match.theirs.time.time_us, match.ratio) == (pytest.approx(480.0), pytest.approx(1.0))
    assert (len(match.theirs.points), len(match.ours.points)) == (2, 1)


def test_a_machine_that_is_slower_as_a_whole_shows_in_none_and_floor(tmp_path: Path) -> None:
    write_old(tmp_path / "old")
    for num_sm, time_us in ((4, 640.0), (8, 720.0)):
        bulk(tmp_path / "new", num_sm, pass_times(time_us, 800.0, 600.0))
    (_, whole) = compared(tmp_path / "old", tmp_path / "new").aggregates
    assert [round(r, 9) for r in (whole.ratio, whole.none_ratio, whole.floor_ratio, whole.best_ratio)] == [2.0] * 4


def test_backends_and_devices_are_compared(tmp_path: Path) -> None:
    """torch records neither the cluster size nor that aggregate and num_splits are as ever."""
    for name, backend, gpu, ring, pipeline in (
        ("te", "transformer_engine", "NVIDIA H200", {**RING, "num_sm": 1, "use_ce": True, "cga_size": 1}, {}),
        ("torch", "torch", "NVIDIA H100", {"method": "ring_exchange"}, {"num_splits": 4}),
    ):
        environment = {**ENVIRONMENT, "gpu": gpu}
        for operator, setting in (("fc1", ring), ("fc2", {"method": "pipeline", "num_sm": 8, **pipeline})):
            setting = dict(setting)
            point = operator_config(2, operator, "fprop", setting.pop("method"), backend=backend, **setting)
            directory = make_point("operator", tmp_path / name, point, fwd=pass_times(80.0))
            rewrite(directory, environment=environment)
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
            point = operator_config(2, "fc1", "fprop", "ring_exchange", aggregate=False, backend=backend)
            make_point("operator", tmp_path / name, point, fwd=pass_times(time_us))
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
    one = bulk(tmp_path / "one", 4, pass_times(320.0, 400.0, 300.0))
    other = bulk(tmp_path / "other", 8, pass_times(360.0, 400.0, 300.0))
    found = compare_sweeps([read_dataset("sm4", one), read_dataset("sm8", other)], "sm4")
    assert found.compared == {"setting": {"sm4": BOTH.format(4), "sm8": BOTH.format(8)}}
    assert [(m.theirs.key.setting, m.ours.key.setting, round(m.ratio, 3)) for m in found.matches] == [
        ("none", "none", 1.0),
        (BOTH.format(4), BOTH.format(8), 1.125),
    ]
    (row,) = [row for row in point_rows(found) if row["setting"] != "none"]
    assert (row["reference_setting"], row["setting"]) == (BOTH.format(4), BOTH.format(8))


def test_nothing_in_common_is_an_error_that_says_what_each_has(tmp_path: Path) -> None:
    bulk(tmp_path / "old", 4, pass_times(320.0, 400.0, 300.0))
    ring = operator_config(2, "fc2", "fprop", "ring_exchange")
    make_point("operator", tmp_path / "new", ring, fwd=pass_times(80.0))
    with pytest.raises(UserError, match=r"old has operator fc1, .*new has operator fc2, .*points in common\.$"):
        compared(tmp_path / "old", tmp_path / "new")


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "fprop", "bulk"), status="skipped", error="bulk does not fit"
    )
    with pytest.raises(UserError, match=r"no point with times to compare \(1 skipped\)"):
        read_dataset("a", tmp_path)


def test_three_datasets_are_each_compared_with_the_reference(tmp_path: Path) -> None:
    for name, time_us in (("a", 300.0), ("b", 330.0), ("c", 360.0)):
        bulk(tmp_path / name, 4, pass_times(time_us, 400.0, 200.0))
    found = compared(*(tmp_path / name for name in "abc"), reference="b")
    assert found.candidates == ["a", "c"]
    ratios = {match.dataset: match.ratio for match in found.matches if match.ours.key.setting != "none"}
    assert ratios == {"a": pytest.approx(300 / 330), "c": pytest.approx(360 / 330)}
    assert [aggregate.dataset for aggregate in found.aggregates] == ["a", "a", "c", "c"]


def test_several_cases_are_told_apart(tmp_path: Path) -> None:
    for name, factor in (("old", 1.0), ("new", 2.0)):
        for model, time_us in (("llama3_8b", 320.0), ("llama3_70b", 1000.0)):
            slower = factor if model == "llama3_8b" else 1.0
            bulk(tmp_path / name, 4, pass_times(time_us * slower, 2000.0, 300.0), model=model)
    bulk(tmp_path / "new", 8, pass_times(320.0, 2000.0, 300.0), model="llama3_70b")
    found = compared(tmp_path / "old", tmp_path / "new")
    assert found.telling == ["model"]
    assert [(aggregate.case, round(aggregate.ratio**2, 6)) for aggregate in found.aggregates[:2]] == [
        ("llama3_70b", 1.0),
        ("llama3_8b", 2.0),
    ]
    assert found.unmatched[0].names == [f"llama3_70b TP=2 fc1 bwd {BOTH.format(8)}"]


def test_environment_and_configuration_that_changed(tmp_path: Path) -> None:
    write_old(tmp_path / "old")
    for directory in write_old(tmp_path / "new").iterdir():
        packages = {"torch": "2.14.0"}
        point = operator_config(2, "fc1", "all", "bulk", num_sm=4, workload={"seed": 1})
        rewrite(directory, environment={**ENVIRONMENT, "driver": "590.2", "packages": packages}, point=point)
    found = compared(tmp_path / "old", tmp_path / "new")
    assert {difference.name: difference.values for difference in found.environment} == {
        "driver": {"old": ["580.1"], "new": ["590.2"]},
        "packages.torch": {"old": ["2.13.0"], "new": ["2.14.0"]},
    }
    assert {difference.name: difference.values for difference in found.configuration} == {
        "workload.seed": {"old": [0], "new": [1]}
    }


def test_the_default_is_compared_too(tmp_path: Path) -> None:
    ring = operator_config(2, "fc1", "fprop", "ring_exchange", aggregate=False)
    for name, default_us in (("old", 90.0), ("new", 99.0)):
        make_point("operator", tmp_path / name, ring, fwd=pass_times(80.0, default=default_timing(default_us)))
    assert by_setting(compared(tmp_path / "old", tmp_path / "new"))["default"].ratio == pytest.approx(1.1)


def test_launch_bound_points_have_no_say(tmp_path: Path) -> None:
    write_old(tmp_path / "old")
    write_old(tmp_path / "new")
    point = operator_config(2, "fc1", "all", "bulk", num_sm=16)
    make_point("operator", tmp_path / "old", point, bwd=pass_times(330.0, 400.0, 300.0))
    make_point("operator", tmp_path / "new", point, bwd=pass_times(1.0, 400.0, 300.0), launch_bound=True)
    found = compared(tmp_path / "old", tmp_path / "new")
    assert found.unmatched[0].names == [f"TP=2 fc1 bwd {BOTH.format(16)} (launch-bound)"]
    assert found.aggregates[-1].ratio == 1.0


def test_layers_match_by_the_names_of_their_variants(tmp_path: Path) -> None:
    for name, none_us, file_us in (("old", 60.0, 57.0), ("new", 30.0, 27.0)):
        variants = {
            "none": variant([none_us] * 6),
            "floor": variant([none_us - 6] * 6),
            f"file:/{name}/best.yaml": variant([file_us] * 6),
        }
        make_point("layer", tmp_path / name, variants=variants)
    found = compared(tmp_path / "old", tmp_path / "new")
    matches = by_setting(found)
    assert set(matches) == {"none", "floor", "file:best.yaml"}
    assert matches["file:best.yaml"].ratio == pytest.approx(27 / 57)
    assert matches["file:best.yaml"].ours.key.operator == "transformer_layer"
    assert (matches["file:best.yaml"].theirs.hidden_fraction, matches["file:best.yaml"].ours.hidden_fraction) == (
        pytest.approx(0.5),
        pytest.approx(0.5),
    )
    assert found.slots == []
    assert math.isnan(found.aggregates[-1].best_ratio)


def test_layers_of_different_kinds_do_not_match(tmp_path: Path) -> None:
    variants = {"none": variant([60.0] * 6), "default": variant([57.0] * 6)}
    make_point("layer", tmp_path / "old", variants=variants)
    make_point("layer", tmp_path / "new", variants=variants)
    make_point("layer", tmp_path / "new", layer_config(num_replicas=2), variants=variants, name="replicas")
    found = compared(tmp_path / "old", tmp_path / "new")
    assert {match.ours.key.operator for match in found.matches} == {"transformer_layer"}
    assert found.unmatched[0].names == [f"TP=4 transformer_layer x2 all {name}" for name in ("none", "default")]


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


def test_what_cannot_be_read_is_a_problem_and_the_rest_is_compared(tmp_path: Path) -> None:
    write_old(tmp_path / "old")
    write_new(tmp_path / "new")
    (tmp_path / "new" / "cut").mkdir()
    (tmp_path / "new" / "cut" / "result.json").write_text("{")
    found = compared(tmp_path / "old", tmp_path / "new")
    assert len(found.matches) == 3
    assert ["cut/result.json" in problem for problem in found.problems] == [True]


def test_tables_have_every_column_and_its_type(tmp_path: Path) -> None:
    found = compared(write_old(tmp_path / "old"), write_new(tmp_path / "new"))
    points = to_frame(point_rows(found), POINT_COLUMNS)
    slots = to_frame(slot_rows(found), SLOT_COLUMNS)
    assert {name: str(kind) for name, kind in points.dtypes.items()} == POINT_COLUMNS
    assert {name: str(kind) for name, kind in slots.dtypes.items()} == SLOT_COLUMNS
    row = points[points["setting"] == BOTH.format(4)].iloc[0]
    assert (row["tp_size"], row["operator"], row["pass"], row["dataset"], row["reference"]) == (
        *(2, "fc1", "bwd", "new", "old"),
    )
    assert (row["time_us"], row["reference_us"], row["ratio"], row["verdict"]) == (400.0, 320.0, 1.25, "slower")
    assert slots.iloc[0]["regret"] == pytest.approx(400 / 310 - 1)


def test_the_summary_has_each_dataset_and_the_ratios(tmp_path: Path) -> None:
    told = summary(compared(write_old(tmp_path / "old"), write_new(tmp_path / "new")))
    assert told["reference"] == "old"
    assert told["datasets"]["new"]["ratios"] == {"best": pytest.approx(310 / 320), "none": 1.0, "floor": 1.0}
    assert told["datasets"]["new"]["points"] == 3
    assert told["aggregates"][-1]["slower"] == 1


@pytest.mark.parametrize("slot", ["fc1_fprop", "fc2_fprop", "fc1_dgrad"])
def test_settings_that_mean_the_same_have_one_name(slot: str) -> None:
    ring = {"method": "ring_exchange", "num_sm": 3, "use_ce": True}
    plain = plain_setting(slot, ring)
    assert "num_sm" not in plain
    assert space.brief_name(plain) == ("ring_agg0" if slot == "fc1_fprop" else "ring")
    assert plain_setting(slot, {**ring, "use_ce": False})["num_sm"] == 3


def rewrite(directory: Path, **fields: Any) -> None:
    """Change what result.json says."""
    from msgspec import structs

    from overlap_sweep.run_directory import read_result, write_result

    write_result(directory, structs.replace(read_result(directory / "result.json"), **fields))
