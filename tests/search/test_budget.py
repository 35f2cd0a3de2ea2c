"""When a search has to end, whatever it still promises."""

from __future__ import annotations

import pytest

from overlap_sweep.search.budget import Budget


def test_without_limits_it_is_never_spent() -> None:
    found = Budget(None, None, points=10**6)
    found.began_s -= 10**9
    assert not found.spent
    assert (found.points_left, found.why_spent) == (None, "")


@pytest.mark.parametrize(("points", "left"), [(0, 3), (2, 1), (3, 0), (4, 0)])
def test_points_are_counted_down(points: int, left: int) -> None:
    found = Budget(3, None, points=points)
    assert found.points_left == left
    assert found.spent == (left == 0)
    assert found.why_spent == ("search.max_points=3 is used up" if left == 0 else "")


@pytest.mark.parametrize(("minutes", "spent"), [(60.0, False), (1.5, True), (0.0, True)])
def test_minutes_run_from_the_start(minutes: float, spent: bool) -> None:
    found = Budget(None, minutes)
    found.began_s -= 90.0
    assert found.elapsed_s >= 90.0
    assert found.spent is spent
    assert found.why_spent == (f"search.max_minutes={minutes:g} is used up" if spent else "")


def test_no_minutes_are_spent_at_once() -> None:
    assert Budget(None, 0.0).spent


def test_pauses_cost_nothing() -> None:
    found = Budget(None, 1.0)
    with found.paused():
        # As if it had taken an hour.
        found.began_s -= 3600.0
    found._paused_s += 3600.0
    assert found.elapsed_s < 60.0
    assert not found.spent


def test_a_pause_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Budget(None, 1.0)
    now = found.began_s
    monkeypatch.setattr("overlap_sweep.search.budget.time.monotonic", lambda: now)
    now += 50.0
    with found.paused():
        now += 1000.0
    assert found.elapsed_s == pytest.approx(50.0)
    assert not found.spent
    now += 15.0
    assert found.spent
