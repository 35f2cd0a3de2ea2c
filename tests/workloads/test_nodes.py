"""Which points may span nodes, by their placement alone."""

from typing import Any

import pytest

from overlap_sweep import workloads
from overlap_sweep.runtime.nodes import nodes_refusal
from tests.make_point import resolved


def why_one_node(workload: str, nodes: int, **changes: Any) -> str | None:
    return workloads.load(workload).on_one_node(resolved(workload, **{"runtime.nodes": nodes}, **changes))


@pytest.mark.parametrize(
    ("workload", "changes"),
    [
        ("fsdp", {"distributed.dp_size": 8}),
        ("job", {"job.ranks": 8}),
        ("tp_training", {"tp_size": 2, "dp_size": 4}),
        ("tp_training", {"tp_size": 4, "dp_size": 2, "impl": "megatron"}),
        ("layer", {"tp_size": 4, "layer.num_replicas": 2}),
        ("layer", {"tp_size": 1, "layer.num_replicas": 2}),
        ("kernel", {"tp_size": 4, "backend": "torch"}),
    ],
)
def test_points_that_may_span_two_nodes(workload: str, changes: dict[str, Any]) -> None:
    assert why_one_node(workload, 2, **changes) is None
    assert nodes_refusal(resolved(workload, **{"runtime.nodes": 2}, **changes)) is None


@pytest.mark.parametrize(
    ("workload", "changes", "reason"),
    [
        ("tp_training", {"tp_size": 4, "dp_size": 1}, "tp_size=4 does not fit the 2 ranks of a node"),
        ("tp_training", {"tp_size": 2, "dp_size": 3}, "tp_size=2 does not fit the 3 ranks of a node"),
        ("layer", {"tp_size": 2, "layer.num_replicas": 1}, "tp_size=2 does not fit the single rank of a node"),
        ("layer", {"tp_size": 4, "layer.num_replicas": 1}, "tp_size=4 does not fit the 2 ranks of a node"),
        ("kernel", {"tp_size": 4, "backend": "transformer_engine"}, "backend=transformer_engine run on one node"),
        ("kernel", {"tp_size": 4, "backend": "symm_mem"}, "backend=symm_mem run on one node"),
        ("kernel", {"tp_size": 4, "backend": "flux"}, "backend=flux run on one node"),
        ("operator", {}, "workload=operator runs on one node"),
        ("copy_engine", {}, "workload=copy_engine runs on one node"),
    ],
)
def test_points_that_must_be_on_one_node(workload: str, changes: dict[str, Any], reason: str) -> None:
    said = why_one_node(workload, 2, **changes)
    assert said
    assert reason in said
    assert "\n" not in said
