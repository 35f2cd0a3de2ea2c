import pytest

from overlap_sweep.diagnosis.calls import Call, roles_of
from tests.diagnosis.made_facts import call


def forward(collective: str, elements: int = 1000, **others: object) -> Call:
    return call(0, 1, collective, pass_="fwd", sent=elements, received=elements, **others)


def backward(collective: str, elements: int = 1000, **others: object) -> Call:
    return call(0, 1, collective, pass_="bwd", sent=elements, received=elements, **others)


def after(collective: str) -> Call:
    return call(0, 1, collective, pass_="other")


def gathered(received: int, pass_: str) -> Call:
    """A number of each rank: counts of tokens, or norms."""
    return call(0, 1, "all_gather", pass_=pass_, sent=1, received=received)


P, G, A = "parameter", "gradient", "activation"
IN = {"in_function": True}
BY_GROUP = [
    *(forward("all_gather", group="fsdp"), backward("reduce_scatter", group="fsdp")),
    *(forward("all_reduce", group="tp"), backward("all_reduce", group="tp")),
]
# gloo does not name groups: tensor parallelism inside of sharded layers.
INSIDE = [forward("all_gather"), forward("all_gather", **IN), forward("reduce_scatter", **IN)]
SEQUENCE_PARALLEL = [forward("all_gather", **IN), forward("reduce_scatter", **IN), backward("all_gather")]
COMPUTED_BEFORE = forward("all_gather", computed_before=True, **IN)
NORM = call(0, 1, "all_reduce", pass_="other", sent=1, received=1)
# By what it shows, the calls and the roles of the first of them.
ROLES = {
    "sharded parameters": ([forward("all_gather"), backward("all_gather"), backward("reduce_scatter")], [P, P, G]),
    "sequence parallelism": ([*SEQUENCE_PARALLEL, backward("reduce_scatter")], [A, A, A, A]),
    "a column-parallel layer alone": ([COMPUTED_BEFORE, backward("reduce_scatter")], [A, A]),
    "a function that gathers weights": (
        [forward("all_gather", **IN), backward("all_gather"), backward("reduce_scatter")],
        [P, P, G],
    ),
    "where gradients accumulate": ([backward("all_reduce", accumulates=True), after("all_reduce")], [G, G]),
    "in both passes": ([forward("all_reduce"), backward("all_reduce")], [A, A]),
    "the sum of a loss": ([forward("all_gather"), forward("all_reduce", 1), backward("reduce_scatter")], [P, A, G]),
    "groups without names": ([*INSIDE, backward("reduce_scatter")], [P, A, A]),
    "after the optimizer": ([after("reduce_scatter"), after("all_gather")], [G, P]),
    "the norm of all gradients": ([after("reduce_scatter"), NORM], [G, A]),
    "exchanges and messages": ([forward("all_to_all"), backward("send"), after("broadcast")], [A, A, A]),
    "groups don't decide for each other": (BY_GROUP, [P, G, A, A]),
    "counts beside parameters": ([forward("all_gather"), gathered(2, "fwd"), backward("reduce_scatter")], [P, A, G]),
    "counts alone": ([gathered(2, "fwd"), backward("all_reduce", 2)], [A, A]),
    "norms of 1,024 ranks": ([gathered(1024, "other"), after("all_gather")], [A, P]),
}


@pytest.mark.parametrize(("calls", "expected"), ROLES.values(), ids=list(ROLES))
def test_roles(calls: list[Call], expected: list[str]) -> None:
    assert roles_of(calls)[: len(expected)] == expected


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
