from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.run_directory import Result, Status
from overlap_sweep.runtime.limits import LEAST_S, TimeLimits
from tests.make_point import copy_config, resolved
from tests.points import layer_point, operator_point

seconds = st.floats(0.01, 10_000)


def measured(point: dict[str, Any], wall_s: float | None, status: Status = "ok", **more: Any) -> Result:
    return Result(name="p", point=point, status=status, wall_s=wall_s, **more)


def limits_after(*results: Result) -> TimeLimits:
    limits = TimeLimits()
    for result in results:
        limits.learn(result)
    return limits


@given(walls=st.lists(seconds, max_size=5), timeout_s=st.floats(1, 86400), factor=st.floats(0, 10**4))
def test_a_limit_is_between_its_least_and_what_the_user_allows(
    walls: list[float], timeout_s: float, factor: float
) -> None:
    point = operator_point(runtime={"timeout_s": timeout_s, "timeout_factor": factor})
    limit_s = limits_after(*(measured(point, wall_s) for wall_s in walls)).limit_s(point)
    assert min(timeout_s, LEAST_S) <= limit_s <= timeout_s
    if walls and factor >= 1:
        # What was measured once may take as long again.
        assert limit_s >= min(timeout_s, max(walls))
    if not walls or not factor:
        assert limit_s == timeout_s


@given(walls=st.lists(seconds, min_size=1, max_size=5), order=st.randoms())
def test_the_longest_counts_whatever_the_order(walls: list[float], order: Any) -> None:
    point = operator_point(runtime={"timeout_s": 86400.0})
    shuffled = sorted(walls, key=lambda _: order.random())
    limit_s = limits_after(*(measured(point, wall_s) for wall_s in shuffled)).limit_s(point)
    assert math.isclose(limit_s, min(86400.0, max(LEAST_S, 10 * max(walls))))


def test_after_quick_points_a_hanging_one_is_given_up_early() -> None:
    point = operator_point(num_sm=8)
    limits = limits_after(measured(operator_point(num_sm=4), 0.2))
    assert limits.limit_s(point) == LEAST_S
    limits.learn(measured(operator_point(num_sm=2), 5.0))
    assert limits.limit_s(point) == 50.0


@pytest.mark.parametrize(
    "other",
    [
        operator_point(tp_size=4),
        operator_point(operator="fc2"),
        operator_point(workload={"tokens": 4096}),
        operator_point(workload={"repeats": 1000}),
        operator_point(model={"name": "a larger one"}),
        operator_point(precision="bf16"),
        operator_point(runtime={"device": "cuda"}),
        layer_point(backend="torch", precision="fp32", runtime={"device": "cpu"}),
    ],
)
def test_points_of_another_kind_say_nothing(other: dict[str, Any]) -> None:
    limits = limits_after(measured(operator_point(), 0.2))
    assert limits.limit_s(other) == 300.0


@pytest.mark.parametrize(
    "result",
    [
        measured(operator_point(), 0.2, "failed"),
        measured(operator_point(), 0.2, "timeout"),
        measured(operator_point(), None, "skipped"),
        measured(operator_point(), 0.2, reused_from="a store: another machine"),
    ],
)
def test_only_what_was_measured_here_counts(result: Result) -> None:
    assert limits_after(result).limit_s(operator_point()) == 300.0


def test_training_runs_that_do_more_are_of_another_kind() -> None:
    limits = limits_after(measured(resolved("fsdp", **{"fsdp.forward_prefetch": 1}), 5.0))
    assert limits.limit_s(resolved("fsdp")) == 50.0
    more = {"max_steps": 300, "batch_size": 32, "gradient_accumulation": 4}
    others: list[dict[str, Any]] = [{f"training.{name}": value} for name, value in more.items()]
    others += [{"distributed.dp_size": 8}, {"distributed.strategy": "ddp"}]
    others += [{"compile.enabled": True}, {"profiling.enabled": True}]
    assert [limits.limit_s(resolved("fsdp", **changes)) for changes in others] == [300.0] * 7


def test_copies_of_a_size_are_of_a_kind() -> None:
    limits = limits_after(measured(copy_config(), 5.0))
    assert limits.limit_s(copy_config()) == 50.0
    assert limits.limit_s(copy_config(copy_mb=1024.0)) == limits.limit_s(copy_config("peer")) == 300.0
    many = copy_config()
    many["copy_engine"]["copies"] = 300
    assert limits.limit_s(many) == 300.0
