"""hydra/sweeper=knobs: whole searches with a launcher that makes the results up, and one with real processes."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from overlap_sweep.report.console import print_titled
from overlap_sweep.report.searches import knob_searches, pasted
from overlap_sweep.results.records import KnobRecord, KnobSearch, read_records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime import nodes
from overlap_sweep.search.knob_sweeper import sweep
from tests.make_point import made_result
from tests.search.stand_in import ON_CPU, StandIn, operator_result, results, sweep_of
from tests.sweeps import ROOT, Launch
from tests.workloads.job.commands import point as point_of

pytestmark = pytest.mark.end_to_end

EXPERIMENT = yaml.safe_load((ROOT / "conf" / "experiment" / "fsdp_overlap.yaml").read_text())
PARAMS = EXPERIMENT["hydra"]["sweeper"]["params"]
TINY = ("workload=fsdp", "model=ranking_tiny", "runtime.device=cpu", "profile=none")
FEW = {"fsdp.forward_prefetch": "false,1,2", "fsdp.reshard_after_forward": "true,false"}


def training_result(point: Mapping[str, Any], time_us: float) -> Result:
    run = {"step_us": time_us, "none_us": 12_000.0, "floor_us": 8_000.0, "spread_us": 0.003 * time_us}
    return made_result("fsdp", point, **run, objective_us=time_us, started=None)


def answer(point: Mapping[str, Any]) -> Result:
    """Prefetching and keeping parameters helps; with DDP, large buckets."""
    fsdp, distributed = point["fsdp"], point["distributed"]
    time_us = 10_000.0 - {0: 0, 1: 500, 2: 450}[fsdp["forward_prefetch"]] - 300 * (not fsdp["reshard_after_forward"])
    return training_result(point, time_us - 400 * (distributed["bucket_cap_mb"] == 100))


def searched(
    directory: Path,
    *overrides: str,
    answer: Callable[[Mapping[str, Any]], Result] = answer,
    params: Mapping[str, Any] = FEW,
    fixed: tuple[str, ...] = TINY,
) -> StandIn:
    """Run to the end."""
    single = [override for override in (*fixed, *overrides) if "," not in override]
    with sweep_of(directory, "hydra/sweeper=knobs", *single, answer=answer) as launcher:
        sweep(launcher.inputs(*fixed, *overrides, params=params))
        return launcher


def record(directory: Path) -> KnobRecord:
    return KnobRecord.read(directory / KnobRecord.FILE)


def only(directory: Path) -> KnobSearch:
    (found,) = record(directory).searches
    return found


def test_the_experiment_names_the_best_setting_and_what_each_knob_contributes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = searched(tmp_path, params=PARAMS)
    found = only(tmp_path)
    assert found.label == "ranking_tiny fsdp2 step on 2 ranks"
    assert found.best == {"fsdp.forward_prefetch": "1", "fsdp.reshard_after_forward": "false"}
    assert found.proven
    assert found.gain.share == pytest.approx(0.08, abs=0.01)
    assert {c.key: c.alone and c.alone.sure for c in found.contributions} == dict.fromkeys(found.best, True)
    assert found.settings < found.grid
    assert found.points == record(tmp_path).points == len(launcher.points) < 40
    assert found.stopped == ""
    # What means nothing here is never measured.
    assert found.refused["distributed.bucket_cap_mb has no effect under FSDP2"] > 0
    assert found.left_out["streams.compute"] == "it has an effect on GPUs only"
    assert set(found.knobs) | set(found.left_out) == set(PARAMS)
    assert {point["distributed"]["bucket_cap_mb"] for point in launcher.points} == {25.0}
    # The answer can be pasted, and points are named by what tells them apart.
    best = ["fsdp.forward_prefetch=1", "fsdp.reshard_after_forward=false"]
    assert pasted(found).split() == ["python", "launch.py", *TINY, *best]
    assert any("fsdp2_forward_prefetch=1_reshard_after_forward=false_" in name for name in results(tmp_path))
    # All is printed again from the directory.
    capsys.readouterr()
    print_titled(knob_searches(read_records(tmp_path).knobs, tmp_path), Console(width=400))
    printed = capsys.readouterr().out
    assert "ranking_tiny fsdp2 step on 2 ranks: 9," in printed
    assert "fsdp.reshard_after_forward" in printed
    assert not read_records(tmp_path / next(iter(results(tmp_path)))).knobs


def test_shardings_within_nodes_are_searched_on_several_nodes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "nodes_here", lambda: 2)
    of_nodes = {key: PARAMS[key] for key in ("fsdp.replicas", "fsdp.reshard_after_forward")}

    def answer(point: Mapping[str, Any]) -> Result:
        return training_result(point, 10_000.0 - 1_000 * (point["fsdp"]["replicas"] == 2))

    searched(tmp_path / "two", "runtime.nodes=2", "distributed.dp_size=4", answer=answer, params=of_nodes)
    found = only(tmp_path / "two")
    assert found.best == {"fsdp.replicas": "nodes"}
    assert found.knobs["fsdp.reshard_after_forward"] == ["true", "false", "node"]
    one = searched(tmp_path / "one", "distributed.dp_size=4", answer=answer, params=of_nodes)
    found = only(tmp_path / "one")
    assert found.knobs == {"fsdp.reshard_after_forward": ["true", "false"]}
    assert found.left_out == {"fsdp.replicas": "1, nodes are equivalent here"}
    assert {point["fsdp"]["replicas"] for point in one.points} == {1}


def test_a_search_that_stopped_early_says_so_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted_out = "fsdp.forward_prefetch=range(0,3)"
    searched(tmp_path, counted_out, "search.max_minutes=0")
    assert only(tmp_path).time_us is None
    assert "no answer: search.max_minutes=0 is used up" in capsys.readouterr().out
    assert len(searched(tmp_path, counted_out, "search.max_points=6").points) == record(tmp_path).points == 6
    assert only(tmp_path).stopped
    assert only(tmp_path).knobs["fsdp.forward_prefetch"] == ["0", "1", "2"]
    assert "Stopped early: search.max_points=6 is used up" in capsys.readouterr().out
    second = searched(tmp_path, counted_out)
    whole = record(tmp_path)
    assert (whole.reused, len(second.points)) == (6, whole.points - 6)
    assert only(tmp_path).best == {"fsdp.forward_prefetch": "1", "fsdp.reshard_after_forward": "false"}
    assert searched(tmp_path, counted_out).points == []
    assert record(tmp_path).reused == record(tmp_path).points == whole.points
    assert record(tmp_path).searches == whole.searches


def test_what_the_user_sweeps_wins_what_is_no_knob_makes_searches_and_they_share_a_limit(tmp_path: Path) -> None:
    swept = ("fsdp.forward_prefetch=false,2", "distributed.dp_size=2,4", "search.max_points=8")
    searched(tmp_path, *swept, params={"fsdp.forward_prefetch": "false,1,2"})
    small, large = record(tmp_path).searches
    assert (small.label, large.label) == ("ranking_tiny fsdp2 step on 2 ranks", "ranking_tiny fsdp2 step on 4 ranks")
    assert small.knobs["fsdp.forward_prefetch"] == large.knobs["fsdp.forward_prefetch"] == ["false", "2"]
    assert small.best["fsdp.forward_prefetch"] == "2"
    assert "distributed.dp_size=4" in large.overrides
    assert 0 < small.points <= 4
    assert small.points <= large.points <= 8 - small.points
    assert small.points + large.points == record(tmp_path).points


def test_the_first_value_is_the_baseline_even_if_it_is_not_the_default(tmp_path: Path) -> None:
    launcher = searched(tmp_path, params={"fsdp.forward_prefetch": "2,1"})
    assert only(tmp_path).best == {"fsdp.forward_prefetch": "1"}
    assert {point["fsdp"]["forward_prefetch"] for point in launcher.points} == {1, 2}
    assert pasted(only(tmp_path)).split()[-1] == "fsdp.forward_prefetch=1"


def test_placeholders_and_variables_of_a_command_are_knobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are no options of the configuration: without a value there is no command."""

    def job_result(point: Mapping[str, Any]) -> Result:
        values, env = point["job"]["values"], point["job"]["env"]
        time_us = 1000.0 * values["bucket"] - 500.0 * (env["QUEUES"] == 8) + 50 * (values["flag"] is not None)
        run = {"step_us": time_us, "spread_us": 0.002 * time_us}
        return made_result("job", point, **run, objective_us=time_us, started=None)

    fixed = ("workload=job", "runtime.device=cpu", "profile=none", 'job.command="python t.py {bucket} {flag}"')
    typed = ("+job.values.bucket=25,10,100", "+job.env.QUEUES=1,8", "+job.values.flag=null,'--a b'")
    launcher = searched(tmp_path, *typed, answer=job_result, params={}, fixed=fixed)
    found = only(tmp_path)
    assert found.best == {"+job.values.bucket": "10", "+job.env.QUEUES": "8"}
    assert found.proven
    assert found.left_out == {}
    assert {*found.knobs} == {"+job.values.bucket", "+job.env.QUEUES", "+job.values.flag"}
    # Every point has processes of its own, so all knobs are searched together.
    assert {point["job"]["env"]["QUEUES"] for point in launcher.batches[1]} == {1, 8}
    chosen = point_of(*shlex.split(pasted(found))[2:])["job"]
    assert (chosen["values"], chosen["env"]) == ({"bucket": 10, "flag": None}, {"QUEUES": 8})
    assert any(name.startswith("t.py_ranks1_bucket=10_QUEUES=8_") for name in results(tmp_path))


