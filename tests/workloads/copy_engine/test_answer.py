"""Asserts whether copies hide behind GEMMs, and whether splitting the GEMMs pays. Tables and sentences: copy_engine and
made/copy_answers among the golden files."""

from collections import defaultdict
from math import isnan
from pathlib import Path

import pytest

from overlap_sweep.results.points import read_points
from overlap_sweep.results.records import read_records
from overlap_sweep.workloads.copy_engine.result import CHUNKED, VARIANTS
from overlap_sweep.workloads.copy_engine.section import CopyAnalysis, analyse_copies, measured
from tests.make_point import copy_config, make_point


def only_analysis(directory: Path) -> CopyAnalysis:
    (analysis,) = analyse_copies(read_points(directory).points)
    return analysis


def measure(directory: Path, chunks: int, alone_us: float, with_copies_us: float) -> None:
    """GEMMs in chunks: whole ones take 1,000 us alone and 1,200 us with copies that take 400 us alone."""
    config = copy_config(**{"copy_engine.chunks": chunks})
    make_point("copy_engine", directory, config, overlapped_us=1200.0, in_chunks_us=(alone_us, with_copies_us))


@pytest.mark.parametrize(("overlapped_us", "saves"), [(1380.0, True), (1381.0, False)])
def test_copies_save_from_a_twentieth_of_what_could_be_hidden(
    tmp_path: Path, overlapped_us: float, saves: bool
) -> None:
    """1,000 us of GEMMs and 400 us of copies: hiding 20 of the 400 is worth it, hiding 19 is not."""
    make_point("copy_engine", tmp_path, overlapped_us=overlapped_us)
    analysis = only_analysis(tmp_path)
    assert any(row.saves for row in analysis.rows) == saves
    assert f"saves time at {int(saves)} of 1 sizes" in analysis.sentences[0]
    assert len(analysis.sentences) == 1


def test_chunks_pay_where_the_copies_hide_more_than_splitting_costs(tmp_path: Path) -> None:
    measure(tmp_path, 16, alone_us=1100.0, with_copies_us=1260.0)
    measure(tmp_path, 4, alone_us=1030.0, with_copies_us=1080.0)
    make_point("copy_engine", tmp_path, copy_config(), overlapped_us=1200.0)
    analysis = only_analysis(tmp_path)
    whole, four, sixteen = analysis.rows
    assert isnan(whole.chunk_cost)
    assert (four.chunk_cost, four.chunk_gain.share) == pytest.approx((0.03, 0.1))
    assert (sixteen.chunk_cost, sixteen.chunk_gain.share) == pytest.approx((0.1, -0.05))
    assert [row.hidden_fraction for row in analysis.rows] == pytest.approx([0.5, 0.8, 0.35])
    _, sentence = analysis.sentences
    assert sentence.startswith("Splitting GEMMs pays at 1 of 2 sizes. Best: 4 GEMMs of 4096 in 4 chunks, 4 x 64 MiB, ")
    assert "with the copies 10.0% faster than whole (9.4 to 10.6%), alone they take 3.0% more time" in sentence


def test_other_chunks_are_another_case_in_comparisons(tmp_path: Path) -> None:
    measure(tmp_path, 2, alone_us=1000.0, with_copies_us=1100.0)
    make_point("copy_engine", tmp_path, copy_config(), overlapped_us=1200.0)
    settings: dict[str | None, set[str]] = defaultdict(set)
    for time in measured(read_points(tmp_path).points, read_records(tmp_path)).times:
        settings[time.key.operator].add(time.key.setting)
    assert settings == {
        "host_to_device, 4 GEMMs of 4096, 4 x 64 MiB": set(VARIANTS),
        "host_to_device, 4 GEMMs of 4096 in 2 chunks, 4 x 64 MiB": {*VARIANTS, *CHUNKED},
    }
