from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap_sweep.measure.timing import Variant
from overlap_sweep.ranks import Ranks
from overlap_sweep.workloads import operator

ALONE = Ranks(0, 1, torch.device("cpu"))
LEAF = torch.ones(3, 3)


def variant(output: torch.Tensor, *gradients: torch.Tensor) -> Variant:
    return Variant(lambda _: output, lambda _repeat, _output: gradients)


def test_equal_numbers_have_no_error() -> None:
    same = variant(LEAF, LEAF, 2 * LEAF, 3 * LEAF)
    error = operator._relative_error(same, same, ALONE)
    assert error == {"output": 0.0, "input_grad": 0.0, "weight_grad": 0.0, "bias_grad": 0.0}


@pytest.mark.parametrize(("place", "name"), [*enumerate(("output", "input_grad", "weight_grad", "bias_grad"))])
def test_one_wrong_element_is_found_in_every_tensor(place: int, name: str) -> None:
    tensors = [10 * LEAF for _ in range(4)]
    wrong = [tensor.clone() for tensor in tensors]
    wrong[place][1, 2] += 1.0
    error = operator._relative_error(variant(*wrong), variant(*tensors), ALONE)
    assert error[name] == pytest.approx(0.1)
    assert sum(error.values()) == pytest.approx(0.1)


def test_nan_is_no_small_error() -> None:
    nan = LEAF * torch.nan
    error = operator._relative_error(variant(nan, LEAF, LEAF, LEAF), variant(LEAF, LEAF, LEAF, LEAF), ALONE)
    assert error["output"] == torch.inf


def point(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    base = {
        "model": {"name": "m", "gated_mlp": True, **sizes},
        "tp_size": 2,
        "operator": "fc1",
        "phase": "all",
        "method": "bulk",
        "num_sm": 4,
        "backend": "torch",
        "workload": {"tokens": 64},
        "runtime": {"device": "cpu"},
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"operator": "fc2"}, "does not fit"),
        ({"tp_size": 3}, "do not divide"),
        ({"cga_size": 2}, "backend=torch has no cga_size on cpu"),
        ({"method": "ring_exchange", "use_ce": True}, "use_ce"),
    ],
)
def test_what_is_refused_before_a_process_starts(changes: dict[str, Any], says: str) -> None:
    assert operator.refusal(point()) is None
    assert says in str(operator.refusal(point(**changes)))


def test_pairs_of_an_odd_number_of_ranks_are_refused() -> None:
    odd = point(tp_size=1, method="ring_exchange", aggregate=True) | {"tp_size": 3}
    odd["model"] = odd["model"] | {"ffn_hidden_size": 96}
    odd["workload"] = {"tokens": 66}
    assert "odd" in str(operator.refusal(odd))
