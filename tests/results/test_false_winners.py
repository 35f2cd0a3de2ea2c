"""How often equal settings of a job have a winner, and that a faster one is found: a small part of the simulation in
benchmarks/false_winners.py."""

import pytest

from benchmarks.false_winners import MACHINES, Machine, best_of, proven_of, rate

TRIALS = 80
MOST = 0.05 + 2 * (0.05 * 0.95 / TRIALS) ** 0.5
"""5 %, and two standard errors of as many trials."""


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize(("settings", "repetitions", "steps"), [(2, 3, 4), (5, 2, 8)])
def test_equal_settings_have_no_winner(machine: Machine, settings: int, repetitions: int, steps: int) -> None:
    assert rate(best_of, machine, [0.0] * settings, repetitions, steps, TRIALS) <= MOST


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_search_proves_none_of_them(machine: Machine) -> None:
    assert rate(proven_of, machine, [0.0] * 2, 2, 4, 60) <= MOST


def test_two_runs_of_two_settings_have_no_winner_and_ten_percent_are_found_in_three() -> None:
    quiet = MACHINES[0]
    assert rate(best_of, quiet, [0.0, 0.5], 2, 20, 20) == 0.0
    assert rate(best_of, quiet, [0.0, 0.1], 3, 8, 60) >= 0.95
    assert rate(best_of, quiet, [0.0, 0.1, 0.0, 0.0, 0.0], 3, 8, 40) >= 0.95
