"""Sweeps beside each other: what matches and what does not. Ratios, verdicts, aggregates and the best of each slot:
comparison and made/compared among the golden files."""

import math
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.compare.sweep_report import POINTS
from overlap_sweep.compare.sweeps import Match, SweepComparison, compare_sweeps, read_dataset
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.verdict import MARGIN, mean_ratio, verdict
from overlap_sweep.workloads.operator.result import PassTimes
from overlap_sweep.workloads.operator.section import plain_setting
from tests.made_sweeps import trial, write_tuner
from tests.make_point import (
    ENVIRONMENT,
    baselines,
    implementation,
    kernel_config,
    make_point,
    operator_config,
    pass_times,
    variant,
)

BOTH = "dgrad bulk_sm{0} + wgrad bulk_sm{0}"
AG_GEMM = "ag_gemm n=57344 k=8192"


def compared(*directories: Path) -> SweepComparison:
    """With the first as the reference."""
    datasets = [read_dataset(directory.name, directory) for directory in directories]
    return compare_sweeps(datasets, directories[0].name)


def bulk(directory: Path, num_sm: int, bwd: PassTimes, launch_bound: bool = False, **changed: Any) -> Path:
    point = operator_config(2, "fc1", "all", "bulk", num_sm=num_sm, **changed)
    return make_point("operator", directory, point, bwd=bwd, launch_bound=launch_bound)


def by_setting(found: SweepComparison) -> dict[str, Match]:
    return {match.ours.key.setting: match for match in found.matches}


def write(directory: Path, **times_us: float) -> Path:
    """fc1 backward, none 400, floor 300, and bulk by `sm4`, `sm8` ..."""
    for num_sm, time_us in times_us.items():
        bulk(directory, int(num_sm.removeprefix("sm")), pass_times(time_us, 400.0, 300.0))
    return directory


def test_what_is_only_in_one_is_named(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", sm4=320.0, sm32=330.0), write(tmp_path / "new", sm4=400.0, sm16=330.0)
    make_point("operator", old, operator_config(method="bulk", num_sm=16), status="failed", error="x")
    bulk(new, 32, pass_times(1.0, 400.0, 300.0), launch_bound=True)
    found = {(only.only_in, only.missing_in): only.points for only in compared(old, new).unmatched}
    assert found == {
        ("new", "old"): [f"TP=2 fc1 bwd {BOTH.format(16)}"],
        ("old", "new"): [f"TP=2 fc1 bwd {BOTH.format(32)}"],
    }


@pytest.mark.parametrize(
    ("time_us", "noise_us", "expected"),
    [
        (100.0 * (1 + MARGIN), 0.0, "same"),
        (100.0 * (1 + MARGIN) + 0.1, 0.0, "slower"),
        (100.0 * (1 - MARGIN) - 0.1, 0.0, "faster"),
        (110.0, 8.0, "same"),
        (110.0, 7.0, "slower"),
    ],
)
def test_the_noise_of_both_and_the_margin_make_ties(time_us: float, noise_us: float, expected: str) -> None:
    assert verdict(Estimate(time_us, noise_us, 5), Estimate(100.0, noise_us, 5)) == expected


def test_geometric_means_leave_out_what_is_unknown() -> None:
    assert math.isnan(mean_ratio([]))
    assert mean_ratio([0.5, math.nan, 2.0]) == pytest.approx(1.0)


def test_repetitions_are_pooled_through_the_none_beside_them(tmp_path: Path) -> None:
    """Twice as slow a machine in the second repetition is drift, and cancels."""
    for name, repetition, factor in (("old", 0, 1.0), ("old", 1, 2.0), ("new", 0, 1.5)):
        times = pass_times(320.0 * factor, 400.0 * factor, 300.0 * factor)
        bulk(tmp_path / name, 4, times, repetition=repetition)
    match = by_setting(compared(tmp_path / "old", tmp_path / "new"))[BOTH.format(4)]
    assert (match.theirs.time.time_us, match.ratio) == (pytest.approx(480.0), pytest.approx(1.0))


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
        "backend": {"te": ["transformer_engine"], "torch": ["torch"]},
        "device": {"te": ["NVIDIA H200"], "torch": ["NVIDIA H100"]},
    }
    assert set(by_setting(found)) == {"none", "ring_agg0", "pipeline_sm8_split4"}
    assert found.unmatched == []
    assert list(found.environment) == ["gpu"]


def test_of_several_backends_in_one_each_is_matched_with_itself(tmp_path: Path) -> None:
    for name in ("old", "new"):
        for backend, time_us in (("torch", 80.0), ("transformer_engine", 60.0)):
            bulk(tmp_path / name, 4, pass_times(time_us), backend=backend)
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
    assert found.compared == {field: {"old": [value], "new": [other]}}
    assert by_setting(found)[BOTH.format(4)].ratio == pytest.approx(0.5)


def test_single_points_of_different_settings_are_compared(tmp_path: Path) -> None:
    found = compared(write(tmp_path / "sm4", sm4=320.0), write(tmp_path / "sm8", sm8=360.0))
    assert found.compared == {"setting": {"sm4": [BOTH.format(4)], "sm8": [BOTH.format(8)]}}
    assert [(m.theirs.key.setting, m.ours.key.setting, round(m.ratio, 3)) for m in found.matches] == [
        ("none", "none", 1.0),
        (BOTH.format(4), BOTH.format(8), 1.125),
    ]
    (row,) = [row for row in POINTS.records(found.matches) if row["setting"] != "none"]
    assert (row["reference_setting"], row["setting"]) == (BOTH.format(4), BOTH.format(8))


