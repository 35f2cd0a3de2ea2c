"""AutoTP, cut over ranks in every way, computes what the whole model does in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from overlap_sweep.errors import Refused
from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import autotp
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.groups import groups_of
from overlap_sweep.tp_training.initial_weights import initial_weights
from tests.processes import run_ranks
from tests.tp_training.points import tp_point
from tests.tp_training.whole_model import Trained, train_points, train_whole


def autotp_point(*overrides: str) -> dict[str, Any]:
    return tp_point("impl=autotp", *overrides)


def points_of(asked: Mapping[str, Sequence[str]], *common: str) -> dict[str, dict[str, Any]]:
    return {name: autotp_point(*common, *overrides) for name, overrides in asked.items()}


def expected_of(point: dict[str, Any]) -> list[Trained]:
    """By rank."""
    of_replicas = train_whole(point)
    return [of_replicas[rank // point["tp_size"]] for rank in range(point["tp_size"] * point["dp_size"])]


ACCUMULATED = "tp_training.gradient_accumulation_steps=2"
NOT_CLIPPED = "tp_training.max_grad_norm=0"
CLIPPED = "tp_training.max_grad_norm=0.3"
"""Less than the norm at each step."""
CHECKPOINTED = "tp_training.activation_checkpointing=true"
WHOLE_VOCABULARY = "tp_training.vocab_parallel=false"
TWO_REPLICAS = ("tp_size=1", "dp_size=2")
TIED = "model.tie_word_embeddings=true"


def zero(stage: int) -> str:
    return f"tp_training.zero_stage={stage}"


QUICK = {
    "zero0": (zero(0), CLIPPED, TIED),
    "zero1": (zero(1), CLIPPED, ACCUMULATED, CHECKPOINTED),
    "zero2": (zero(2), NOT_CLIPPED, "tp_training.weight_decay=1"),
    "dp2": (*TWO_REPLICAS, zero(2), CLIPPED, ACCUMULATED),
    "qwen2": ("model.architecture=qwen2", WHOLE_VOCABULARY),
}


@cache
def quick() -> list[dict[str, Trained]]:
    return run_ranks(2, train_points, points_of(QUICK))


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", QUICK)
def test_losses_and_norms_are_those_of_one_process(name: str) -> None:
    for of_rank, expected in zip(quick(), expected_of(autotp_point(*QUICK[name])), strict=True):
        assert of_rank[name].losses == pytest.approx(expected.losses, rel=1e-4)
        assert of_rank[name].norms == pytest.approx(expected.norms, rel=1e-4)


STAGES = {
    **{
        f"zero{stage} {what}": (zero(stage), *overrides)
        for stage in (0, 1, 2)
        for what, overrides in {
            "clipped": (CLIPPED,),
            "not clipped, accumulated": (NOT_CLIPPED, ACCUMULATED),
            "checkpointed, accumulated": (CLIPPED, CHECKPOINTED, ACCUMULATED),
            "whole vocabulary, tied": (CLIPPED, WHOLE_VOCABULARY, TIED),
            "tied": (CLIPPED, TIED),
        }.items()
    },
    **{
        f"{name} zero{stage}": (f"model.architecture={name}", zero(stage), CLIPPED)
        for name, stage in (("llama", 0), ("mistral", 1), ("qwen2", 2), ("qwen2", 0), ("qwen3", 1))
    },
}
FOUR = {
    **{f"tp2 x dp2, {name}": ("dp_size=2", *overrides) for name, overrides in STAGES.items()},
    **{
        f"tp4, zero{stage}": ("tp_size=4", "model.num_kv_heads=4", zero(stage), CLIPPED, ACCUMULATED)
        for stage in (0, 1, 2)
    },
    "dp4": ("tp_size=1", "dp_size=4", zero(2), CLIPPED),
    "tp2 x dp2 again": ("dp_size=2", zero(1), CLIPPED),
}
"""The same processes go from one size to the other."""


@cache
def four() -> list[dict[str, Trained]]:
    return run_ranks(4, train_points, points_of(FOUR))


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(name: str) -> None:
    for of_rank, expected in zip(four(), expected_of(autotp_point(*FOUR[name])), strict=True):
        assert of_rank[name].losses == pytest.approx(expected.losses, rel=1e-4)
        assert of_rank[name].norms == pytest.approx(expected.norms, rel=1e-4)


HALF = {
    **{
        f"{dtype} zero{stage} {what}": (f"tp_training.dtype={dtype}", zero(stage), *overrides)
        for dtype in ("bfloat16", "float16")
        for stage in (0, 1, 2)
        for what, overrides in {
            "clipped": (CLIPPED,),
            "not clipped, accumulated": (NOT_CLIPPED, ACCUMULATED),
            "by autocast": (CLIPPED, "tp_training.autocast=true"),
        }.items()
        if not (dtype == "float16" and stage and what == "by autocast")
    },
}
HALF_LOSS, HALF_NORM = 3e-4, 1e-2
"""Relative; what is wrong in the norm or the loss scale is wrong by more."""


@cache
def half() -> list[dict[str, Trained]]:
    return run_ranks(4, train_points, points_of(HALF, "dp_size=2"))


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str) -> None:
    for of_rank, expected in zip(half(), expected_of(autotp_point("dp_size=2", *HALF[name])), strict=True):
        assert of_rank[name].losses == pytest.approx(expected.losses, rel=HALF_LOSS)
        assert of_rank[name].norms == pytest.approx(expected.norms, rel=HALF_NORM)


def _masters(ranks: Ranks, points: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The largest difference of the float32 weights from the drawn ones, before the first step."""
    from deepspeed.utils import safe_get_full_fp32_param

    differences = {}
    for name, point in points.items():
        built = autotp.build(point, ranks, groups_of(ranks, point["tp_size"], point["dp_size"]))
        draw = initial_weights(point, ranks)
        parameters = dict(built._engine.module.named_parameters())
        unfused = dict(autotp._own_masters(built._engine.optimizer))
        largest = 0.0
        for parameter_name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"):
            parameter, dimension = parameters[parameter_name], int("o_proj" in parameter_name)
            shape = list(parameter.shape)
            shape[dimension] *= 2
            expected = draw(parameter_name, shape).chunk(2, dimension)[ranks.rank]
            master = unfused[parameter] if unfused else safe_get_full_fp32_param(parameter)
            largest = max(largest, (master - expected).abs().max().item())
            assert torch.equal(parameter, expected.bfloat16())
        differences[name] = largest
        built.close()
    return differences


