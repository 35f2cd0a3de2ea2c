"""Verdicts, means and names of comparisons. What of two sweeps matches, ratios, aggregates and the best of each slot:
answers/comparisons, comparison and made/compared among the golden files."""

import math
from pathlib import Path

import pytest

from overlap_sweep.compare.sweeps import Match, SweepComparison, compare_sweeps, read_dataset
from overlap_sweep.overlap import space
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.verdict import MARGIN, mean_ratio, verdict
from overlap_sweep.workloads.operator.section import plain_setting
from tests.made_sweeps import trial, write_tuner
from tests.make_point import (
    make_point,
    variant,
)


def compared(*directories: Path) -> SweepComparison:
    """With the first as the reference."""
    datasets = [read_dataset(directory.name, directory) for directory in directories]
    return compare_sweeps(datasets, directories[0].name)


def by_setting(found: SweepComparison) -> dict[str, Match]:
    return {match.ours.key.setting: match for match in found.matches}


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
