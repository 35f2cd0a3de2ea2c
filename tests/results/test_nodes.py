"""The nodes of points: where their traces are from, and what is not compared."""

from pathlib import Path

from overlap_sweep.results.nodes import on_nodes, ranks_of_each, ranks_of_each_trace
from overlap_sweep.results.points import read_points
from overlap_sweep.results.provenance import describe_machine
from overlap_sweep.workloads.fsdp.runs import Run
from tests.make_point import ENVIRONMENT, make_point, resolved, stack_config

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


def test_runs_with_telemetry_say_that_their_nodes_differ(tmp_path: Path) -> None:
    folder = make_point("fsdp", tmp_path, resolved("fsdp", **TWO))
    (point,) = read_points(folder).points
    assert Run("run", point.directory, {}, point).settings["runtime.nodes"] == 2


def test_all_hosts_are_named() -> None:
    assert describe_machine({**ENVIRONMENT, "hosts": ["node7", "node9"]}).startswith("node7 and node9; ")
    assert describe_machine(ENVIRONMENT).startswith("node7; ")
