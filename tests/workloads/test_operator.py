from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep import space
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import operator
from tests.points import gpu_point, operator_point

FP8_SUMS = {"precision": "fp8_delayed", "operator": "fc2", "method": "pipeline"}


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"precision": "fp32"}, 1e-4),
        ({"precision": "fp16"}, 2e-2),
        ({"precision": "bf16"}, 2e-2),
        ({"precision": "fp8_delayed"}, 2e-2),
        ({**FP8_SUMS, "fp8_buf": True}, 0.2),
        ({**FP8_SUMS, "fp8_buf": False}, 2e-2),
        # Gathered in FP8, which rounds no sum.
        ({**FP8_SUMS, "phase": "dgrad", "method": "ring_exchange", "fp8_buf": True}, 2e-2),
        ({"precision": "bf16", "workload": {"tolerance": 0.0}}, 0.0),
        ({"operator": "fc2", "method": "pipeline", "fp8_buf": True, "workload": {"tolerance": 0.01}}, 0.01),
    ],
)
def test_tolerance(changes: dict[str, Any], allowed: float) -> None:
    assert space.tolerance(operator_point(**changes)) == allowed


ODD = {"tp_size": 3, "model": {"ffn_hidden_size": 96}, "workload": {"tokens": 66}}
ON_GPUS = {"runtime": {"device": "cuda"}}
SYMM_MEM = {"backend": "symm_mem", **ON_GPUS}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"operator": "fc2"}, "does not fit"),
        ({"tp_size": 3}, "do not divide"),
        ({"cga_size": 2}, "backend=torch has no cga_size on cpu"),
        # NCCL has clusters.
        ({"cga_size": 2, **ON_GPUS}, None),
        ({"set_sm_margin": True}, "backend=torch has no set_sm_margin on cpu"),
        ({"method": "ring_exchange", "use_ce": True}, "backend=torch has no use_ce on cpu"),
        ({"method": "ring_exchange", "atomic_gemm": True}, "backend=torch has no atomic_gemm on cpu"),
        ({"operator": "fc2", "method": "pipeline", "fp8_buf": False}, "backend=torch has no fp8_buf on cpu"),
        # A knob that means nothing under the method.
        ({"method": "none", "cga_size": 2, "use_ce": True}, None),
        ({"method": "bulk", "use_ce": True}, None),
        ({"precision": "fp8_delayed"}, "backend=torch has no precision=fp8_delayed; it has fp32, fp16, bf16"),
        ({"precision": "fp8_current", "method": "none"}, "backend=torch has no precision=fp8_current"),
        ({**ODD, "method": "ring_exchange", "aggregate": True}, "odd"),
        (SYMM_MEM, None),
        ({"backend": "symm_mem"}, "backend=symm_mem copies from GPU to GPU, and runtime.device is cpu"),
        ({**SYMM_MEM, "precision": "fp8_delayed"}, "symm_mem has no precision=fp8_delayed; it has fp32, fp16, bf16"),
        ({**SYMM_MEM, "operator": "fc2", "method": "pipeline"}, "no pipeline, which fc2_fprop is given; it has ring_e"),
        ({**SYMM_MEM, "method": "ring_exchange", "aggregate": True}, "symm_mem has no aggregate; its methods have no"),
        ({**SYMM_MEM, "cga_size": 2, "set_sm_margin": True}, "backend=symm_mem has no cga_size, set_sm_margin; its"),
        ({**SYMM_MEM, "tp_size": 1}, "tp_size=1 communicates nothing that could overlap; its only method is none"),
        ({**SYMM_MEM, "workload": {"tokens": 129}}, "129 tokens do not divide by tp_size=2"),
    ],
)
def test_what_is_refused_before_a_process_starts(changes: dict[str, Any], says: str | None) -> None:
    reason = operator.refusal(operator_point(**changes))
    assert reason is None if says is None else says in str(reason)


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
