"""What keeps layers from their floor: made ones, of which it is known, and recorded ones, whose sums must hold."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from overlap_sweep.effects import Rest
from overlap_sweep.effects.rests import Spent, rests, spent_of
from overlap_sweep.effects.runs import read_rank
from overlap_sweep.overlap.space import LAYER_KINDS
from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.kineto import read_trace
from tests.golden.archives import unpack
from tests.timeline import AUTOGRAD, COMPUTE, HOST, Timeline

OPERATORS = LAYER_KINDS["transformer_layer"]

Kernels = Sequence[tuple[str, float]]
"""What a call runs, one after the other: kernel and time in microseconds."""
GEMM, GAP, ALONE = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", "gap", "alone"
NORM, ACTIVATION, SUM, ATTENTION = "rmsnorm", "gated_act", "reduce_bf16", "flash_attention"

FORWARD: dict[str, Kernels] = {
    "_LayerNormLinear": [(NORM, 10), (GEMM, 100)],
    "attention": [(ATTENTION, 50)],
    "_Linear": [(GEMM, 80)],
    "_LayerNormMLP": [(NORM, 10), (GEMM, 300), (ACTIVATION, 40), (GEMM, 200)],
}
BACKWARD: dict[str, Kernels] = {
    "_LayerNormMLPBackward": [(GEMM, 200), (GEMM, 210), (ACTIVATION, 60), (GEMM, 300), (GEMM, 310)],
    "_LinearBackward": [(GEMM, 80), (GEMM, 90)],
    "attention": [(ATTENTION, 90)],
    "_LayerNormLinearBackward": [(GEMM, 100), (GEMM, 110), (NORM, 15)],
}
IN_TURN: dict[str, dict[str, Kernels]] = {
    "fwd": {"_LayerNormLinear": [(GEMM, 100)], "_Linear": [(GEMM, 80)]},
    "bwd": {"_LinearBackward": [(GEMM, 160)], "_LayerNormLinearBackward": [(GEMM, 200)]},
}


def made(
    directory: Path, forward: Sequence[tuple[str, Kernels]], backward: Sequence[tuple[str, Kernels]], beside: float = 0
) -> list[Spent]:
    """A step on a GPU: `beside` is how long communication runs from the first GEMM of the backward pass on."""
    timeline, host, device = Timeline(path=directory / "trace.json"), 100.0, 2000.0
    for calls, thread in ((forward, HOST), (backward, AUTOGRAD)):
        for function, kernels in calls:
            begun, host = host, host + 1
            if thread == AUTOGRAD and beside:
                timeline.collective("all_gather", device, device + beside, host, thread=thread)
                beside, host = 0, host + 5
            for name, us in kernels:
                if name == ALONE:
                    timeline.collective("reduce_scatter", device, device + us, host, thread=thread)
                elif name != GAP:
                    timeline.kernel(device, device + us, name, host, COMPUTE, thread)
                device, host = device + us, host + 5
            if thread == AUTOGRAD:
                timeline.backward(begun, host, function, thread)
                timeline.operator(function, begun, host, thread)
            else:
                timeline.function(function, begun, host, thread)
            host += 5
    timeline.step(1, 50.0, device + 100)
    trace = read_trace(timeline.write())
    return spent_of(trace, activity_of(trace), [1])


def nonzero(found: Sequence[Rest]) -> dict[str, dict[str, float]]:
    return {
        f"{one.pass_} {one.operator}": {
            name: getattr(one, name)
            for name in ("rest_us", "gemm_us", "other_us", "exposed_us", "gap_us", "beside_us")
            if getattr(one, name)
        }
        for one in found
    }


def layer(forward: Mapping[str, Kernels], backward: Mapping[str, Kernels]) -> list[list[tuple[str, Kernels]]]:
    return [[*(FORWARD | forward).items()], [*(BACKWARD | backward).items()]]


def test_each_part_of_a_rest_is_where_it_was_put(tmp_path: Path) -> None:
    forward: dict[str, Kernels] = {
        # Copied into a buffer, then computed in two pieces.
        "_LayerNormLinear": [(NORM, 10), (SUM, 20), (GEMM, 55), (GEMM, 60)],
        "_Linear": [(GEMM, 80), (GAP, 25), (SUM, 5)],
        "_LayerNormMLP": [(NORM, 10), (GEMM, 330), (ACTIVATION, 40), (GEMM, 200), (ALONE, 60)],
        "attention": [(ATTENTION, 53)],
    }
    backward: dict[str, Kernels] = {
        "_LayerNormMLPBackward": [(GEMM, 240), (GEMM, 210), (ACTIVATION, 60), (GEMM, 300), (SUM, 30), (GEMM, 310)]
    }
    found = rests([made(tmp_path, *layer(forward, backward), beside=150)], [made(tmp_path, *layer({}, {}))], OPERATORS)
    assert nonzero(found) == {
        "fwd qkv": {"rest_us": 35, "gemm_us": 15, "other_us": 20},
        "fwd proj": {"rest_us": 30, "other_us": 5, "gap_us": 25},
        "fwd fc1": {"rest_us": 30, "gemm_us": 30},
        "fwd fc2": {"rest_us": 60, "exposed_us": 60},
        "fwd ": {"rest_us": 3, "other_us": 3},
        "bwd fc2": {"rest_us": 40, "gemm_us": 40, "beside_us": 150},
        "bwd fc1": {"rest_us": 30, "other_us": 30},
        "bwd proj": {},
        "bwd qkv": {},
        "bwd ": {},
    }


def test_operators_of_one_function_come_in_turn(tmp_path: Path) -> None:
    """Megatron-Core's layers have no function for the whole MLP."""
    forward = [*IN_TURN["fwd"].items()] * 2
    backward = [*IN_TURN["bwd"].items()] * 2
    slower = [*forward[:3], ("_Linear", [(GEMM, 90)])]
    slower_backward = [*backward[:1], ("_LayerNormLinearBackward", [(GEMM, 207)]), *backward[2:]]

    found = rests([made(tmp_path, slower, slower_backward)], [made(tmp_path, forward, backward)], OPERATORS)

    assert [(one.pass_, one.operator, one.rest_us) for one in found] == [
        *(("fwd", operator, 10.0 if operator == "fc2" else 0.0) for operator in ("qkv", "proj", "fc1", "fc2", "")),
        *(("bwd", operator, 7.0 if operator == "fc1" else 0.0) for operator in ("fc2", "fc1", "proj", "qkv", "")),
    ]