def test_a_single_value_of_the_user_s_is_taken_everywhere_and_what_fails_is_not_launched_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(point: Mapping[str, Any]) -> Result:
        if point["fsdp"]["forward_prefetch"] == 1:
            return Result(name="", recorded=dict(point), status="failed", error="CUDA out of memory\nmore")
        return answer(point)

    launcher = searched(tmp_path, "fsdp.reshard_after_forward=false", answer=no_memory)
    assert {point["fsdp"]["reshard_after_forward"] for point in launcher.points} == {False}
    assert "fsdp.reshard_after_forward=false" in pasted(only(tmp_path))
    assert only(tmp_path).best == {"fsdp.forward_prefetch": "2"}
    assert sum(point["fsdp"]["forward_prefetch"] == 1 for point in launcher.points) == 1
    assert "fsdp.forward_prefetch=1 failed: CUDA out of memory" in capsys.readouterr().out


def test_the_answer_is_pasted_with_what_made_the_baseline_fit(tmp_path: Path) -> None:
    def no_memory(point: Mapping[str, Any]) -> Result:
        if point["fsdp"]["reshard_after_forward"]:
            return answer(point)
        return Result(name="", recorded=dict(point), status="failed", error="OutOfMemoryError: CUDA out of memory")

    searched(tmp_path, answer=no_memory, params={**FEW, "fsdp.reshard_after_forward": "false,true"})
    found = only(tmp_path)
    assert (found.best, found.proven) == ({"fsdp.forward_prefetch": "1"}, True)
    assert found.baseline_us == pytest.approx(10_000, rel=0.01)
    assert found.overrides == [*TINY, "fsdp.reshard_after_forward=true"]
    best = ["fsdp.reshard_after_forward=true", "fsdp.forward_prefetch=1"]
    assert pasted(found).split() == ["python", "launch.py", *TINY, *best]


