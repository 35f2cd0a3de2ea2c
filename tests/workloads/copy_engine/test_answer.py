"""Copies in comparisons. Whether they hide behind GEMMs, and whether splitting the GEMMs pays: answers/copy_engine,
copy_engine and made/copy_answers among the golden files."""

from collections import defaultdict
from pathlib import Path

from overlap_sweep.results.points import read_points
from overlap_sweep.results.records import read_records
from overlap_sweep.workloads.copy_engine.result import CHUNKED, VARIANTS
from overlap_sweep.workloads.copy_engine.section import measured
from tests.make_point import copy_config, make_point


def test_other_chunks_are_another_case_in_comparisons(tmp_path: Path) -> None:
    make_point("copy_engine", tmp_path, copy_config(**{"copy_engine.chunks": 2}), in_chunks_us=(1000.0, 1100.0))
    make_point("copy_engine", tmp_path, copy_config())
    settings: dict[str | None, set[str]] = defaultdict(set)
    for time in measured(read_points(tmp_path).points, read_records(tmp_path)).times:
        settings[time.key.operator].add(time.key.setting)
    assert settings == {
        "host_to_device, 4 GEMMs of 4096, 4 x 64 MiB": set(VARIANTS),
        "host_to_device, 4 GEMMs of 4096 in 2 chunks, 4 x 64 MiB": {*VARIANTS, *CHUNKED},
    }
