"""What a search settled is what the table calls the best."""

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


def test_the_proven_one_is_the_best(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, search())
    assert (analysis.best.setting, analysis.settled) == ("forward_prefetch=1", True)
    assert analysis.reason == (
        "proven by the search: 20.0% less time, noise 3.0%; by the table alone it would be forward_prefetch=2, "
        "not proven"
    )


def test_that_nothing_is_faster_is_an_answer(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, search(best={}, gain=None, proven=False))
    assert (analysis.best.setting, analysis.settled) == ("defaults", True)
    assert analysis.reason.startswith("the search found nothing faster; by the table alone")


def test_what_is_not_proven_is_told_beside_the_tables_own(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, search(proven=False))
    assert (analysis.best.setting, analysis.settled) == ("forward_prefetch=2", False)
    assert analysis.reason == "fastest of 3; a search's answer, forward_prefetch=1, is not proven"


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