@pytest.mark.end_to_end
def test_weights_are_drawn_in_float32() -> None:
    points = points_of({f"zero{stage}": (zero(stage),) for stage in (0, 1, 2)}, "tp_training.dtype=bfloat16")
    assert run_ranks(2, _masters, points) == [dict.fromkeys(points, 0.0)] * 2


def _overflowing(ranks: Ranks, points: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Norms, and whether a weight of this rank moved, by step, where one rank has an infinite gradient in the first."""
    seen = {}
    for name, point in points.items():
        groups = groups_of(ranks, point["tp_size"], point["dp_size"])
        built = autotp.build(point, ranks, groups)
        projection = built._engine.module.model.layers[0].mlp.up_proj.weight
        once = [torch.inf] if ranks.rank == 1 else []
        projection.register_hook(lambda gradient, once=once: gradient + once.pop() if once else gradient)
        batches, norms, moved = TokenBatches(point, ranks, groups.dp_rank), [], []
        for step in range(3):
            before = projection.detach().clone()
            built.backward(built.forward(*batches[step], True), True)
            norms.append(built.update().item())
            moved.append(not torch.equal(before, projection))
        seen[name] = norms, moved
        built.close()
    return seen


@pytest.mark.end_to_end
def test_a_step_with_infinite_gradients_is_left_out_on_all_ranks() -> None:
    points = points_of(
        {
            **{f"zero{stage}": (zero(stage),) for stage in (0, 1, 2)},
            "autocast": (zero(0), "tp_training.autocast=true", NOT_CLIPPED),
        },
        *("tp_training.dtype=float16", "tp_training.learning_rate=0.01"),
    )
    for of_rank in run_ranks(2, _overflowing, points):
        for norms, moved in of_rank.values():
            assert not np.isfinite(norms[0])
            assert np.isfinite(norms[1:]).all()
            assert moved == [False, True, True]


@pytest.mark.end_to_end
def test_compiled_layers_compute_the_same() -> None:
    point = autotp_point("tp_training.compile=true", CLIPPED)
    for of_rank, expected in zip(run_ranks(2, train_points, {"": point}), expected_of(point), strict=True):
        assert of_rank[""].losses == pytest.approx(expected.losses, rel=1e-4)
        assert of_rank[""].norms == pytest.approx(expected.norms, rel=1e-4)


def _left_behind(ranks: Ranks, point: dict[str, Any]) -> int:
    groups = groups_of(ranks, point["tp_size"], point["dp_size"])
    built = autotp.build(point, ranks, groups)
    built.backward(built.forward(*TokenBatches(point, ranks, groups.dp_rank)[0], True), True)
    built.update()
    parameters = [weakref.ref(parameter) for parameter in built._engine.module.parameters()]
    built.close()
    del built
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


@pytest.mark.end_to_end
def test_no_parameter_outlives_its_model() -> None:
    assert run_ranks(2, _left_behind, autotp_point(zero(2))) == [0, 0]


def test_float16_by_autocast_under_zero_is_refused() -> None:
    point = autotp_point("tp_training.dtype=float16", "tp_training.autocast=true")
    with pytest.raises(Refused, match="zero_stage=0"):
        autotp.build(point, Ranks(0, 1, torch.device("cpu")), None)  # type: ignore[arg-type]
