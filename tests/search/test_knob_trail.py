from __future__ import annotations

import pytest

from overlap_sweep.search.knob_trail import Knob, KnobTrail, Setting

KNOBS = [Knob("a", ("0", "1", "2", "3")), Knob("env", ("null", "8", "16", "32"), restarts=True)]


@pytest.mark.parametrize(
    ("settings", "room", "asked"),
    [
        ([("1", "null"), ("2", "null"), ("3", "null")], 2.0, 2),
        ([("0", "8"), ("0", "16"), ("0", "32")], 4.0, 2),
        ([("0", "8"), ("0", "16"), ("0", "32")], 3.0, 1),
        ([("1", "null"), ("0", "8"), ("2", "null")], 3.0, 2),
        ([("0", "8")], 0.5, 0),
    ],
)
def test_what_needs_other_processes_takes_the_room_of_two(settings: list[Setting], room: float, asked: int) -> None:
    trail = KnobTrail(KNOBS, lambda setting: None, lambda: room)
    assert len(next(trail.measure(settings), [])) == asked
    assert trail.cut == (asked < len(settings))