def test_each_strategy_is_searched_by_the_knobs_that_it_has(tmp_path: Path) -> None:
    params = {"fsdp.forward_prefetch": "false,1", "distributed.bucket_cap_mb": "25,100"}
    launcher = searched(tmp_path, "distributed.strategy=fsdp2,ddp", "search.repeats=2", params=params)
    fsdp2, ddp = record(tmp_path).searches
    assert fsdp2.best == {"fsdp.forward_prefetch": "1"}
    assert ddp.best == {"distributed.bucket_cap_mb": "100"}
    assert ddp.refused["fsdp.forward_prefetch has no effect under DDP"] > 0
    assert all(result.status == "ok" for result in results(tmp_path).values())
    of_ddp = [point for point in launcher.points if point["backend"] == "ddp"]
    assert {point["fsdp"]["forward_prefetch"] for point in of_ddp} == {0}


def test_more_work_is_compared_by_the_time_of_as_many_samples(tmp_path: Path) -> None:
    """Twice the batch in 1.8 times the time."""

    def batch(point: Mapping[str, Any]) -> Result:
        return training_result(point, 10_000.0 * (1.8 if point["training"]["batch_size"] == 8 else 1.0))

    searched(tmp_path, "search.repeats=2", answer=batch, params={"training.batch_size": "4,8"})
    found = only(tmp_path)
    assert found.best == {"training.batch_size": "8"}
    assert found.gain.share == pytest.approx(0.1, abs=0.01)


def test_an_operator_s_knobs_can_be_searched_too_by_an_experiment_of_the_user_s(tmp_path: Path) -> None:
    def operator(point: Mapping[str, Any]) -> Result:
        shares = {1: 0.9, 2: 0.8, 4: 0.95}
        return operator_result(point, lambda _, of_slot: shares[next(iter(of_slot.values()))["num_sm"]])

    fixed = ("+experiment=four_operators", "tp_size=2", "operator=fc2", "method=ring_exchange", *ON_CPU)
    searched(tmp_path, "search.repeats=2", answer=operator, fixed=fixed, params={"num_sm": "4,1,2"})
    found = only(tmp_path)
    assert found.best == {"num_sm": "2"}
    assert found.gain.share == pytest.approx(1 - 0.8 / 0.95, abs=0.01)
    # The experiment is kept in what is pasted.
    assert pasted(found).split()[2:] == [*fixed, "hydra.mode=RUN", "num_sm=2"]


def test_a_real_search_ends_with_an_answer_and_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "search")
    small = ("training.max_steps=2", "training.batch_size=1", "ranking.num_layers=2", "ranking.sequence_length=8")
    quick = ("workload.repeats=3", "workload.steps=1", "telemetry.sample_interval_s=0", "search.max_points=2")
    command = ("-m", "+experiment=fsdp_overlap", *TINY[1:3], *small, *quick, "fsdp.backward_prefetch=BACKWARD_PRE")
    done = launch.run(*command)
    assert done.returncode == 0, done.stderr
    assert {result.status for result in launch.results().values()} == {"ok"}
    found = only(launch.directory)
    assert found.points == len(launch.results()) <= 2
    assert found.time_us is not None
    assert {"workload=fsdp", "model=ranking_tiny", "training.batch_size=1"} <= set(pasted(found).split())
    assert f"{found.label}: " in done.stdout
    assert "Stopped early: " in done.stdout
    assert launch.run(*command).returncode == 0
    assert (record(launch.directory).reused, only(launch.directory).best) == (found.points, found.best)
