from __future__ import annotations

import pytest
import torch

from overlap_sweep.measure.agreement import relative_error
from overlap_sweep.measure.variant import Variant
from overlap_sweep.ranks import Ranks
from tests.processes import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
TENSORS = ("output", "input_grad", "weight_grad")


def variant(*tensors: torch.Tensor, names: tuple[str, ...] = TENSORS[1:]) -> Variant:
    output, *gradients = tensors
    named = dict(zip(names, gradients, strict=True))
    return Variant(lambda _: output, lambda _repeat, _output: named)


def tens() -> list[torch.Tensor]:
    return [10 * torch.ones(3, 3) for _ in TENSORS]


@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_one_wrong_element_is_found_in_every_tensor(place: int | None) -> None:
    wrong = tens()
    if place is not None:
        wrong[place][1, 2] += 1.0
    expected = {name: pytest.approx(0.1) if number == place else 0.0 for number, name in enumerate(TENSORS)}
    assert relative_error(variant(*wrong), variant(*tens()), ALONE) == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_no_small_errors(value: float) -> None:
    wrong = tens()
    wrong[0][0, 0] = value
    assert relative_error(variant(*wrong), variant(*tens()), ALONE)["output"] > 1e30


def test_tensors_are_compared_by_name_whatever_their_order() -> None:
    output, *gradients = (index * torch.ones(2) for index in range(3))
    backwards = variant(output, *reversed(gradients), names=TENSORS[:0:-1])
    assert max(relative_error(variant(output, *gradients), backwards, ALONE).values()) == 0.0


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
