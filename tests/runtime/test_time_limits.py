"""How long a point may take."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.results.run_directory import Result, Status
from overlap_sweep.runtime.point import LEAST_LIMIT_S, TimeLimits
from tests.make_point import layer_point, operator_point, resolved


def limits_after(*walls: float, of: dict[str, Any] | None = None, status: Status = "ok", **more: Any) -> TimeLimits:
    limits = TimeLimits()
    for wall_s in walls:
        limits.learn(Result(name="p", recorded=of or operator_point(), status=status, wall_s=wall_s, **more))
    return limits


@given(walls=st.lists(st.floats(0.01, 10_000), max_size=5), timeout_s=st.floats(1, 86400), factor=st.floats(0, 10**4))
def test_the_longest_counts_between_the_least_limit_and_what_the_user_allows(
    walls: list[float], timeout_s: float, factor: float
) -> None:
    point = operator_point(runtime={"timeout_s": timeout_s, "timeout_factor": factor})
    expected = min(timeout_s, max(LEAST_LIMIT_S, factor * max(walls))) if walls and factor else timeout_s
    assert math.isclose(limits_after(*walls, of=point).limit_s(point), expected)


OF_OPERATORS: list[dict[str, Any]] = [
    *({"tp_size": 4}, {"operator": "fc2"}, {"workload": {"tokens": 4096}}, {"workload": {"repeats": 1000}}),
    *({"model": {"name": "a larger one"}}, {"precision": "bf16"}, {"runtime": {"device": "cuda"}}),
]
OF_TRAINING: list[dict[str, Any]] = [
    *({"training.max_steps": 300}, {"training.batch_size": 32}, {"training.gradient_accumulation": 4}),
    *({"distributed.dp_size": 8}, {"distributed.strategy": "ddp"}, {"compile.enabled": True}),
    {"profiling.enabled": True},
]
LAYER = layer_point(backend="torch", precision="fp32", runtime={"device": "cpu"})
OF_COPIES = ({"copy_mb": 1024.0}, {"direction": "peer"}, {"copies": 300})


@pytest.mark.parametrize(
    ("measured", "alike", "others"),
    [
        (operator_point(), operator_point(num_sm=8), [operator_point(**changes) for changes in OF_OPERATORS]),
        (
            operator_point(),
            operator_point(num_sm=8),
            [layer_point(backend="torch", precision="fp32", runtime={"device": "cpu"})],
        ),
        (
            *(resolved("fsdp", **{"fsdp.forward_prefetch": 1}), resolved("fsdp")),
            [resolved("fsdp", **changes) for changes in OF_TRAINING],
        ),
        (*[resolved("copy_engine")] * 2, [resolved("copy_engine", copy_engine=changes) for changes in OF_COPIES]),
    ],
    ids=["operator", "layer", "fsdp", "copy_engine"],
)
def test_points_of_another_kind_say_nothing(
    measured: ResolvedPoint, alike: ResolvedPoint, others: list[ResolvedPoint]
) -> None:
    limits = limits_after(5.0, of=measured)
    assert limits.limit_s(alike) == 50.0
    assert {limits.limit_s(other) for other in others} == {300.0}


@pytest.mark.parametrize(
    "more", [{"status": "failed"}, {"status": "timeout"}, {"status": "skipped"}, {"reused_from": "a store"}]
)
def test_only_what_was_measured_here_counts(more: dict[str, Any]) -> None:
    assert limits_after(5.0, **more).limit_s(operator_point()) == 300.0
