from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_sweep.measure import Ranks
from overlap_sweep.measure.timing import Samples, Variant
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.workloads.operator.run import Bench, bench_for, draw_parameters, enough_of_default
from tests.make_point import operator_point

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
RING = {"method": "ring_exchange"}
NOTHING = Variant(lambda _: None, lambda _repeat, _output: {})


@pytest.fixture
def among_best() -> Callable[..., bool]:
    bench = Bench(operator_point(), ALONE, {}, NOTHING, NOTHING)

    def among_best(fwd: float, bwd: float, **changes: Any) -> bool:
        return bench.is_among_best(operator_point(**changes), {"fwd": fwd, "bwd": bwd}, margin=0.01)

    return among_best


def test_what_is_fastest_so_far_or_within_the_margin_is_among_the_best(among_best: Callable[..., bool]) -> None:
    # What is slower than no overlap is not.
    bwd = (1.02, 1.005, 0.9, 0.905, 0.92, 0.8, 0.807, 0.81, 0.9)
    expected = [False, True, True, True, False, True, True, False, False]
    assert [among_best(1.0, relative) for relative in bwd] == expected


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        # bulk overlaps backward alone, and a pipeline of fc2 forward alone.
        ({}, [(0.5, 1.5, False), (1.5, 0.5, True)]),
        ({"operator": "fc2", "method": "pipeline"}, [(0.9, 1.5, True), (1.5, 0.1, False)]),
        # One pass is enough.
        (RING, [(0.8, 0.8, True), (0.7, 1.5, True), (1.5, 0.7, True), (0.8, 0.8, False)]),
        # Both remember their best also when only one is better.
        (RING, [(0.9, 0.5, True), (0.5, 0.6, True), (0.6, 0.6, False)]),
    ],
)
def test_only_the_passes_that_the_point_is_about_count(
    among_best: Callable[..., bool], changes: dict[str, Any], asked: list[tuple[float, float, bool]]
) -> None:
    assert [among_best(fwd, bwd, **changes) for fwd, bwd, _ in asked] == [expected for *_, expected in asked]


def test_the_objective_is_the_whole_operator_whichever_passes_a_method_overlaps() -> None:
    bench = Bench(operator_point(), ALONE, {}, NOTHING, NOTHING, none_us={"fwd": 100.0, "bwd": 200.0})

    def objective_us(relative: dict[str, float], **changes: Any) -> float:
        return bench.objective_us(operator_point(**changes), relative)

    # bulk overlaps backward alone: forward is that of no overlap, however it was measured beside it.
    assert objective_us({"fwd": 0.98, "bwd": 0.9}) == pytest.approx(100.0 + 180.0)
    assert objective_us({"fwd": 0.7, "bwd": 0.9}, **RING) == pytest.approx(70.0 + 180.0)


def test_the_default_is_measured_until_its_time_is_known_however_slow_it_is() -> None:
    def samples(*us: float) -> Samples:
        return Samples({"fwd": [*us], "bwd": [*us]}, launch_bound=False)

    point = operator_point()
    none, steady, restless = samples(*[100.0] * 6), samples(*[150.0, 150.1] * 3), samples(*[150.0, 190.0] * 3)
    assert enough_of_default(point) is None
    enough = enough_of_default(replace(point, workload=replace(point.workload, noise_goal=0.01)))
    assert enough
    assert enough({"default": steady, "none": none})
    assert not enough({"default": restless, "none": none})


COLUMN = LinearShape("column", 8, 6, 16, 2)
ROW = LinearShape("row", 8, 16, 6, 2)
SHAPES = {"weight": (8, 6), "bias": (8,), "layer_norm_weight": (6,), "layer_norm_bias": (6,)}


def drawn(shape: LinearShape, rank: int, precision: str = "fp32", seed: int = 0) -> dict[str, Tensor]:
    return draw_parameters(SHAPES, shape, precision, Ranks(rank, 2, CPU), seed)


