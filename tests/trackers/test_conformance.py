"""What every tracker shows of a directory, and that it shows it once."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep import workloads
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.trackers.runs import rows_by_point, run_of
from overlap_sweep.trackers.tracking import KEY_FILE
from overlap_sweep.workloads import analyse
from tests.analyze import Ran, analyze
from tests.made_sweeps import write_every_workload
from tests.make_point import job_config, make_point, missing_point, rewrite
from tests.trackers.conftest import TRACKERS, in_environment
from tests.trackers.stores import Held, Store, by_name

TRACE = "trace_rank0.json.gz"


def write_jobs(folder: Path) -> Path:
    """Points of every status, one with a trace."""
    traced = make_point("job", folder, job_config({"bucket": 25}), name="traced", step_us=2000.0, traces=[TRACE])
    (traced / TRACE).write_bytes(b"trace")
    make_point("job", folder, job_config({"bucket": 50}), name="faster", step_us=1000.0)
    make_point("job", folder, job_config({"bucket": 1}), name="failed", status="failed", error="exit 1\nTraceback")
    make_point("job", folder, job_config({"bucket": 2}), name="hung", status="timeout", error="no answer in 30 s")
    make_point("job", folder, job_config({"bucket": 3}), name="refused", status="skipped", error="too many ranks")
    missing_point(folder, job_config({"bucket": 4}))
    (folder / ".lock").touch()
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_jobs(tmp_path / "2026-11-20" / "21-14-03")


def tracked(directory: Path, store: Store) -> Ran:
    done = analyze(directory, "--track", store.name)
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Tracked:
    directory: Path
    runs: Mapping[str, Held]
    said: str

    @property
    def sweep(self) -> Held:
        return self.runs["2026-11-20/21-14-03"]


@pytest.fixture(scope="module", params=TRACKERS)
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Tracked:
    """The sweep, tracked once."""
    folder = tmp_path_factory.mktemp("shown")
    directory = write_jobs(folder / "2026-11-20" / "21-14-03")
    with in_environment(request.param, folder, empty_database) as store:
        said = tracked(directory, store).stderr
        return Tracked(directory, by_name(store), said)


def test_each_point_is_a_run_of_its_sweep(shown: Tracked) -> None:
    assert shown.runs.keys() == {"2026-11-20/21-14-03", "traced", "faster", "failed", "hung", "refused"}
    assert [run for run in shown.runs.values() if run.is_sweep] == [shown.sweep]
    assert len({run.of for run in shown.runs.values()}) == 1
    # A point without a result may still be measured.
    assert {name for name, run in shown.runs.items() if not run.ok} == {"failed", "hung", "2026-11-20/21-14-03"}
    assert "tracked: 5 points in " in shown.said


def test_a_run_has_the_configuration_the_measurements_and_the_error(shown: Tracked) -> None:
    runs, table = shown.runs, pd.read_csv(shown.directory / "jobs.csv").set_index("point")
    assert runs["traced"].params.items() >= {("job.values.bucket", "25"), ("workload.name", "job")}
    for name in ("traced", "faster"):
        assert runs[name].metrics["time_us"] == pytest.approx(table["time_us"][name])
        assert runs[name].metrics["noise_us"] == pytest.approx(table["noise_us"][name])
        # Configuration is no measurement.
        assert not {"ranks", "repetition"} & runs[name].metrics.keys()
    assert runs["failed"].metrics == {}
    assert runs["failed"].texts.items() >= {("status", "failed"), ("error", "exit 1\nTraceback")}
    assert runs["hung"].texts["error"] == "no answer in 30 s"
    assert runs["refused"].texts.items() >= {("status", "skipped"), ("error", "too many ranks")}
    assert "error" not in runs["traced"].texts


def test_traces_are_files_of_points_and_the_report_of_the_sweep(shown: Tracked) -> None:
    assert shown.runs["traced"].files == {TRACE}
    assert shown.sweep.files == {"report.html", "summary.txt"}
    assert shown.sweep.metrics.items() >= {("points_ok", 2), ("points_failed", 1), ("points_missing", 1)}
    assert "Too few runs to tell which is fastest" in shown.sweep.texts["about"]


def test_a_directory_is_the_same_runs_however_often_and_wherever_it_is(sweep: Path, store: Store) -> None:
    tracked(sweep, store)
    first = by_name(store)
    moved = sweep.parent / "copy"
    shutil.copytree(sweep, moved)
    tracked(moved, store)
    assert by_name(store) == first


def test_a_point_that_is_measured_again_is_the_same_run(sweep: Path, store: Store) -> None:
    tracked(sweep, store)
    shutil.rmtree(sweep / "failed")
    make_point("job", sweep, job_config({"bucket": 1}), name="failed", step_us=500.0)
    shutil.rmtree(sweep / "missing")
    tracked(sweep, store)
    runs = by_name(store)
    assert len(runs) == 6
    assert runs["failed"].ok
    assert runs["failed"].metrics["time_us"] == 500.0
    assert "error" not in runs["failed"].texts
    assert runs["2026-11-20/21-14-03"].ok


def test_sweeps_of_a_day_have_a_run_each_and_a_single_point_has_none(sweep: Path, store: Store) -> None:
    make_point("copy_engine", sweep.parent / "22-00-00", name="copies")
    (sweep.parent / "22-00-00" / ".lock").touch()
    make_point("job", sweep.parent / "23-00-00", name="alone")
    tracked(sweep.parent, store)
    runs = by_name(store)
    assert {name for name, run in runs.items() if run.is_sweep} == {"2026-11-20/21-14-03", "2026-11-20/22-00-00"}
    assert runs["alone"].of is None
    assert (sweep.parent / "23-00-00" / "alone" / KEY_FILE).exists()


def test_numbers_of_every_workload_are_those_of_its_table(tmp_path: Path) -> None:
    """What is logged does not depend on the tracker."""
    write_every_workload(tmp_path)
    sections = analyse(tmp_path, AnalysisConfig()).sections
    logged = [
        run_of(rows, section.points.table, "key")
        for section in sections
        for rows in rows_by_point(section).values()
        if rows[0].point.result
    ]
    ok = [run for run in logged if run.texts["status"] == "ok"]
    assert {run.texts["workload"] for run in ok} == {*workloads.names()}
    for run in ok:
        names = {name.rpartition("/")[2] for name in run.metrics}
        assert any(name.endswith("_us") for name in names), run
        assert all(map(math.isfinite, run.metrics.values()))
        assert not names & {"tp_size", "num_sm", "tokens", "m", "n", "k", "nodes", "ranks"}


def test_secrets_are_not_logged(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "of-the-environment")
    folder = tmp_path / "sweep"
    point = job_config({"bucket": 1}, {"HF_TOKEN": "typed-one", "SORT_KEY": 1, "NCCL_ALGO": "Ring"})
    made = make_point("job", folder, point, name="ok")
    make_point("job", folder, replace(point, repetition=1), name="bad", status="failed", error="login typed-one failed")
    rewrite(made, lambda result: result["environment"].update(variables={"NCCL_SECRET": "of-the-worker"}))
    (folder / "multirun.yaml").write_text("hydra: {overrides: {task: ['+job.env.HF_TOKEN=typed-one'], hydra: []}}")
    tracked(folder, store)
    runs = by_name(store)
    assert runs["ok"].params["job.env.NCCL_ALGO"] == "Ring"
    assert runs["ok"].params["job.env.HF_TOKEN"] == runs["ok"].params["job.env.SORT_KEY"] == "(not logged)"
    assert runs["ok"].params["job.values.bucket"] == "1"
    assert "(not logged) failed" in runs["bad"].texts["error"]
    (whole,) = (run for run in runs.values() if run.is_sweep)
    assert "report.html" in whole.texts["left_out"]
    for path in store.folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [one for one in (b"typed-one", b"of-the-environment", b"of-the-worker") if one in content], path


def test_a_point_alone_is_not_taken_out_of_its_sweep(sweep: Path, store: Store) -> None:
    analyze(sweep / "traced", "--track", store.name).assert_error("is a point of a sweep", str(sweep))
    assert store.runs() == []


def test_a_damaged_key_is_refused(sweep: Path, store: Store) -> None:
    (sweep / KEY_FILE).write_text("../../other")
    done = analyze(sweep, "--track", store.name)
    done.assert_error("is damaged", KEY_FILE)
    assert store.runs() == []


def test_a_name_that_no_tracker_has_is_refused(sweep: Path) -> None:
    analyze(sweep, "--track", "mlfow").assert_error("Unknown tracker mlfow. Did you mean mlflow?", status=2)
    assert not (sweep / "report.html").exists()


def test_what_is_elsewhere_is_not_logged_with_a_directory_of_others(sweep: Path, store: Store) -> None:
    (sweep.parent / "private").write_text("of mine")
    (sweep / "report.html").symlink_to(sweep.parent / "private")
    rewrite(sweep / "traced", lambda result: result.update(started="yesterday"))
    analyze(sweep.parent, "--track", store.name).assert_error("report.html", status=1)
    assert not [path for path in store.folder.rglob("*") if path.is_file() and b"of mine" in path.read_bytes()]
    runs = store.runs()
    assert "traced" in [run.name for run in runs]
    assert "report.html" not in set().union(*(run.files for run in runs))
