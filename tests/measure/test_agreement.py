from __future__ import annotations

import pytest
import torch

from overlap_sweep.measure.agreement import relative_error
from overlap_sweep.measure.variant import Variant
from overlap_sweep.ranks import Ranks
from tests.processes import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
TENSORS = ("output", "input_grad", "weight_grad")


def variant(*tensors: torch.Tensor) -> Variant:
    output, *gradients = tensors
    named = dict(zip(TENSORS[1:], gradients, strict=True))
    return Variant(lambda _: output, lambda _repeat, _output: named)


def tens() -> list[torch.Tensor]:
    return [10 * torch.ones(3, 3) for _ in TENSORS]


def test_equal_numbers_have_no_error() -> None:
    error = relative_error(variant(*tens()), variant(*tens()), ALONE)
    assert error == dict.fromkeys(TENSORS, 0.0)


@pytest.mark.parametrize(("place", "name"), [*enumerate(TENSORS)])
def test_one_wrong_element_is_found_in_every_tensor(place: int, name: str) -> None:
    wrong = tens()
    wrong[place][1, 2] += 1.0
    error = relative_error(variant(*wrong), variant(*tens()), ALONE)
    assert error == {other: pytest.approx(0.1 if other == name else 0.0) for other in TENSORS}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_no_small_errors(value: float) -> None:
    wrong = tens()
    wrong[0][0, 0] = value
    assert relative_error(variant(*wrong), variant(*tens()), ALONE)["output"] > 1e30


def test_tensors_are_compared_by_name_whatever_their_order() -> None:
    tensors = {name: index * torch.ones(2) for index, name in enumerate(TENSORS[1:], 1)}
    backwards = dict(reversed(tensors.items()))
    one, other = (Variant(lambda _: torch.ones(2), lambda _r, _o, g=g: g) for g in (tensors, backwards))
    assert max(relative_error(one, other, ALONE).values()) == 0.0


def wrong_on_rank_1(ranks: Ranks) -> dict[str, float]:
    wrong = tens()
    wrong[0][0, 0] += ranks.rank
    return relative_error(variant(*wrong), variant(*tens()), ranks)


def test_all_ranks_hear_of_the_error_of_one() -> None:
    expected = {"output": pytest.approx(0.1), "input_grad": 0.0, "weight_grad": 0.0}
    assert run_ranks(2, wrong_on_rank_1) == [expected, expected]


def test_zeros_equal_zeros_and_nothing_else() -> None:
    zeros, ones = ([fill(3) for _ in TENSORS] for fill in (torch.zeros, torch.ones))
    assert max(relative_error(variant(*zeros), variant(*zeros), ALONE).values()) == 0.0
    assert min(relative_error(variant(*ones), variant(*zeros), ALONE).values()) > 1e30


def test_what_answers_with_the_last_calls_numbers_is_found() -> None:
    inputs = [torch.ones(3), 2 * torch.ones(3)]
    buffer = [inputs[0]]

    def stale(repeat: int) -> torch.Tensor:
        buffer.append(inputs[repeat])
        return buffer[-2]

    late = Variant(stale, lambda _repeat, _output: {})
    prompt = Variant(lambda repeat: inputs[repeat], lambda _repeat, _output: {})
    assert relative_error(late, prompt, ALONE)["output"] == pytest.approx(0.5)
