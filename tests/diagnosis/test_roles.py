from __future__ import annotations

import pytest

from overlap_sweep.diagnosis.calls import Call, roles_of
from tests.diagnosis.made_facts import call


def forward(collective: str, elements: int = 1000, **others: object) -> Call:
    return call(0, 1, collective, pass_="fwd", sent=elements, received=elements, **others)


def backward(collective: str, elements: int = 1000, **others: object) -> Call:
    return call(0, 1, collective, pass_="bwd", sent=elements, received=elements, **others)


def after(collective: str) -> Call:
    return call(0, 1, collective, pass_="other")


def test_sharded_parameters_and_their_gradients() -> None:
    calls = [forward("all_gather"), backward("all_gather"), backward("reduce_scatter")]
    assert roles_of(calls) == ["parameter", "parameter", "gradient"]


def test_sequence_parallelism_gathers_activations() -> None:
    calls = [
        *(forward("all_gather", in_function=True), forward("reduce_scatter", in_function=True)),
        *(backward("all_gather"), backward("reduce_scatter")),
    ]
    assert roles_of(calls) == ["activation"] * 4


def test_a_column_parallel_layer_alone_gathers_what_it_has_computed() -> None:
    calls = [forward("all_gather", in_function=True, computed_before=True), backward("reduce_scatter")]
    assert roles_of(calls) == ["activation", "activation"]


def test_a_function_that_gathers_the_weights_it_multiplies() -> None:
    calls = [forward("all_gather", in_function=True), backward("all_gather"), backward("reduce_scatter")]
    assert roles_of(calls) == ["parameter", "parameter", "gradient"]


def test_gradients_are_reduced_where_they_are_accumulated_or_after_the_backward_pass() -> None:
    assert roles_of([backward("all_reduce", accumulates=True), after("all_reduce")]) == ["gradient", "gradient"]
    assert roles_of([forward("all_reduce"), backward("all_reduce")]) == ["activation", "activation"]


def test_the_sum_of_a_loss_does_not_make_parameters_activations() -> None:
    calls = [forward("all_gather"), forward("all_reduce", 1), backward("reduce_scatter")]
    assert roles_of(calls) == ["parameter", "activation", "gradient"]


def test_hooks_that_gather_in_a_group_that_also_reduces_activations() -> None:
    # gloo does not tell groups apart: tensor parallelism inside of sharded layers.
    calls = [
        *(forward("all_gather"), forward("all_gather", in_function=True), forward("reduce_scatter", in_function=True)),
        backward("reduce_scatter"),
    ]
    assert roles_of(calls)[:3] == ["parameter", "activation", "activation"]


def test_parameters_gathered_after_the_optimizer() -> None:
    assert roles_of([after("reduce_scatter"), after("all_gather")]) == ["gradient", "parameter"]


def test_the_norm_of_all_gradients_is_needed_at_once() -> None:
    norm = call(0, 1, "all_reduce", pass_="other", sent=1, received=1)
    assert roles_of([after("reduce_scatter"), norm]) == ["gradient", "activation"]


def test_exchanges_and_messages_are_of_activations() -> None:
    assert roles_of([forward("all_to_all"), backward("send"), after("broadcast")]) == ["activation"] * 3


def test_groups_don_t_decide_for_each_other() -> None:
    calls = [
        *(forward("all_gather", group="fsdp"), backward("reduce_scatter", group="fsdp")),
        *(forward("all_reduce", group="tp"), backward("all_reduce", group="tp")),
    ]
    assert roles_of(calls) == ["parameter", "gradient", "activation", "activation"]


def test_a_few_numbers_that_are_gathered_are_no_parameters() -> None:
    # Counts of tokens, in a group that shards parameters and in one that does nothing else.
    counts = call(0, 1, "all_gather", pass_="fwd", sent=1, received=2)
    sharded = [forward("all_gather"), counts, backward("reduce_scatter")]
    assert roles_of(sharded) == ["parameter", "activation", "gradient"]
    assert roles_of([counts, backward("all_reduce", 2)]) == ["activation", "activation"]
    # A norm of each of 1,024 ranks, after the backward pass.
    norms = call(0, 1, "all_gather", pass_="other", sent=1, received=1024)
    assert roles_of([norms, after("all_gather")]) == ["activation", "parameter"]


@pytest.mark.parametrize(
    ("sent", "received", "is_of_scalars"),
    [(32, 64, True), (1, 128, True), (33, 66, False), (0, 0, False), (None, None, False), (None, 2, True)],
)
def test_calls_of_scalars(sent: int | None, received: int | None, is_of_scalars: bool) -> None:
    assert call(0, 1, "all_gather", sent=sent, received=received).is_of_scalars == is_of_scalars


def test_hybrid_sharding_all_reduces_the_gradients_that_it_has_scattered() -> None:
    def hybrid(reduced: int, *more: Call) -> list[str]:
        scatter = call(0, 1, "reduce_scatter", "node", pass_="bwd", sent=2000, received=1000)
        calls = [forward("all_gather", group="node"), scatter, backward("all_reduce", reduced, group="across"), *more]
        return list(roles_of(calls))[1:3]

    assert hybrid(1000) == ["gradient", "gradient"]
    assert hybrid(1000, backward("all_reduce", 1, group="across")) == ["gradient", "gradient"]
    # Tensor parallelism inside of it: of another size, or with a forward pass.
    assert hybrid(999) == ["gradient", "activation"]
    assert hybrid(1000, forward("all_reduce", group="across")) == ["gradient", "activation"]
