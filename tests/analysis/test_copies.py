from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_sweep.analysis.copies import COPY_COLUMNS, CopyAnalysis, analyse_copies, copy_rows
from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.training_warnings import copy_warnings
from overlap_sweep.run_directory import RESULT_FILE
from tests.made_sweeps import write_sweep_of_copies
from tests.make_point import copy_config, make_point


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
    # The machine drifts by a fifth from round to round, and every round saves the same.
    path = make_point("copy_engine", tmp_path, overlapped_us=1100.0) / RESULT_FILE
    result = json.loads(path.read_text())
    for timing in result["copies"]["times"].values():
        timing["samples_us"] = [timing["median_us"] + 100.0 * drift for drift in (2, -1, 0, 1, -2)]
    path.write_text(json.dumps(result))
    (row,) = only(tmp_path).rows
    assert row.overlapped.noise_us > 100.0
    assert (row.saving.time_us, row.saving.noise_us) == (300.0, 0.0)
    assert row.saves


@pytest.mark.parametrize(
    ("overlapped_us", "spread_us", "saves"),
    [(1100.0, 1.0, True), (1380.0, 1.0, True), (1395.0, 1.0, False), (1300.0, 100.0, False), (1500.0, 1.0, False)],
)
def test_what_is_noise_or_nearly_nothing_saves_nothing(
    tmp_path: Path, overlapped_us: float, spread_us: float, saves: bool
) -> None:
    make_point("copy_engine", tmp_path, overlapped_us=overlapped_us, spread_us=spread_us)
    analysis = only(tmp_path)
    assert analysis.saves == saves
    assert analysis.answer.startswith("host_to_device: overlap saves time") == saves


@pytest.mark.parametrize(
    ("overlapped_us", "spread_us", "said"),
    [
        (1395.0, 1.0, "copies hide behind no GEMM (at best"),
        (1300.0, 100.0, "cannot tell whether copies hide behind a GEMM (at best"),
        (1500.0, 1.0, "at once is slower than one after the other (at best"),
    ],
)
def test_nothing_is_something_else_than_not_known_and_slower(
    tmp_path: Path, overlapped_us: float, spread_us: float, said: str
) -> None:
    make_point("copy_engine", tmp_path, overlapped_us=overlapped_us, spread_us=spread_us)
    assert only(tmp_path).answer.startswith(f"host_to_device: {said}")


def test_a_sentence_for_each_direction(tmp_path: Path) -> None:
    inside, to_host = analyse_copies(read_points(write_sweep_of_copies(tmp_path)).points)
    assert [(row.matrix_size, row.copy_mb) for row in to_host.rows] == [
        *((2048, 16.0), (2048, 64.0), (4096, 16.0), (4096, 64.0)),
    ]
    assert to_host.answer == (
        "device_to_host: overlap saves time at 4 of 4 sizes, up to 91% of what hiding all would "
        "(128.0 us, 29% of one after the other; 4 GEMMs of 2048, 4 x 16 MiB), 91% in the middle"
    )
    assert inside.answer == (
        "device_to_device: copies hide behind no GEMM (at best +1.0 us, noise 4.2; 4 GEMMs of 2048, 4 x 16 MiB); "
        "2 of 4 sizes cannot tell"
    )


def test_launch_bound_points_answer_nothing(tmp_path: Path) -> None:
    bound = {"gemm": False, "copy": True, "sequential": False, "overlapped": False}
    make_point("copy_engine", tmp_path, overlapped_us=1100.0, launch_bound=bound)
    analysis = only(tmp_path)
    assert analysis.answer == "host_to_device: no answer, the host could not enqueue as fast as the device ran"
    assert copy_warnings(analysis.rows) == [
        "Launch-bound, their times say nothing about the device: copy_engine_0.",
    ]


def test_the_table_has_a_row_for_each_point(tmp_path: Path) -> None:
    write_sweep_of_copies(tmp_path)
    frame = to_frame(copy_rows(read_points(tmp_path).points, tmp_path), COPY_COLUMNS)
    assert list(frame.columns) == list(COPY_COLUMNS)
    assert dict(frame["status"].value_counts()) == {"ok": 8, "skipped": 1}
    refused = frame[frame["status"] == "skipped"].iloc[0]
    assert (refused["direction"], refused["error"]) == ("peer", "needs a GPU")
    small = frame[(frame["matrix_size"] == 2048) & (frame["copy_mb"] == 16.0)]
    assert sorted(small["saving_us"].round()) == [1, 128]


def test_directions_and_devices_are_told_apart(tmp_path: Path) -> None:
    make_point("copy_engine", tmp_path, copy_config("peer"))
    make_point("copy_engine", tmp_path, copy_config("peer"), environment={"gpu": "NVIDIA B200"})
    assert [str(analysis.case) for analysis in analyse_copies(read_points(tmp_path).points)] == [
        "peer on NVIDIA B200",
        "peer on NVIDIA H200",
    ]
