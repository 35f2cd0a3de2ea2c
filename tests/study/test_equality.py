"""Whether settings compute the same as a reference: numbers in, verdict out."""

from math import inf, nan

import pytest

from overlap_sweep.study.equality import Run, Seen, Verdict, equality

ROUNDING = 1e-3


def runs(*norms: float, name: str = "norm") -> list[Run]:
    return [{name: Seen(norm, ROUNDING)} for norm in norms]


@pytest.mark.parametrize(
    ("reference", "own", "verdict"),
    [
        # The reference agrees bit by bit, or within rounding, of which a setting may have more.
        ([2.0, 2.0], [2.0, 2.0], "equal"),
        ([2.0, 2.0], [2.0], "equal"),
        ([2.0, 2.0], [2.0, 2.001], "rounding"),
        ([2.0, 2.0], [2.0, 2.003], "differs"),
        ([2.0, 2.001], [2.0], "rounding"),
        ([2.0, 2.0018], [1.995], "rounding"),
        ([2.0, 2.0018], [1.994], "differs"),
        # It does not agree with itself, or nobody knows.
        ([2.0, 2.1], [2.0], "unknown"),
        ([2.0, 2.0, 2.1], [3.0], "unknown"),
        ([2.0], [2.0], "unknown"),
        ([2.0], [3.0, 3.0], "unknown"),
        # Whoever diverges differs; where the reference does, too, nothing can be said.
        ([2.0, 2.0], [nan], "differs"),
        ([2.0, 2.0], [2.0, inf], "differs"),
        ([nan, nan], [2.0], "unknown"),
        ([0.0, 0.0], [0.0], "equal"),
        ([0.0, 0.0], [1e-9], "differs"),
        ([-2.0, -2.0], [2.0], "differs"),
        ([inf, inf], [2.0], "unknown"),
    ],
)
def test_verdicts(reference: list[float], own: list[float], verdict: Verdict) -> None:
    assert equality(runs(*reference), runs(*own)).verdict == verdict


def test_numbers_are_those_that_are_farthest_off() -> None:
    reference = [{"loss": Seen(4.0, 0.1), "norm": Seen(2.0, 0.001)}] * 2
    own = [{"loss": Seen(4.1, 0.1), "norm": Seen(2.0, 0.001)}, {"loss": Seen(4.0, 0.1), "norm": Seen(2.01, 0.001)}]

    found = equality(reference, own)

    assert (found.verdict, found.quantity, found.value, found.reference) == ("differs", "norm", 2.01, 2.0)
    assert found.in_words == "norm is 2.01 instead of 2"


def test_what_the_reference_does_not_repeat_is_left_out() -> None:
    reference = [{"loss": Seen(loss, ROUNDING), "norm": Seen(2.0, ROUNDING)} for loss in (4.0, 5.0)]
    assert equality(reference, [{"loss": Seen(7.0, ROUNDING), "norm": Seen(2.0, ROUNDING)}]).verdict == "equal"


def test_beside_what_is_not_repeated_what_is_near_says_nothing() -> None:
    reference = [{"loss": Seen(loss, ROUNDING), "norm": Seen(2 * loss**1e-3, ROUNDING)} for loss in (4.0, 5.0)]
    found = equality(reference, [{"loss": Seen(4.0, ROUNDING), "norm": Seen(2.5, ROUNDING)}])
    assert (found.verdict, found.why) == (
        "unknown",
        "its own runs differ (loss: 4, 5), as with random seeds or data",
    )


def test_what_not_all_runs_have_cannot_be_compared() -> None:
    """Such as after another number of skipped steps."""
    found = equality(runs(2.0, 2.0), [*runs(2.0), *runs(2.0, name="norm after another step")])
    assert (found.verdict, found.why) == ("unknown", "nothing is recorded that could be compared")
    assert equality([{}, {}], [{}]).verdict == "unknown"
    assert equality([{}], runs(2.0)).verdict == "unknown"


def test_differences_are_relative_to_the_scale_where_there_is_one() -> None:
    zero, little, much = ([{"sum": Seen(value, ROUNDING, scale=2.0)}] for value in (0.0, 0.0019, 0.0021))
    assert equality(zero * 2, little).verdict == "rounding"
    assert equality(zero * 2, much).verdict == "differs"
