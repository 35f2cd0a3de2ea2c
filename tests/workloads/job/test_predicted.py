"""The report of a job says beside what was measured what was to be expected from the reference's traces."""

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from overlap_sweep import read, read_prediction
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.charts import Gantt
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads import analyse
from tests.analyze import analyze, rows, shown
from tests.diagnosis.planted import ARCHIVES, unpack
from tests.make_point import job_config, make_point


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded")
    unpack(ARCHIVES / "h200x2.tar.xz", directory)
    return directory


@pytest.fixture(scope="module")
def one_bucket(recorded: Path) -> Path:
    """Traces of two ranks that all-reduce all gradients after the backward pass."""
    return recorded / "ddp_one_bucket"


def run(
    directory: Path, traces: Path, step_us: float, *, setting: dict[str, object], number: int, **measured: Any
) -> None:
    point = make_point(
        "job",
        directory,
        job_config({}, {}, **{"runtime.device": "cuda", "job.ranks": 2, "job.levers": setting}),
        step_us=step_us,
        started=f"2026-11-20T21:{number:02}:00+00:00",
        traces=[trace_file(rank) for rank in (0, 1)],
        **measured,
    )
    for rank in (0, 1):
        shutil.copy(traces / f"trace_rank{rank}.json", point / trace_file(rank).removesuffix(".gz"))
        (point / trace_file(rank).removesuffix(".gz")).rename(point / trace_file(rank))


def test_what_was_predicted_is_beside_what_was_measured(tmp_path: Path, one_bucket: Path) -> None:
    bucket = {"ddp": {"bucket_cap_mb": 25}}
    settings = [
        {},
        bucket,
        {"optimizer": {"fused": True}},
        bucket | {"optimizer": {"fused": True}},
        {"fsdp2": {"prefetch": 2}},
    ]
    for number, setting in enumerate(settings):
        run(tmp_path, one_bucket, 26_400.0 - number * 900, setting=setting, number=number)

    (section,) = analyse(tmp_path, AnalysisConfig()).sections
    rows = {row.setting: row for row in section.answers[0].compared.rows}
    printed = shown(240, "report", tmp_path)

    prediction = rows["ddp.bucket_cap_mb=25"].prediction
    assert prediction is not None
    assert prediction.predicted_us == pytest.approx(24_907, rel=0.01)
    assert rows["fsdp2.prefetch=2"].prediction.status == "cannot tell"
    assert [name for name, row in rows.items() if row.prediction is None] == [
        *(name for name in rows if "fused" in name or name == "defaults"),
    ]
    assert "1.080x (1.01 to 1.17)" in printed


def test_the_page_has_the_step_as_recorded_and_as_predicted(tmp_path: Path, one_bucket: Path) -> None:
    run(tmp_path, one_bucket, 26_400.0, setting={}, number=0)

    (section,) = analyse(tmp_path, AnalysisConfig()).sections
    (exhibit,) = (one for one in section.answers[0].charts if one.name == "predictions")
    assert exhibit.parts
    table, best, *others = exhibit.parts()

    assert table.listing
    listed = {row["change"]: row["reason"] for row in table.listing.rows}
    assert listed["ddp.bucket_cap_mb=25"].startswith("It takes as long with 4 and 100.")
    assert "ddp.bucket_cap_mb=4" not in listed
    assert best.folded == "ddp.bucket_cap_mb=25: 1.080x (1.01 to 1.17)"
    assert best.drawn.startswith("A step of 26,907 us is predicted to take 24,906 us with ddp.bucket_cap_mb=25 (from")
    # Bounds are not drawn, and of each name only the best.
    assert [one.folded.partition("=")[0] for one in others] == ["ranks.equal", "nccl.min_ctas"]
    gantt = best.chart() if best.chart else None
    assert isinstance(gantt, Gantt)
    recorded, changed = ([lane for lane in gantt.lanes if lane.name == name] for name in ("GEMMs", "all_reduce"))
    assert len(recorded) == len(changed) == 2
    assert len(changed[0].spans) < len(changed[1].spans)
    assert sum(len(lane.spans) for lane in gantt.lanes) < 400


def test_the_answer_says_how_right_the_predictions_were(tmp_path: Path, one_bucket: Path) -> None:
    """Smaller buckets were timed in turns with the recorded program."""
    scenarios = json.loads((one_bucket.parent / "scenarios.json").read_text())
    (times_ms,) = (one["in_turns_ms"] for one in scenarios if one["name"] == "ddp_one_bucket")
    before_us, after_us = (1000 * median(times_ms[name]) for name in ("ddp_one_bucket", "ddp_smaller_buckets"))
    run(tmp_path, one_bucket, before_us, setting={}, number=0)
    run(tmp_path, one_bucket, after_us, setting={"ddp": {"bucket_cap_mb": 25}}, number=1)

    def said() -> str:
        (section,) = analyse(tmp_path, AnalysisConfig()).sections
        answer = section.answers[0]
        (sentence,) = (sentence for sentence in answer.sentences if "prediction" in sentence)
        assert answer.card
        assert sentence in answer.card.sentences
        return sentence

    about = "from the reference's traces 1 had the measured speedup in the interval; error"
    assert said() == f"Of 1 prediction {about} 0.6%."
    # As if buckets of 100 MB, of which the same is predicted, gained nothing.
    run(tmp_path, one_bucket, before_us, setting={"ddp": {"bucket_cap_mb": 100}}, number=2)
    assert said() == f"Of 2 predictions {about} 4.0% in the median."


def test_predictions_can_be_queried(tmp_path: Path, one_bucket: Path) -> None:
    run(tmp_path / "sweep", one_bucket, 26_400.0, setting={}, number=0)

    found = rows("query", tmp_path / "sweep", "--predictions", "gain_us > 0.05 * step_us", "--sort=-gain_us")
    of_traces = rows("predict", tmp_path / "sweep")

    assert found == [row for row in of_traces if row["gain_us"] > 0.05 * row["step_us"]]
    assert [row["change"] for row in found] == ["kernels.fused=true", "ddp.bucket_cap_mb=25", "link.times=2"]
    assert read(tmp_path / "sweep", "predictions").equals(read_prediction(tmp_path / "sweep"))
    analyze("query", tmp_path, "--predictions", "cause == 'none'").assert_error("leave out --predictions")
    analyze("query", tmp_path / "sweep" / "none", "--predictions").assert_error("none")


@pytest.mark.parametrize(("causes", "is_late"), [({"host_bound": 0.5}, True), ({"bandwidth": 0.1}, False)])
def test_a_host_that_only_the_profiler_made_late_is_spared_nothing(
    tmp_path: Path, recorded: Path, causes: dict[str, float], is_late: bool
) -> None:
    """Of a training of many small kernels, whose host was late in the profiled steps: whether it is in the timed ones,
    too, is in the causes of its run."""
    of_run = {"exposed": {"DP, ranks 0-1": 1000.0}, "causes": causes}
    run(tmp_path, recorded / "tiny_kernels", 15_000.0, setting={}, number=0, **of_run)

    (section,) = analyse(tmp_path, AnalysisConfig()).sections
    (exhibit,) = (one for one in section.answers[0].charts if one.name == "predictions")
    assert exhibit.parts
    table, *pictures = exhibit.parts()

    assert table.listing
    assert ("host.launch=graph" in [row["change"] for row in table.listing.rows]) == is_late
    assert any((one.folded or "").startswith("host.launch") for one in pictures) == is_late
