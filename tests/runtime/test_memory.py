"""store= and reuse= of launch.py."""

from pathlib import Path

import pytest

from overlap_sweep.results.identity import point_identity
from overlap_sweep.store import read_store
from tests.analyze import analyze
from tests.faults.injection import TINY, faulty_launch, injected, journal
from tests.results.reading import operator_rows
from tests.sweeps import Launch, launch_here

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep in `sweep`, and `store.sqlite` with what it measured; one point failed."""
    root = tmp_path_factory.mktemp("stored")
    launch = faulty_launch(root, [{"num_sm": 3, "fault": "raises", "rank": None}], light=True)
    swept = launch.run("-m", "num_sm=1,2,3", *TINY, "runtime.retries=0", f"store={root}/store.sqlite")
    assert "2 ok, 1 failed" in swept.stdout, swept.stderr
    return root


def names(store: Path) -> list[str]:
    return sorted(Path(measurement.directory).name for measurement in read_store(store).measurements)


def test_a_store_gets_every_measurement_once(stored: Path) -> None:
    store = stored / "store.sqlite"
    assert names(store) == ["tp2_sm1", "tp2_sm2"]
    done = launch_here("-m", "num_sm=1,2", *TINY, f"store={store}", f"hydra.sweep.dir={stored}/sweep")
    assert "already measured: 2 of 2 points" in done.stdout
    assert [line.split()[:3] for line in done.stdout.splitlines() if line.startswith("[")] == [
        ["[kept]", "ok", "tp2_sm1"],
        ["[kept]", "ok", "tp2_sm2"],
    ]
    assert names(store) == ["tp2_sm1", "tp2_sm2"]


def test_what_it_knows_is_not_measured(stored: Path) -> None:
    """What failed is."""
    before = len(journal(stored))
    launch = Launch(stored / "more", injected(stored / "faults", light=True))
    given = (f"store={stored}/store.sqlite", "reuse=true", "runtime.retries=0")
    done = launch.run("-m", "num_sm=1,4,3", *TINY, *given)
    assert done.returncode == 1, done.stderr
    assert {run["num_sm"] for run in journal(stored)[before:]} == {3, 4}
    results = launch.results()
    reused = {name: bool(result.reused_from) for name, result in results.items()}
    printed = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[")]
    assert {line.split()[1]: "  from the store, measured 20" in line for line in printed} == reused
    table = operator_rows(launch.directory)
    assert {row["point"]: bool(row["reused_from"]) for row in table} == reused
    assert all(str(row["started"]).startswith("20") for row in table if row["status"] == "ok")
    assert reused == {"tp2_sm1": True, "tp2_sm3": False, "tp2_sm4": False}
    assert names(stored / "store.sqlite") == ["tp2_sm1", "tp2_sm2", "tp2_sm4"]
    result, original = results["tp2_sm1"], Launch(stored / "sweep").results()["tp2_sm1"]
    assert (result.status, result.measured.times, result.started) == ("ok", original.measured.times, original.started)
    assert point_identity(result.point) == point_identity(original.point)
    assert str(result.reused_from).startswith(f"{stored}/store.sqlite: measured {original.started} on ")
    assert str(result.reused_from).endswith(f" in {stored}/sweep/tp2_sm1")
    assert result.traces == []
    analysed = analyze(launch.directory)
    assert analysed.returncode == 0, analysed.stderr
    assert "TP=2" in analysed.stdout
    resumed = launch_here("-m", "num_sm=1,4", *TINY, *given, f"hydra.sweep.dir={launch.directory}")
    assert "already measured: 2 of 2 points" in resumed.stdout
    single = launch_here("num_sm=1", *TINY, *given, f"hydra.run.dir={stored}/single")
    assert single.returncode == 0, single.stderr
    (result,) = Launch(stored / "single").results().values()
    assert result.reused_from
    assert not (stored / "single" / "workers.log").exists()


@pytest.mark.parametrize(
    ("mode", "given", "says"),
    [
        (("-m",), "store={path}", "is a file"),
        ((), "store=/nowhere/store.sqlite", "/nowhere"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_clear_error_before_anything_is_started(
    tmp_path: Path, mode: tuple[str, ...], given: str, says: str
) -> None:
    (tmp_path / "store").write_text("no database, but long enough to be taken for one at first sight\n" * 100)
    where = (f"hydra.sweep.dir={tmp_path}/sweep", f"hydra.run.dir={tmp_path}/sweep/single")
    done = launch_here(*mode, given.format(path=tmp_path / "store"), "num_sm=1", *TINY, *where)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert not list(tmp_path.rglob("workers.log"))
    assert Launch(tmp_path / "sweep").results() == {}
