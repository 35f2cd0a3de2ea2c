"""What hides behind GEMMs. How it is told: made/copy_answers, made/copies and copy_engine among the golden files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.copies import CopyAnalysis, analyse_copies
from overlap_sweep.analysis.points import read_points
from tests.made_sweeps import write_sweep_of_copies
from tests.make_point import copy_config, make_point, rewrite


def only(directory: Path) -> CopyAnalysis:
    (analysis,) = analyse_copies(read_points(directory).points)
    return analysis


def test_the_numbers_of_a_point(tmp_path: Path) -> None:
    make_point("copy_engine", tmp_path, overlapped_us=1100.0)
    (row,) = only(tmp_path).rows
    assert (row.gemm.time_us, row.copy.time_us, row.sequential.time_us) == (1000.0, 400.0, 1400.0)
    assert row.overlapped.time_us == 1100.0
    assert (row.saving.time_us, row.ideal_us, row.hidden_fraction) == (300.0, 400.0, 0.75)
    assert row.saving_share == pytest.approx(300 / 1400)
    assert row.slowdown == pytest.approx(0.1)
    # Four GEMMs of 4096 and four copies of 64 MiB.
    assert row.tflops(beside=False) == pytest.approx(4 * 2 * 4096**3 / 1000e-6 / 1e12)
    assert row.tflops(beside=True) == pytest.approx(4 * 2 * 4096**3 / 1100e-6 / 1e12)
    assert row.gb_per_s(beside=False) == pytest.approx(4 * 64 * 2**20 / 400e-6 / 1e9)
    assert row.size == "4 GEMMs of 4096, 4 x 64 MiB"
    assert row.saves


def test_rounds_are_paired(tmp_path: Path) -> None:
    def drift(result: dict[str, Any]) -> None:
        """By a fifth from round to round, and every round saves the same."""
        for timing in result["copies"]["times"].values():
            timing["samples_us"] = [timing["median_us"] + 100.0 * slower for slower in (2, -1, 0, 1, -2)]

    rewrite(make_point("copy_engine", tmp_path, overlapped_us=1100.0), drift)
    (row,) = only(tmp_path).rows
    assert row.overlapped.noise_us > 100.0
    assert (row.saving.time_us, row.saving.noise_us) == (300.0, 0.0)
    assert row.saves


@pytest.mark.parametrize(
    ("overlapped_us", "spread_us", "saves", "said"),
    [
        (1100.0, 1.0, True, "overlap saves time"),
        (1380.0, 1.0, True, "overlap saves time"),
        # Nearly nothing, noise, and slower.
        (1395.0, 1.0, False, "copies hide behind no GEMM"),
        (1300.0, 100.0, False, "cannot tell whether"),
        (1500.0, 1.0, False, "at once is slower"),
    ],
)
def test_what_is_noise_or_nearly_nothing_saves_nothing(
    tmp_path: Path, overlapped_us: float, spread_us: float, saves: bool, said: str
) -> None:
    make_point("copy_engine", tmp_path, overlapped_us=overlapped_us, spread_us=spread_us)
    analysis = only(tmp_path)
    assert analysis.saves == saves
    assert analysis.answer.startswith(f"host_to_device: {said}")


def test_sizes_are_in_order_in_each_direction(tmp_path: Path) -> None:
    inside, to_host = analyse_copies(read_points(write_sweep_of_copies(tmp_path)).points)
    sizes = [(2048, 16.0), (2048, 64.0), (4096, 16.0), (4096, 64.0)]
    assert [[(row.matrix_size, row.copy_mb) for row in of.rows] for of in (inside, to_host)] == [sizes, sizes]
    assert [round(of.rows[0].saving.time_us) for of in (inside, to_host)] == [1, 128]
    assert (inside.saves, to_host.saves) == (False, True)


def test_launch_bound_points_answer_nothing(tmp_path: Path) -> None:
    bound = {"gemm": False, "copy": True, "sequential": False, "overlapped": False}
    make_point("copy_engine", tmp_path, overlapped_us=1100.0, launch_bound=bound)
    assert "no answer" in only(tmp_path).answer


def test_directions_and_devices_are_told_apart(tmp_path: Path) -> None:
    make_point("copy_engine", tmp_path, copy_config("peer"))
    make_point("copy_engine", tmp_path, copy_config("peer"), environment={"gpu": "NVIDIA B200"})
    cases = [str(analysis.case) for analysis in analyse_copies(read_points(tmp_path).points)]
    assert cases == ["peer on NVIDIA B200", "peer on NVIDIA H200"]
