"""The nodes of points: where their traces are from, and what is not compared."""

from pathlib import Path

import msgspec
import pytest

from overlap_sweep.compare.sweeps import compare_sweeps, read_dataset
from overlap_sweep.results.points import read_points
from overlap_sweep.results.provenance import describe_machine
from overlap_sweep.results.run_directory import Environment
from overlap_sweep.results.traces import on_nodes, ranks_of_each, ranks_of_each_trace
from overlap_sweep.study.analysis import analyse
from overlap_sweep.workloads.fsdp.runs import Run
from overlap_sweep.workloads.fsdp.study import STUDY
from tests.make_point import ENVIRONMENT, kernel_config, layer_config, make_point, resolved, stack_config

TWO = {"runtime.nodes": 2}


def test_ranks_of_a_node_follow_from_the_point() -> None:
    assert ranks_of_each(resolved("fsdp", **{**TWO, "distributed.dp_size": 16})) == 8
    assert ranks_of_each(stack_config("megatron", 2, 4, **TWO)) == 4
    for nodes in (None, 1):
        assert ranks_of_each(resolved("fsdp", **{"runtime.nodes": nodes})) is None
    assert (on_nodes(1), on_nodes(3)) == ("", " over 3 nodes")


def test_traces_next_to_a_result_have_its_nodes(tmp_path: Path) -> None:
    two, one = (make_point("fsdp", tmp_path, resolved("fsdp", **changes)) for changes in (TWO, {}))
    traces = [folder / f"trace_rank{rank}.json.gz" for folder in (two, one, tmp_path) for rank in (0, 1)]
    found, problems = ranks_of_each_trace(traces)
    assert found == {two / "trace_rank0.json.gz": 2, two / "trace_rank1.json.gz": 2}
    assert problems == []
    (two / "result.json").write_text("{")
    found, (problem,) = ranks_of_each_trace(traces)
    assert found == {}
    assert problem.startswith(f"{two / 'result.json'} cannot be read")
    assert problem.endswith("unknown.")


@pytest.mark.parametrize("workload", ["fsdp", "tp_training", "layer", "kernel", "job"])
def test_equal_points_on_other_nodes_are_other_cases(tmp_path: Path, workload: str) -> None:
    for name, changes in (("one", {}), ("two", TWO)):
        make_point(workload, tmp_path, resolved(workload, **changes), name=name)
    one, two = read_points(tmp_path).points
    assert (one.case.nodes, two.case.nodes) == (1, 2)
    assert one.case == two.case._replace(nodes=1)
    assert one.case.name != two.case.name
    assert "nodes" not in str(one.case) + one.case.name
    assert "2 nodes" in str(two.case)


def test_training_on_other_nodes_is_not_pooled(tmp_path: Path) -> None:
    for step_us, changes in ((1500.0, {}), (1400.0, {"runtime.nodes": 1}), (2500.0, TWO)):
        make_point("fsdp", tmp_path, resolved("fsdp", **changes), step_us=step_us)
    analyses = analyse(STUDY, read_points(tmp_path).points)
    assert sorted((one.case.nodes, len(one.rows), len(one.points)) for one in analyses) == [(1, 1, 2), (2, 1, 1)]


@pytest.mark.parametrize(("workload", "config"), [("layer", layer_config), ("kernel", kernel_config)])
def test_sweeps_of_other_nodes_match_only_as_such(tmp_path: Path, workload: str, config: object) -> None:
    assert callable(config)
    for name, changes in (("one", {}), ("two", TWO)):
        make_point(workload, tmp_path / name, config(**changes))
    datasets = [read_dataset(name, tmp_path / name) for name in ("one", "two")]
    found = compare_sweeps(datasets, "one")
    assert found.compared["nodes"] == {"one": [1], "two": [2]}
    # A sweep that has both is compared node by node.
    make_point(workload, tmp_path / "two", config())
    datasets = [read_dataset(name, tmp_path / name) for name in ("one", "two")]
    again = compare_sweeps(datasets, "one")
    assert "nodes" not in again.compared
    assert {match.ours.key.nodes for match in again.matches} == {1}
    assert again.case_fields == ["nodes"]


def test_runs_with_telemetry_say_that_their_nodes_differ(tmp_path: Path) -> None:
    folder = make_point("fsdp", tmp_path, resolved("fsdp", **TWO))
    (point,) = read_points(folder).points
    assert Run("run", point.directory, {}, point).settings["runtime.nodes"] == 2


def test_all_hosts_are_named() -> None:
    machine = msgspec.convert(ENVIRONMENT, Environment)
    assert describe_machine(msgspec.structs.replace(machine, hosts=["node7", "node9"])).startswith("node7 and node9; ")
    assert describe_machine(machine).startswith("node7; ")
