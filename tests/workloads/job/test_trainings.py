"""Real trainings of two ranks: how they end when something about them is known early."""

from pathlib import Path

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.point import limits, measure
from overlap_sweep.study.analysis import analyse
from overlap_sweep.workloads import read_sources
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.job.study import STUDY
from tests.workloads.job.commands import failure, job_point
from tests.workloads.job.test_sweeps import TORCHRUN, TRAIN

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_ranks_that_job_ranks_does_not_count_are_known_after_the_first_step(tmp_path: Path, script: Path) -> None:
    failed = failure(tmp_path, f"{TORCHRUN.format(ranks=2)} {script}", 120.0, attach=True, skip_steps=10**6)
    assert failed.final
    assert "the command started 2 training processes, but job.ranks=1; set job.ranks=2" in str(failed)


def test_what_is_too_slow_is_given_up_and_what_is_not_is_recorded_whole(tmp_path: Path, script: Path) -> None:
    def measured(sleep_s: float) -> Result:
        options = {"ranks": 2, "attach": True, "steps": 12, "env": {"SLEEP_S": sleep_s}}
        point = job_point(f"{TORCHRUN} {script}", **options)
        directory = tmp_path / "sweep" / f"sleeps{sleep_s}"
        directory.mkdir(parents=True)
        with limits.giving_up(1e6):
            result = measure(point, directory)
        assert result.status == "ok"
        assert limits.give_up_us is None
        # What was given up says nothing of how long alike points take.
        assert (limits.limit_s(point) == point.runtime.timeout_s) == result.gave_up
        return result

    fast, slow = measured(0.0), measured(1.3)
    assert (len(fast.measured_as(JobRun).step.samples_us), len(fast.traces), fast.gave_up) == (12, 2, False)
    assert (len(slow.measured_as(JobRun).step.samples_us), slow.traces, slow.warnings) == (5, [], [])
    assert slow.gave_up
    (analysis,) = analyse(STUDY, read_sources(tmp_path / "sweep", AnalysisConfig()).reading.points, [])
    assert {row.setting: row.note for row in analysis.rows} == {"SLEEP_S=0.0": "reference", "SLEEP_S=1.3": "given up"}