def test_ranks_and_steps_count_alike(tmp_path: Path) -> None:
    plain, slow = (made(tmp_path, *layer({"_Linear": [(GEMM, us)]}, {})) for us in (80, 100))
    of_proj = [one for one in rests([plain, slow], [plain, plain], OPERATORS) if one.operator == "proj"]
    assert [one.gemm_us for one in of_proj] == [10.0, 0.0]


@pytest.mark.parametrize("operators", [("proj",), ()], ids=["linear", "experts"])
def test_nothing_is_said_where_calls_are_of_other_operators(tmp_path: Path, operators: Sequence[str]) -> None:
    spent = made(tmp_path, *layer({}, {}))
    assert rests([spent], [spent], operators) == []


@pytest.mark.parametrize("kernels", [[(NORM, 10)], [(GEMM, 300), (GEMM, 200)]], ids=["no GEMMs", "no activation"])
def test_an_mlp_whose_operators_are_not_seen_apart_has_no_rests(tmp_path: Path, kernels: Kernels) -> None:
    spent = made(tmp_path, *layer({"_LayerNormMLP": kernels}, {}))
    assert {one.pass_ for one in rests([spent], [spent], OPERATORS)} == {"bwd"}


def test_without_functions_of_transformer_engine_nothing_is_spent(tmp_path: Path) -> None:
    assert made(tmp_path, [("aten::mm", [(GEMM, 100)])], [("MmBackward0", [(GEMM, 100)])]) == []


def test_the_rests_of_a_recorded_layer_are_the_difference_of_its_passes(tmp_path: Path) -> None:
    """Llama-3 8B on two H200s, rank 0, all slots by ring exchange."""
    traces = unpack("layer", tmp_path)
    ring, floor = (read_rank(*traces.rglob(f"trace_{name}_rank0.json.gz")) for name in ("ring-exchange", "floor"))
    found = rests([ring.spent], [floor.spent], OPERATORS)

    for pass_ in ("fwd", "bwd"):
        spans_us = [[row.span_us for row in read.file.rows if row.phase == pass_] for read in (ring, floor)]
        ours, least = (sum(own) / len(own) for own in spans_us)
        assert sum(one.rest_us for one in found if one.pass_ == pass_) == pytest.approx(ours - least, abs=0.01)
    # NCCL's all-gather and the ring exchange share the GPU with GEMMs; partial sums are added apart.
    (qkv,) = (one for one in found if (one.pass_, one.operator) == ("bwd", "qkv"))
    assert [round(us) for us in (qkv.rest_us, qkv.gemm_us, qkv.other_us, qkv.beside_us)] == [124, 44, 28, 256]
