"""What is predicted from the traces of a run, which diagnosis has read before."""

from pathlib import Path

import pytest

from overlap_sweep.diagnosis.runs import read_runs
from overlap_sweep.predict.predictions import predict
from overlap_sweep.predict.runs import MOST_PICTURES, drawn, graphs, mends_of, predictions_of
from tests.diagnosis.planted import ARCHIVES, unpack


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("recorded")
    unpack(ARCHIVES / "h200x2.tar.xz", directory)
    return sorted((directory / "fsdp2_no_prefetch").glob("trace_rank*"))


def test_what_diagnosis_has_read_gives_the_same_predictions(traces: list[Path]) -> None:
    (run,) = read_runs(traces)
    (of_traces,) = graphs(traces)
    assert run.seen
    assert of_traces.graph

    assert run.found
    causes = [one.cause for one in run.found.diagnosis.findings]
    found = mends_of(run)
    mend = found.of_findings[causes.index("issued_late")]

    assert mend
    assert mend.change == "fsdp2.prefetch=1"
    assert predict(of_traces.graph, [mend.change]) == [mend]
    assert predictions_of(traces, seen=run.seen) == predict(of_traces.graph)
    # It gains most, though the advice of no finding means it.
    assert found.best
    assert found.best.change == "fsdp2.reshard_after_forward=false"
    late = [first for first, cause in zip(found.is_first, causes, strict=True) if cause == "issued_late"]
    assert late == [True, False, False]


def test_what_is_kept_is_what_was_drawn(traces: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["fsdp2.prefetch=1", "ddp.hooks=true"]
    found = drawn(traces, changes)
    monkeypatch.setattr("overlap_sweep.predict.runs.graphs", lambda paths: pytest.fail("read again"))

    assert found
    assert found == drawn(traces, changes)
    assert found.ranks == [0, 1]
    assert [one.change for one in found.predictions if one.status == "cannot tell"] == ["ddp.hooks=true"]
    assert found.predictions[-1].change == "ddp.hooks=true"
    # A bound gains nearly as much, and of prefetching one module is better than two.
    drawn_changes = [one.change for one in found.pictures]
    assert drawn_changes == ["fsdp2.reshard_after_forward=false", "fsdp2.prefetch=1", "ranks.equal=true"]
    assert len(drawn_changes) == MOST_PICTURES
    told = {one.change: one.predicted_us for one in found.predictions}
    assert [one.step_us for one in found.pictures] == pytest.approx([told[change] for change in drawn_changes])
