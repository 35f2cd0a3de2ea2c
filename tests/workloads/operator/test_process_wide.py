"""What is set for whole processes (CUDA's connections, cuBLASMp) makes cases of their own, which say how to train."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.compare.sweeps import compared_fields, read_dataset
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap.overlap_cfg import process_wide
from overlap_sweep.report.files import write_reports
from overlap_sweep.workloads import analyse
from tests.make_point import make_point, operator_config, pass_times

EIGHT = "CUDA_DEVICE_MAX_CONNECTIONS=8"


def write(directory: Path, ring_us: float, **changes: Any) -> Path:
    for _ in range(2):
        ring = operator_config(2, "fc1", "fprop", "ring_exchange", num_sm=1, **changes)
        make_point("operator", directory, ring, fwd=pass_times(ring_us, spread_us=0.1))
    return directory


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runtime": {"max_connections": None}}, ""),
        ({"runtime": {"max_connections": 1}}, ""),
        ({"runtime": {"max_connections": 8}}, EIGHT),
        ({"runtime": {"max_connections": 8, "device": "cpu"}}, ""),
        ({"runtime": {"max_connections": 8}, "backend": "symm_mem"}, ""),
        ({"runtime": {"max_connections": 1}, "backend": "symm_mem"}, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"runtime": {"max_connections": 8}, "with_cublasmp": True}, f"{EIGHT}, with_cublasmp=True"),
    ],
)
def test_what_is_as_usual_is_not_said(changes: dict[str, Any], said: str) -> None:
    assert process_wide(operator_config(**changes)) == said


def test_connections_are_separate_cases_whose_files_say_what_to_set(tmp_path: Path) -> None:
    write(write(tmp_path, 80.0), 72.0, runtime={"max_connections": 8})
    analysis = analyse(tmp_path, AnalysisConfig())
    (section,) = analysis.sections
    usual, eight = section.answers
    assert EIGHT in eight.title
    assert EIGHT not in usual.title
    write_reports(analysis, tmp_path)
    texts = {path: path.read_text() for path in tmp_path.rglob("optimal_tp_comm_overlap_cfg_tp2.yaml")}
    assert len(texts) == 2
    to_set = f"# Set {EIGHT} in training"
    assert sorted((EIGHT.replace("=", "-") in path.parent.name, to_set in text) for path, text in texts.items()) == [
        (False, False),
        (True, True),
    ]
    assert any(f"Set {EIGHT} in training" in sentence for card in eight.cards for sentence in card.sentences)


def test_two_sweeps_that_differ_in_it_alone_are_compared(tmp_path: Path) -> None:
    datasets = [
        read_dataset("one", write(tmp_path / "one", 80.0)),
        read_dataset("eight", write(tmp_path / "eight", 72.0, runtime={"max_connections": 8})),
    ]
    assert "process_wide" in compared_fields(datasets)