@pytest.mark.parametrize(
    ("shape", "replicated"),
    [(COLUMN, {"layer_norm_weight", "layer_norm_bias"}), (ROW, {"bias", "layer_norm_weight", "layer_norm_bias"})],
)
def test_what_every_rank_holds_whole_is_equal_on_all(shape: LinearShape, replicated: set[str]) -> None:
    first, second = drawn(shape, 0), drawn(shape, 1)
    assert {name for name in SHAPES if first[name].equal(second[name])} == replicated


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("fp8_delayed", torch.bfloat16)])
def test_parameters_are_leaves_drawn_by_the_seed_in_the_precision_or_what_fp8_is_made_of(
    precision: str, dtype: torch.dtype
) -> None:
    one, same, other = (drawn(COLUMN, 1, precision, seed) for seed in (5, 5, 6))
    assert {name: tuple(parameter.shape) for name, parameter in one.items()} == SHAPES
    assert {(p.dtype, p.is_leaf, p.requires_grad) for p in one.values()} == {(dtype, True, True)}
    assert all(one[name].equal(same[name]) and not one[name].equal(other[name]) for name in SHAPES)


def test_outputs_are_as_large_as_inputs_and_norms_almost_do_nothing() -> None:
    shape = LinearShape("column", 8, 400, 400, 1)
    parameters = draw_parameters({"weight": (400, 400), "layer_norm_weight": (400,)}, shape, "fp32", ALONE, 0)
    weight, norm = (tensor.detach() for tensor in parameters.values())
    found = weight.std().item(), norm.mean().item(), norm.std().item()
    assert found == pytest.approx((1 / 20, 1.0, 0.1), rel=0.1)


def bench(**changes: Any) -> Bench:
    return bench_for(operator_point(tp_size=1, **changes), ALONE)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"method": "ring_exchange"}, True),
        ({"method": "none", "phase": "fprop"}, True),
        ({"num_sm": 8, "aggregate": True, "num_splits": 2, "cga_size": 1, "use_ce": False}, True),
        ({"profile": "all"}, True),
        ({"workload": {"tolerance": 0.5, "profiled": 9}}, True),
        ({"operator": "fc2"}, False),
        ({"model": {"hidden_size": 128}}, False),
        ({"precision": "bf16"}, False),
        ({"workload": {"tokens": 64}}, False),
        ({"workload": {"seed": 1}}, False),
    ],
)
def test_points_that_differ_in_how_they_overlap_and_are_profiled_share_a_bench(
    changes: dict[str, Any], shared: bool
) -> None:
    assert (bench(**changes) is bench()) == shared


def test_four_operators_stay_at_hand() -> None:
    first, again = ([bench(operator=operator) for operator in ("qkv", "proj", "fc1", "fc2")] for _ in range(2))
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_the_variants_share_weights_and_inputs_which_rotate() -> None:
    shared = bench()
    point = shared.variant(operator_point(tp_size=1), "point")
    outputs = []
    for repeat in range(3):
        none, ours = shared.none.forward(repeat), point.forward(repeat)
        assert none.equal(ours)
        gradients = shared.none.backward(repeat, none)
        assert set(gradients) == {"input_grad", "weight_grad", "bias_grad"}
        assert all(gradients[name].equal(ours_) for name, ours_ in point.backward(repeat, ours).items())
        outputs.append(none)
    assert len(shared.inputs) == 1
    assert [outputs[0].equal(other) for other in outputs[1:]] == [False, True]


def test_inputs_of_no_rank_have_anything_to_do_with_the_weights_of_any() -> None:
    # Setting up communicates nothing on a CPU, so that one process can be both ranks.
    benches = [bench_for(operator_point(), Ranks(rank, 2, CPU)) for rank in range(2)]
    drawn = [tensor for it in benches for pair in it.inputs.values() for tensors in pair for tensor in tensors]
    count = min(tensor.numel() for tensor in drawn)
    weights = [it.parameters["weight"] for it in benches]
    flat = [tensor.detach().flatten()[:count] for tensor in (*weights, *drawn)]
    related = torch.corrcoef(torch.stack(flat))
    assert related[: len(weights), len(weights) :].abs().max().item() < 0.05, f"correlation of {count} numbers"
