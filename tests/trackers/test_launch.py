"""What a launch logs while it runs, and that no tracker can end it."""

import shlex
from pathlib import Path

import pytest

from overlap_sweep.results.run_directory import read_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from overlap_sweep.trackers.tracking import LaunchTracking, Tracking
from tests.analyze import analyze
from tests.make_point import job_config, make_point
from tests.sweeps import SMALL, Launch, launch_here
from tests.trackers.stores import MlflowStore, Store, by_name, environment

NOWHERE = "http://127.0.0.1:9"


def outcomes(root: Path, store: Store) -> Outcomes:
    root.mkdir()
    (root / ".lock").touch()
    return Outcomes(root=root, tracking=LaunchTracking(Tracking(store.name, root)))


def end_point(ended: Outcomes, bucket: int) -> None:
    assert ended.root
    directory = make_point("job", ended.root, job_config({"bucket": bucket}), name=f"bucket={bucket}")
    ended.add(Outcome(directory, read_result(directory / "result.json")))


def test_a_point_is_logged_when_it_ends(tmp_path: Path, store: Store) -> None:
    ended = outcomes(tmp_path / "sweep", store)
    for count, bucket in enumerate((1, 25), start=1):
        end_point(ended, bucket)
        assert len([run for run in store.runs() if not run.is_sweep and run.name.startswith("bucket=")]) == count
    assert ended.tracking
    ended.tracking.interrupt()
    (whole,) = (run for run in store.runs() if run.is_sweep)
    assert (whole.ok, whole.texts["status"]) == (False, "interrupted")


@pytest.mark.end_to_end
def test_a_launch_logs_its_points_and_its_report(tmp_path: Path, store: Store) -> None:
    launch = Launch(tmp_path / "2026" / "sweep", environment(store))
    done = launch.run("-m", f"tracker={store.name}", "method=none,bulk", "report=true", *SMALL)
    assert done.returncode == 0, done.stderr
    assert f"tracked: 2 points in {store.name} (" in done.stdout
    runs = by_name(store)
    assert runs.keys() == {"2026/sweep", *launch.results()}
    assert all(run.ok for run in runs.values())
    assert "report.html" in runs["2026/sweep"].files
    for name, result in launch.results().items():
        assert runs[name].metrics["objective_us"] == pytest.approx(result.objective_us)
        assert runs[name].files == {*result.traces}
    assert "tracker" not in read_result(tmp_path / "2026" / "sweep" / name / "result.json").recorded


@pytest.mark.end_to_end
def test_a_tracker_that_is_not_there_ends_nothing_and_later_all_is_logged(tmp_path: Path, empty_database: Path) -> None:
    (tmp_path / "tracker").mkdir()
    store = MlflowStore(tmp_path / "tracker", empty_database)
    launch = Launch(tmp_path / "sweep", {**environment(store), "MLFLOW_TRACKING_URI": NOWHERE})
    done = launch.run("-m", "tracker=mlflow", "method=none,bulk", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 ok; next: ")
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: not tracked: 2 of 2 points. mlflow failed (MlflowException: ")
    _, _, later = line.partition("Later: python analyze.py ")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.variables.items():
            patch.setenv(name, value)
        patch.chdir(store.folder)
        assert analyze(*shlex.split(later)).returncode == 0
    assert len([run for run in store.runs() if not run.is_sweep]) == 2


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("tracker=mlfow", "error: Unknown tracker mlfow. Did you mean mlflow?"),
        (
            "tracker=mlflow,wandb",
            "error: tracker=mlflow,wandb: tracker is of the whole sweep, not of its points; give one value.",
        ),
    ],
)
def test_a_tracker_that_there_is_not_is_refused_before_anything_is_written(
    given: str, error: str, tmp_path: Path
) -> None:
    done = launch_here("-m", given, *SMALL, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert (done.returncode, done.stderr.strip()) == (2, error)
    assert not (tmp_path / "sweep").exists()
