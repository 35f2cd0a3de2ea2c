"""What a search settled is what the table calls the best. How it is told: made/searches among the golden files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.knob_search import Gain, KnobRecord, KnobSearch, TriedKnobs
from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.records import read_records
from overlap_sweep.analysis.training import TrainingAnalysis, analyse_training
from overlap_sweep.report.knob_search import write_knobs
from tests.make_point import make_point, resolved

KNOBS = {"fsdp.forward_prefetch": ["false", "1", "2"], "distributed.env.NCCL_ALGO": ["null", "Ring", "Tree"]}
TYPED = ["workload=fsdp", "model=ranking", "training.batch_size=64", "profile=none"]


def search(**changes: Any) -> KnobSearch:
    known: dict[str, Any] = {
        "label": "ranking fsdp2 step on 4 ranks",
        "overrides": TYPED,
        "knobs": KNOBS,
        "best": {"fsdp.forward_prefetch": "1"},
        "time_us": 1200.0,
        "baseline_us": 1500.0,
        "gain": Gain(0.2, 0.03),
        "proven": True,
        "tried": [
            TriedKnobs(changed=changed, time_us=1.0, noise_us=1.0, measurements=1)
            for changed in ({"fsdp.forward_prefetch": "1"}, {})
        ],
    }
    return KnobSearch(**{**known, **changes})


def analysed(directory: Path, *searches: KnobSearch) -> TrainingAnalysis:
    """Of three points, of which the search's answer seems to be the second."""
    for ahead, step_us in enumerate((1500.0, 1200.0, 1100.0)):
        make_point("fsdp", directory, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=step_us)
    write_knobs(directory, KnobRecord(searches=list(searches)))
    (analysis,) = analyse_training(read_points(directory).points, read_records(directory).knobs)
    return analysis


@pytest.mark.parametrize(
    ("changes", "best", "settled", "reason"),
    [
        ({}, "forward_prefetch=1", True, "proven by the search"),
        ({"best": {}, "gain": None, "proven": False}, "defaults", True, "the search found nothing faster"),
        ({"proven": False}, "forward_prefetch=2", False, "is not proven"),
    ],
    ids=["proven", "nothing faster", "not proven"],
)
def test_what_the_search_settled_is_the_best(
    tmp_path: Path, changes: dict[str, Any], best: str, settled: bool, reason: str
) -> None:
    analysis = analysed(tmp_path, search(**changes))
    assert (analysis.best.setting, analysis.settled) == (best, settled)
    assert reason in analysis.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": [*TYPED, "ranking.num_layers=2"]},
        {"overrides": ["workload=fsdp", "model=other"]},
        {"best": {"fsdp.forward_prefetch": "1", "distributed.env.NCCL_ALGO": "Ring"}},
        {"time_us": None},
    ],
    ids=["another size", "another model", "never measured", "no answer"],
)
def test_searches_of_something_else_settle_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    analysis = analysed(tmp_path, search(**changes))
    assert (analysis.best.setting, analysis.reason) == ("forward_prefetch=2", "fastest of 3")


def test_what_was_never_tried() -> None:
    assert search().never_tried == {"fsdp.forward_prefetch": ["2"], "distributed.env.NCCL_ALGO": ["Ring", "Tree"]}


def test_a_record_that_says_no_gain_is_a_problem(tmp_path: Path) -> None:
    write_knobs(tmp_path, KnobRecord(searches=[search(gain=None)]))
    records = read_records(tmp_path)
    assert not records.knobs
    assert "without its gain" in records.problems[0]
