"""What AutoTP alone has to show; that it trains what the whole model does is in test_stacks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from overlap_sweep.errors import Refused
from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import autotp
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.groups import groups_of
from overlap_sweep.tp_training.initial_weights import initial_weights
from tests.processes import run_ranks
from tests.tp_training.stacks import zero
from tests.training.points import tp_point


def autotp_point(*overrides: str) -> dict[str, Any]:
    return tp_point("impl=autotp", *overrides)


def points_of(asked: Mapping[str, Sequence[str]], *common: str) -> dict[str, dict[str, Any]]:
    return {name: autotp_point(*common, *overrides) for name, overrides in asked.items()}


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
    assert run_ranks(2, _masters, points, keep="autotp") == [dict.fromkeys(points, 0.0)] * 2


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
    assert run_ranks(2, _left_behind, autotp_point(zero(2)), keep="autotp") == [0, 0]


def test_float16_by_autocast_under_zero_is_refused() -> None:
    point = autotp_point("tp_training.dtype=float16", "tp_training.autocast=true")
    with pytest.raises(Refused, match="zero_stage=0"):
        autotp.build(point, Ranks(0, 1, torch.device("cpu")), None)  # type: ignore[arg-type]
