"""hydra/sweeper=knobs: whole searches with a launcher that makes the results up, and one with real processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from overlap_sweep.analysis.knob_search import KNOBS_FILE, KnobRecord, KnobSearch, read_knobs
from overlap_sweep.analysis.records import read_records
from overlap_sweep.errors import UserError
from overlap_sweep.report.knob_search import pasted, print_knob_searches
from overlap_sweep.run_directory import Result
from overlap_sweep.search.knob_sweeper import sweep
from tests.make_point import training_run
from tests.search.stand_in import ON_CPU, StandIn, operator_result, results, sweep_of
from tests.sweeps import ROOT, Launch

pytestmark = pytest.mark.end_to_end

EXPERIMENT = yaml.safe_load((ROOT / "conf" / "experiment" / "fsdp_overlap.yaml").read_text())
PARAMS = EXPERIMENT["hydra"]["sweeper"]["params"]
TINY = ("workload=fsdp", "model=ranking_tiny", "runtime.device=cpu", "profile=none")
FEW = {"fsdp.forward_prefetch": "false,1,2", "fsdp.reshard_after_forward": "true,false"}


def step_us(point: Mapping[str, Any]) -> float:
    """Prefetching and keeping parameters helps; with DDP, large buckets."""
    fsdp, distributed = point["fsdp"], point["distributed"]
    found = 10_000.0 - {0: 0, 1: 500, 2: 450}[fsdp["forward_prefetch"]] - 300 * (not fsdp["reshard_after_forward"])
    return found - 400 * (distributed["bucket_cap_mb"] == 100)


def training_result(point: Mapping[str, Any], time_us: float) -> Result:
    run = training_run(time_us, 12_000.0, 8_000.0, spread_us=0.003 * time_us, point=point)
    return Result(name="", point=dict(point), status="ok", training=run, objective_us=time_us)


def answer(point: Mapping[str, Any]) -> Result:
    return training_result(point, step_us(point))


def searched(
    directory: Path,
    *overrides: str,
    answer: Callable[[Mapping[str, Any]], Result] = answer,
    params: Mapping[str, Any] = PARAMS,
    fixed: tuple[str, ...] = TINY,
) -> StandIn:
    """Run to the end."""
    single = [override for override in (*fixed, *overrides) if "," not in override]
    with sweep_of(directory, "hydra/sweeper=knobs", *single, answer=answer) as launcher:
        sweep(launcher.config, launcher.context, launcher, params, [*fixed, *overrides])
        return launcher


def record(directory: Path) -> KnobRecord:
    return read_knobs(directory / KNOBS_FILE)


def only(directory: Path) -> KnobSearch:
    (found,) = record(directory).searches
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StandIn]:
    directory = tmp_path_factory.mktemp("knobs")
    return directory, searched(directory)


def test_the_experiment_names_the_best_setting_and_what_each_knob_contributes(done: tuple[Path, StandIn]) -> None:
    found = only(done[0])
    assert found.label == "ranking_tiny fsdp2 step on 2 ranks"
    assert found.best == {"fsdp.forward_prefetch": "1", "fsdp.reshard_after_forward": "false"}
    assert found.proven
    assert found.gain
    assert found.gain.share == pytest.approx(0.08, abs=0.01)
    assert found.over_none
    assert found.over_none.share == pytest.approx(1 - 9200 / 12_000, abs=0.01)
    shares = {c.key: (c.alone and c.alone.share, c.taken_away and c.taken_away.share) for c in found.contributions}
    assert shares["fsdp.forward_prefetch"] == pytest.approx((0.05, 500 / 9700), abs=0.01)
    assert shares["fsdp.reshard_after_forward"] == pytest.approx((0.03, 300 / 9500), abs=0.01)
    assert found.settings < found.grid
    assert found.points == record(done[0]).points == len(done[1].points) < 40
    assert found.stopped == ""


def test_what_means_nothing_here_is_no_knob(done: tuple[Path, StandIn]) -> None:
    found = only(done[0])
    assert found.left_out["distributed.bucket_cap_mb"] == "25, 8, 100 are the same here"
    assert found.left_out["streams.compute"] == "it concerns GPUs only"
    assert set(found.knobs) | set(found.left_out) == set(PARAMS)
    assert {point["distributed"]["bucket_cap_mb"] for point in done[1].points} == {25.0}


def test_the_answer_can_be_pasted_and_points_are_named_by_what_tells_them_apart(done: tuple[Path, StandIn]) -> None:
    best = ["fsdp.forward_prefetch=1", "fsdp.reshard_after_forward=false"]
    assert pasted(only(done[0])).split() == ["python", "launch.py", *TINY, *best]
    assert any(f"fsdp2_{'_'.join(best)}_" in name for name in results(done[0]))


def test_all_is_printed_again_from_the_directory(
    done: tuple[Path, StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    print_knob_searches(read_records(done[0]).knobs, done[0], Console(width=400))
    printed = capsys.readouterr().out
    assert "ranking_tiny fsdp2 step on 2 ranks: 9," in printed
    assert "fsdp.reshard_after_forward" in printed
    assert not read_records(done[0] / next(iter(results(done[0])))).knobs


def test_a_search_that_stopped_early_says_so_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(searched(tmp_path, "search.max_points=6", params=FEW).points) == record(tmp_path).points == 6
    assert only(tmp_path).stopped
    assert "Stopped early: search.max_points=6 is used up" in capsys.readouterr().out
    second = searched(tmp_path, params=FEW)
    whole = record(tmp_path)
    assert (whole.reused, len(second.points)) == (6, whole.points - 6)
    assert only(tmp_path).best == {"fsdp.forward_prefetch": "1", "fsdp.reshard_after_forward": "false"}
    assert searched(tmp_path, params=FEW).points == []
    assert record(tmp_path).reused == record(tmp_path).points == whole.points
    assert record(tmp_path).searches == whole.searches


def test_no_time_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    searched(tmp_path, "search.max_minutes=0")
    assert only(tmp_path).time_us is None
    assert "no answer: search.max_minutes=0 is used up" in capsys.readouterr().out


def test_what_the_user_sweeps_wins_and_what_is_no_knob_makes_searches(tmp_path: Path) -> None:
    swept = ("fsdp.forward_prefetch=false,2", "distributed.dp_size=2,4")
    searched(tmp_path, *swept, params={"fsdp.forward_prefetch": "false,1,2"})
    small, large = record(tmp_path).searches
    assert (small.label, large.label) == ("ranking_tiny fsdp2 step on 2 ranks", "ranking_tiny fsdp2 step on 4 ranks")
    assert small.knobs["fsdp.forward_prefetch"] == large.knobs["fsdp.forward_prefetch"] == ["false", "2"]
    assert small.best["fsdp.forward_prefetch"] == "2"
    assert "distributed.dp_size=4" in large.overrides
    assert small.points + large.points == record(tmp_path).points


def test_a_single_value_of_the_user_s_is_taken_everywhere(tmp_path: Path) -> None:
    launcher = searched(tmp_path, "fsdp.forward_prefetch=2", params=FEW)
    assert {point["fsdp"]["forward_prefetch"] for point in launcher.points} == {2}
    assert "fsdp.forward_prefetch=2" in pasted(only(tmp_path))
    assert only(tmp_path).best == {"fsdp.reshard_after_forward": "false"}


def test_each_strategy_is_searched_by_the_knobs_that_it_has(tmp_path: Path) -> None:
    params = {"fsdp.forward_prefetch": "false,1", "distributed.bucket_cap_mb": "25,100"}
    launcher = searched(tmp_path, "distributed.strategy=fsdp2,ddp", params=params)
    fsdp2, ddp = record(tmp_path).searches
    assert fsdp2.best == {"fsdp.forward_prefetch": "1"}
    assert ddp.best == {"distributed.bucket_cap_mb": "100"}
    assert ddp.refused["fsdp.forward_prefetch changes nothing under DDP"] > 0
    assert all(result.status == "ok" for result in results(tmp_path).values())
    of_ddp = [point for point in launcher.points if point["backend"] == "ddp"]
    assert {point["fsdp"]["forward_prefetch"] for point in of_ddp} == {0}


def test_a_limit_is_shared_by_the_searches(tmp_path: Path) -> None:
    searched(tmp_path, "distributed.dp_size=2,4", "search.max_points=8", params=FEW)
    first, second = record(tmp_path).searches
    assert 0 < first.points <= 4
    assert first.points <= second.points <= 8 - first.points


def test_more_work_is_compared_by_the_time_of_as_many_samples(tmp_path: Path) -> None:
    """Twice the batch in 1.8 times the time."""

    def batch(point: Mapping[str, Any]) -> Result:
        return training_result(point, 10_000.0 * (1.8 if point["training"]["batch_size"] == 8 else 1.0))

    searched(tmp_path, answer=batch, params={"training.batch_size": "4,8"})
    found = only(tmp_path)
    assert found.best == {"training.batch_size": "8"}
    assert found.gain
    assert found.gain.share == pytest.approx(0.1, abs=0.01)


def test_what_fails_is_told_and_not_launched_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def no_memory(point: Mapping[str, Any]) -> Result:
        if not point["fsdp"]["reshard_after_forward"]:
            return Result(name="", point=dict(point), status="failed", error="CUDA out of memory\nmore")
        return answer(point)

    launcher = searched(tmp_path, answer=no_memory, params=FEW)
    assert sum(not point["fsdp"]["reshard_after_forward"] for point in launcher.points) == 1
    assert "fsdp.reshard_after_forward=false failed: CUDA out of memory" in capsys.readouterr().out
    assert only(tmp_path).best == {"fsdp.forward_prefetch": "1"}


def test_an_operator_s_knobs_can_be_searched_too_by_an_experiment_of_the_user_s(tmp_path: Path) -> None:
    def operator(point: Mapping[str, Any]) -> Result:
        shares = {1: 0.9, 2: 0.8, 4: 0.95}
        return operator_result(point, lambda _, of_slot: shares[next(iter(of_slot.values()))["num_sm"]])

    fixed = ("+experiment=four_operators", "tp_size=2", "operator=fc2", "method=ring_exchange", *ON_CPU)
    searched(tmp_path, answer=operator, fixed=fixed, params={"num_sm": "4,1,2"})
    found = only(tmp_path)
    assert found.best == {"num_sm": "2"}
    assert found.gain
    assert found.gain.share == pytest.approx(1 - 0.8 / 0.95, abs=0.01)
    # The experiment is kept in what is pasted.
    assert pasted(found).split()[2:] == [*fixed, "hydra.mode=RUN", "num_sm=2"]


@pytest.mark.parametrize(
    ("overrides", "params", "says"),
    [
        ((), {}, "there is nothing to search: give a knob several values"),
        (("fsdp.forward_prefetch=1,sideways",), {}, "fsdp.forward_prefetch=sideways is neither"),
        (("distributed.bucket_cap_mb=25,50",), {}, "nothing to search: distributed.bucket_cap_mb: 25, 50 are"),
        (("fsdp.replicas=3,1",), {}, "nothing to search: the baseline: distributed.dp_size=2 does not divide"),
        (("repetition=0,1",), FEW, "repetition is what a search itself sets"),
        (("search.reach=0.1,0.2",), FEW, "search.reach=0.1,0.2 would be several searches"),
    ],
)
def test_what_cannot_be_searched_is_said_before_anything_is_launched(
    tmp_path: Path, overrides: tuple[str, ...], params: Mapping[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        searched(tmp_path / "sweep", *overrides, params=params)
    assert not (tmp_path / "sweep").exists()


def test_a_range_is_counted_out(tmp_path: Path) -> None:
    searched(tmp_path, "fsdp.forward_prefetch=range(0,3)", "search.max_points=1", params={})
    assert only(tmp_path).knobs == {"fsdp.forward_prefetch": ["0", "1", "2"]}


def test_layers_and_kernels_have_no_one_time_to_compare(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="knobs are searched for workload=fsdp and operator, not for layer"):
        searched(tmp_path, fixed=("workload=layer", *ON_CPU), params={"num_sm": "1,2"})


def test_a_real_search_ends_with_an_answer_and_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "search")
    small = ("training.max_steps=2", "training.batch_size=1", "ranking.num_layers=2", "ranking.sequence_length=8")
    quick = ("workload.repeats=3", "workload.steps=1", "telemetry.sample_interval_s=0", "search.max_points=3")
    command = ("-m", "+experiment=fsdp_overlap", *TINY[1:3], *small, *quick, "fsdp.backward_prefetch=BACKWARD_PRE")
    done = launch.run(*command)
    assert done.returncode == 0, done.stderr
    assert {result.status for result in launch.results().values()} == {"ok"}
    found = only(launch.directory)
    assert found.points == len(launch.results()) <= 3
    assert found.time_us is not None
    assert {"workload=fsdp", "model=ranking_tiny", "training.batch_size=1"} <= set(pasted(found).split())
    assert f"{found.label}: " in done.stdout
    assert "Stopped early: " in done.stdout
    again = launch.run(*command)
    assert again.returncode == 0, again.stderr
    assert record(launch.directory).reused == found.points
    assert only(launch.directory).best == found.best
