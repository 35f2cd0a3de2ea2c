"""Bytes within and between nodes, of shardings that can be computed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_sweep.workloads.fsdp.config import Resolved
from overlap_sweep.workloads.fsdp.node_traffic import NodeTraffic, node_traffic, traffic_of
from tests.make_point import resolved

SIZE = 1600.0
"""Bytes of the parameters, and of the gradients."""


@pytest.mark.parametrize(
    ("sharding", "within", "between"),
    [
        # Three collectives, of 7/8 each; one of four ranks of a node sends to the other node.
        ({"ranks": 8, "nodes": 2}, 3 * 1400 * 3 / 4, 3 * 1400 / 4),
        ({"ranks": 8, "nodes": 2, "reshard_after_forward": False}, 2 * 1400 * 3 / 4, 2 * 1400 / 4),
        ({"ranks": 8, "nodes": 2, "micro_batches": 4}, 9 * 1400 * 3 / 4, 9 * 1400 / 4),
        # All-gathers and reduce-scatter within the node; twice half of a quarter of the gradients between.
        ({"ranks": 8, "nodes": 2, "replicas": 2}, 3 * 1200, 400),
        # The backward pass gathers within the node.
        ({"ranks": 8, "nodes": 2, "reshard_after_forward": 4}, 2 * 1400 * 3 / 4 + 1200, 2 * 1400 / 4),
        # Two replicas on each node: only half of the all-reduce's ring is between nodes.
        ({"ranks": 8, "nodes": 2, "replicas": 4}, 3 * 800 + 2 * 800 * 3 / 4 / 2, 2 * 800 * 3 / 4 / 2),
        # DDP: nothing but an all-reduce.
        ({"ranks": 8, "nodes": 2, "replicas": 8}, 2 * 1400 * 3 / 4, 2 * 1400 / 4),
        # The middle one of three replicas has a rank on either node.
        ({"ranks": 6, "nodes": 2, "replicas": 3}, 3 * 800 * 4 / 6 + 2 * 800 * 2 / 3 * 2 / 6, None),
        ({"ranks": 2, "nodes": 2}, 0, 3 * 800),
        ({"ranks": 8, "nodes": 1}, 3 * 1400, 0),
        ({"ranks": 1, "nodes": 1}, 0, 0),
    ],
)
def test_bytes_of_a_sharding(sharding: dict[str, Any], within: float, between: float | None) -> None:
    traffic = node_traffic(parameter_bytes=SIZE, gradient_bytes=SIZE, **sharding)
    total = 3 * 800 + 2 * 800 * 2 / 3 if between is None else within + between
    assert traffic.within_node == pytest.approx(within)
    assert traffic.within_node + traffic.between_nodes == pytest.approx(total)


def test_a_replica_on_each_node_sends_least_between_nodes() -> None:
    sent = {
        replicas: node_traffic(parameter_bytes=SIZE, gradient_bytes=SIZE, ranks=32, nodes=4, replicas=replicas)
        for replicas in (1, 2, 4, 8, 32)
    }
    assert min(sent, key=lambda replicas: sent[replicas].between_nodes) == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # bf16: 200 bytes of 100 parameters.
        ({}, NodeTraffic(3 * 150 / 2, 3 * 150 / 2)),
        ({"fsdp.reduce_dtype": "fp32"}, NodeTraffic(600 / 2, 600 / 2)),
        ({"training.gradient_accumulation": 2}, NodeTraffic(5 * 150 / 2, 5 * 150 / 2)),
        ({"fsdp.replicas": 2}, NodeTraffic(3 * 100, 100)),
        # float32, whatever autocast computes in.
        ({"distributed.strategy": "ddp"}, NodeTraffic(2 * 300 / 2, 2 * 300 / 2)),
        (
            {"distributed.strategy": "ddp", "distributed.overlap_reduce_scatter": True},
            NodeTraffic(3 * 300 / 2, 3 * 300 / 2),
        ),
    ],
)
def test_bytes_of_a_point_on_two_nodes(changes: dict[str, Any], expected: NodeTraffic) -> None:
    found = traffic_of(msgspec.convert(resolved("fsdp", **{"runtime.nodes": 2}, **changes), Resolved), 100)
    assert found is not None
    assert (found.within_node, found.between_nodes) == pytest.approx((expected.within_node, expected.between_nodes))


def test_a_point_on_one_node_has_none() -> None:
    assert traffic_of(msgspec.convert(resolved("fsdp"), Resolved), 100) is None
