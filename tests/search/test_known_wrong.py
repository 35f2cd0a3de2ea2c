"""What is known to compute wrong numbers: from the backend's list, from points, for equal machines only."""

from dataclasses import replace
from typing import Any

import pytest

from overlap_sweep.overlap import space
from overlap_sweep.results.run_directory import Result
from overlap_sweep.search.known_wrong import KnownWrong
from tests.make_point import ENVIRONMENT, resolved

BY_SMS: space.Setting = {"method": "ring_exchange", "num_sm": 16, "use_ce": False, "aggregate": False}
BY_COPIES: space.Setting = {**BY_SMS, "use_ce": True}
PIPELINE: space.Setting = {"method": "pipeline", "num_sm": 16, "num_splits": 4}
OTHER_MACHINE = {**ENVIRONMENT, "driver": "590.0"}


def installed(version: str) -> dict[str, Any]:
    return {**ENVIRONMENT, "packages": {"transformer-engine": version}}


@pytest.mark.parametrize(
    ("slot", "setting", "version", "changes", "wrong"),
    [
        ("fc1_fprop", BY_SMS, "2.20.2", {}, True),
        ("fc2_dgrad", BY_SMS, "2.20.2", {"precision": "fp8_delayed"}, True),
        ("fc1_fprop", BY_COPIES, "2.20.2", {}, False),
        ("fc1_dgrad", PIPELINE, "2.20.2", {}, True),
        ("fc1_dgrad", PIPELINE, "2.20.2", {"precision": "fp8_delayed"}, False),
        ("fc2_fprop", PIPELINE, "2.20.2", {}, False),
        # A later version is tried.
        ("fc1_fprop", BY_SMS, "2.21.0", {}, False),
        # With multicast it is another algorithm.
        ("fc1_fprop", BY_SMS, "2.20.2", {"runtime": {"multicast": True}}, False),
        ("fc1_fprop", BY_SMS, "2.20.2", {"backend": "torch"}, False),
    ],
)
def test_the_list_of_transformer_engine(
    slot: str, setting: space.Setting, version: str, changes: dict[str, Any], wrong: bool
) -> None:
    reason = KnownWrong().reason(resolved("operator", **changes), {slot: setting}, installed(version))
    assert (reason is not None) == wrong
    if reason:
        assert version in reason


def wrong_result(settings: dict[str, space.Setting], tensors: tuple[str, ...] = ("input_grad",)) -> Result:
    point = resolved("operator", operator=next(iter(settings)).partition("_")[0])
    error: dict[str, float | None] = {**dict.fromkeys(tensors, 1.5), "weight_grad": 1e-4}
    return Result(
        name="p", recorded=point, status="failed", settings=settings, relative_error=error, environment=ENVIRONMENT
    )


def test_what_a_point_found_holds_for_operators_and_schedules_alike() -> None:
    known = KnownWrong()
    known.learn([wrong_result({"fc1_dgrad": PIPELINE})])
    point = resolved("operator", **{"model.name": "another"})

    def is_known(slot: str, environment: Any = ENVIRONMENT, **changes: Any) -> bool:
        setting = {**PIPELINE, **changes.pop("setting", {})}
        return known.reason(replace(point, **changes), {slot: setting}, environment) is not None

    assert is_known("fc1_dgrad")
    assert is_known("qkv_dgrad", setting={"num_sm": 4, "num_splits": 2, "set_sm_margin": False})
    assert not is_known("qkv_dgrad", setting={"fp8_buf": True})
    assert not is_known("fc2_fprop")
    assert not is_known("qkv_dgrad", precision="fp8_delayed")
    assert not is_known("qkv_dgrad", environment=OTHER_MACHINE)
    assert is_known("qkv_dgrad", backend="megatron")
    assert not is_known("qkv_dgrad", backend="torch")


def test_nothing_is_learnt_from_points_that_leave_open_which_pass_is_wrong() -> None:
    known = KnownWrong()
    both = {"fc1_fprop": BY_COPIES, "fc1_dgrad": PIPELINE}
    layer = Result(
        name="l", recorded=resolved("layer"), status="failed", relative_error={"x output": 1.0}, environment=ENVIRONMENT
    )
    crashed = Result(name="p", recorded=resolved("operator"), status="failed", settings=both, environment=ENVIRONMENT)
    known.learn([wrong_result(both, ("output", "input_grad")), crashed, layer])
    assert known.reason(resolved("operator"), {"fc1_dgrad": PIPELINE}, ENVIRONMENT) is None
    # Of a wrong gradient the forward pass is innocent.
    known.learn([wrong_result(both)])
    assert known.reason(resolved("operator"), {"fc1_dgrad": PIPELINE}, ENVIRONMENT) is not None
    assert known.reason(resolved("operator"), {"fc1_fprop": BY_COPIES}, ENVIRONMENT) is None


def test_what_is_wrong_by_the_users_own_tolerance_is_not_wrong_for_others() -> None:
    strict = wrong_result({"fc1_dgrad": PIPELINE})
    strict.point.workload.tolerance = 1e-9
    known = KnownWrong()
    known.learn([strict])
    assert known.reason(resolved("operator"), {"fc1_dgrad": PIPELINE}, ENVIRONMENT) is None
