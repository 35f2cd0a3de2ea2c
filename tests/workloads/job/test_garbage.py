"""Steps in which Python collected garbage for long."""

import sys
from pathlib import Path

import pytest

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.recorder.recording import Recording
from overlap_sweep.workloads import analyse
from overlap_sweep.workloads.job.garbage import changes_collecting, collecting_share, long_collections
from overlap_sweep.workloads.job.result import JobRun, sample
from tests.make_point import job_config, made_result, make_point, timing_of
from tests.workloads.job.commands import job, job_point, measured, recording

STEPS = 20


def ranks(*collecting_us: dict[int, float], usual_us: float = 1.0) -> list[Recording]:
    """Recordings of 20 steps of 1 ms, with the time of collections in some of them."""
    return [
        recording(number, host_us=[1000.0] * STEPS, collecting_us=[own.get(step, usual_us) for step in range(STEPS)])
        for number, own in enumerate(collecting_us)
    ]


@pytest.mark.parametrize(
    ("found", "steps"),
    [
        (ranks({}), []),
        # What comes in every step, or is shorter than a hundredth of it, counts.
        (ranks({}, usual_us=200.0), []),
        (ranks({3: 10.9}), []),
        (ranks({3: 11.1}), [3]),
        # Others wait for the rank that collects.
        (ranks({3: 300.0}, {3: 200.0, 7: 90.0}), [3, 7]),
        # Four of twenty are a few, five are not.
        (ranks({1: 50.0, 2: 50.0}, {3: 50.0, 4: 50.0}), [1, 2, 3, 4]),
        (ranks({1: 50.0, 2: 50.0, 5: 50.0}, {3: 50.0, 4: 50.0}), []),
        # A recording of an older version.
        ([recording()], []),
    ],
)
def test_steps_with_a_long_collection_are_few_or_count(found: list[Recording], steps: list[int]) -> None:
    assert long_collections(found, STEPS) == steps


def test_steps_that_not_all_ranks_have_timed_are_not_looked_at() -> None:
    assert long_collections(ranks({3: 50.0, 15: 50.0}), 10) == [3]


def test_the_share_is_that_of_the_rank_that_collects_longest() -> None:
    assert collecting_share(ranks({3: 981.0}, {})) == pytest.approx(0.05)
    assert collecting_share([recording()]) is None


def test_a_lever_of_garbage_is_measured_with_all_steps() -> None:
    assert changes_collecting(job_point("python t.py", levers={"host": {"collect_every": 50}}, attach=True))
    assert not changes_collecting(job_point("python t.py", levers={"ddp": {"bucket_cap_mb": 4}}, attach=True))


def run(long: list[int], slow_us: float = 300.0) -> JobRun:
    samples_us = [slow_us if step in long else 100.0 + step % 2 for step in range(10)]
    return JobRun(step=timing_of(samples_us), timed_by="gpu", long_collections=long)


def test_the_time_of_a_step_is_without_them() -> None:
    one = run([3, 8])
    assert (one.mean_us, one.longer_us) == (100.5, pytest.approx(399.0))
    assert len(sample(made_result("job", step=one.step, long_collections=[3, 8])).times_us) == 8
    with pytest.raises(ValueError, match="not all"):
        run([*range(10)])
    with pytest.raises(ValueError, match="some of the steps"):
        run([10])


def test_a_collection_in_one_run_decides_nothing_and_is_told(tmp_path: Path) -> None:
    for bucket, long in ((25, [3]), (100, [])):
        for repetition in range(3):
            steps_us = [100_000.0 + 10 * (step % 3) + (200_000 if step in long else 0) for step in range(20)]
            point = job_config({"bucket": bucket}, **{"repetition": repetition})
            make_point("job", tmp_path, point, step=timing_of(steps_us), long_collections=long)

    (answer,) = analyse(tmp_path, AnalysisConfig()).sections[0].answers

    rows = {row.setting: row for row in answer.compared.rows}
    assert rows["bucket=25"].time_us == pytest.approx(rows["bucket=100"].time_us, rel=1e-4)
    assert rows["bucket=25"].step.noise_us < 100
    assert rows["bucket=25"].garbage_share == pytest.approx(600 / 6600, rel=0.01)
    assert rows["bucket=100"].garbage_share is None
    (told,) = (one for one in answer.cautions if "garbage" in one)
    assert "(9.1% of the time with bucket=25: 3 of 60 steps took 200 ms longer)" in told
    assert "+job.levers.host.collect_every" in told
    assert "Steps vary" not in " ".join(answer.cautions)


TRAIN = """
import gc, time, torch
gc.disable()
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
cycles = [[] for _ in range(400_000)]
for step in range(1, 30):
    time.sleep(0.01)
    if step == 8:
        gc.collect()
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


def test_a_training_is_timed_without_the_step_that_collects(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    options = {"attach": True, "skip_steps": 2, "steps": 12, "profile_steps": 0}
    found = job(measured(tmp_path, f"{sys.executable} {tmp_path}/train.py", 60.0, **options))
    assert found.long_collections == [5]
    assert found.collecting_share
    assert found.mean_us < found.step.samples_us[5]