def test_nothing_in_common_is_an_error_that_says_what_each_has(tmp_path: Path) -> None:
    write(tmp_path / "old", sm4=320.0)
    make_point("operator", tmp_path / "new", operator_config(2, "fc2", "fprop", "ring_exchange"), fwd=pass_times(80.0))
    with pytest.raises(UserError, match=r"old has operator fc1, .*new has operator fc2, .*same points\.$"):
        compared(tmp_path / "old", tmp_path / "new")


def test_several_cases_are_told_apart(tmp_path: Path) -> None:
    for name, factor in (("old", 1.0), ("new", 2.0)):
        for model, time_us in (("llama3_8b", 320.0 * factor), ("llama3_70b", 1000.0)):
            bulk(tmp_path / name, 4, pass_times(time_us, 2000.0, 300.0), model=model)
    bulk(tmp_path / "new", 8, pass_times(320.0, 2000.0, 300.0), model="llama3_70b")
    found = compared(tmp_path / "old", tmp_path / "new")
    assert found.case_fields == ["model"]
    ratios = [(one.key.model, round(one.ratio**2, 6)) for one in found.aggregates if one.key]
    assert ratios == [("llama3_70b", 1.0), ("llama3_8b", 2.0)]
    assert found.unmatched[0].points == [f"llama3_70b TP=2 fc1 bwd {BOTH.format(8)}"]


def test_configuration_that_changed(tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        bulk(tmp_path / name, 4, pass_times(320.0, 400.0, 300.0), workload={"seed": seed})
    found = compared(tmp_path / "old", tmp_path / "new")
    assert found.configuration == {"workload.seed": {"old": [0], "new": [1]}}


def test_layers_have_hidden_fractions_beside_their_floor(tmp_path: Path) -> None:
    for name, none_us, default_us in (("old", 60.0, 57.0), ("new", 30.0, 27.0)):
        times_us = {"none": none_us, "floor": none_us - 6, "default": default_us}
        make_point("layer", tmp_path / name, variants={of: variant([time_us] * 6) for of, time_us in times_us.items()})
    default = by_setting(compared(tmp_path / "old", tmp_path / "new"))["default"]
    assert [of.hidden_fraction for of in (default.theirs, default.ours)] == [pytest.approx(0.5)] * 2


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


def ring(directory: Path, time_us: float, **changes: Any) -> None:
    make_point("kernel", directory, kernel_config(**changes), implementations={"ring": implementation(time_us)})


def test_the_same_implementations_match(tmp_path: Path) -> None:
    measured = {"ring": implementation(150.0), "gone": implementation(160.0)}
    make_point("kernel", tmp_path / "old", implementations=measured)
    ring(tmp_path / "old", 120.0, backend="symm_mem")
    make_point("kernel", tmp_path / "new", implementations=baselines(220.0) | {"ring": implementation(165.0)})
    # The name of a model is not what makes a kernel.
    ring(tmp_path / "new", 90.0, backend="symm_mem", operator=None)
    ring(tmp_path / "new", 150.0, m=2048)
    found = compared(tmp_path / "old", tmp_path / "new")
    ratios = {(match.ours.key.backend, match.ours.key.setting): match.ratio for match in found.matches}
    # Baselines, which both backends measured, are no points of their own.
    assert ratios == {("torch", "ring"): pytest.approx(1.1), ("symm_mem", "ring"): 0.75}
    assert found.configuration == {}
    assert {one.only_in: one.points for one in found.unmatched} == {
        "old": [f"torch 1024 tokens TP=4 {AG_GEMM} all gone"],
        "new": [f"torch 2048 tokens TP=4 {AG_GEMM} all ring"],
    }
    row = next(row for row in POINTS.records(found.matches) if row["backend"] == "torch" and row["setting"] == "ring")
    assert row.keys() == POINTS.types.keys()
    assert (row["operator"], row["tokens"], row["verdict"]) == (AG_GEMM, 1024, "slower")
    assert (row["none_us"], row["floor_us"], row["none_ratio"]) == (220.0, 100.0, pytest.approx(1.1))
    assert row["hidden_fraction"] == pytest.approx(55 / 120)


def test_operators_beside_kernels_match_operators(tmp_path: Path) -> None:
    for name, time_us in (("old", 320.0), ("new", 400.0)):
        bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
        make_point("operator", tmp_path / name, bulk, bwd=pass_times(time_us, 400.0, 300.0))
        ring(tmp_path / name, 150.0)
    found = compared(tmp_path / "old", tmp_path / "new")
    ratios = {(match.ours.key.operator, match.ours.key.setting): match.ratio for match in found.matches}
    assert ratios["fc1", "dgrad bulk_sm4 + wgrad bulk_sm4"] == 1.25
    assert ratios[AG_GEMM, "ring"] == 1.0
    assert "None" not in str([match.ours.key.named(found.case_fields) for match in found.matches])


def test_kernels_of_other_sizes_are_no_match(tmp_path: Path) -> None:
    ring(tmp_path / "old", 150.0, n=8192)
    ring(tmp_path / "new", 150.0, n=4096)
    with pytest.raises(UserError, match="No points in common"):
        compared(tmp_path / "old", tmp_path / "new")


def test_what_was_not_launch_bound_of_copies_is_compared(tmp_path: Path) -> None:
    bound = dict.fromkeys(("copy", "sequential"), True)
    make_point("copy_engine", tmp_path / "old", launch_bound=bound)
    make_point("copy_engine", tmp_path / "new")
    both = compared(tmp_path / "old", tmp_path / "new")
    assert [match.ours.key.setting for match in both.matches] == ["gemm", "overlapped"]
    assert both.matches[1].theirs.none_us is None
