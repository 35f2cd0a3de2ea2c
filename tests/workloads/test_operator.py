from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep import space
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import operator
from tests.points import gpu_point, operator_point


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"precision": "fp32"}, 1e-4),
        ({"precision": "fp16"}, 2e-2),
        ({"precision": "bf16"}, 2e-2),
        ({"precision": "fp8_delayed"}, 2e-2),
        ({"precision": "fp8_delayed", "operator": "fc2", "method": "pipeline", "fp8_buf": True}, 0.2),
        ({"precision": "fp8_delayed", "operator": "fc2", "method": "pipeline", "fp8_buf": False}, 2e-2),
        # Gathered in FP8, which rounds no sum.
        (
            {
                "precision": "fp8_delayed",
                "operator": "fc2",
                "phase": "dgrad",
                "method": "ring_exchange",
                "fp8_buf": True,
            },
            2e-2,
        ),
        ({"precision": "bf16", "workload": {"tolerance": 0.0}}, 0.0),
        ({"operator": "fc2", "method": "pipeline", "fp8_buf": True, "workload": {"tolerance": 0.01}}, 0.01),
    ],
)
def test_tolerance(changes: dict[str, Any], allowed: float) -> None:
    assert space.tolerance(operator_point(**changes)) == allowed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"operator": "fc2"}, "does not fit"),
        ({"tp_size": 3}, "do not divide"),
        ({"cga_size": 2}, "backend=torch has no cga_size on cpu"),
        ({"set_sm_margin": True}, "backend=torch has no set_sm_margin on cpu"),
        ({"method": "ring_exchange", "use_ce": True}, "backend=torch has no use_ce on cpu"),
        ({"method": "ring_exchange", "atomic_gemm": True}, "backend=torch has no atomic_gemm on cpu"),
        ({"operator": "fc2", "method": "pipeline", "fp8_buf": False}, "backend=torch has no fp8_buf on cpu"),
        ({"precision": "fp8_delayed"}, "backend=torch has no precision=fp8_delayed; it has fp32, fp16, bf16"),
        ({"precision": "fp8_current", "method": "none"}, "backend=torch has no precision=fp8_current"),
    ],
)
def test_what_is_refused_before_a_process_starts(changes: dict[str, Any], says: str) -> None:
    assert operator.refusal(operator_point()) is None
    assert says in str(operator.refusal(operator_point(**changes)))


def test_a_knob_that_means_nothing_under_the_method_refuses_nothing() -> None:
    assert operator.refusal(operator_point(method="none", cga_size=2, use_ce=True)) is None
    assert operator.refusal(operator_point(method="bulk", use_ce=True)) is None


def test_nccl_has_clusters() -> None:
    assert operator.refusal(operator_point(cga_size=2, runtime={"device": "cuda"})) is None


def test_pairs_of_an_odd_number_of_ranks_are_refused() -> None:
    odd = operator_point(
        tp_size=3,
        method="ring_exchange",
        aggregate=True,
        model={"ffn_hidden_size": 96},
        workload={"tokens": 66},
    )
    assert "odd" in str(operator.refusal(odd))


def test_the_settings_are_the_whole_points() -> None:
    settings = {"method": "bulk", "num_sm": 4}
    config = OverlapConfig({"fc1_dgrad": settings, "fc1_wgrad": settings}, switches={})
    assert operator.overlap_configs(operator_point()) == {"": config}


def test_knobs_left_null_get_their_meaning_and_others_stay() -> None:
    asked = {**gpu_point(method="pipeline", cga_size=1), "layer": {"kind": "linear"}}
    done = operator.complete(asked)
    assert (done["cga_size"], done["set_sm_margin"], done["num_splits"], done["use_ce"]) == (1, True, 4, None)
    assert "layer" not in done
    assert asked["num_splits"] is None


def test_auto_on_a_cpu_is_torch_which_has_no_defaults() -> None:
    asked = operator_point(backend="auto", method="ring_exchange")
    assert operator.complete(asked) == {**asked, "backend": "torch"}
