"""Whatever is killed and when: in the end every point is there, once. random_kills.py can be run by itself, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.random_kills import VICTIMS, Kills

KILLS = int(os.environ.get("OVERLAP_SWEEP_KILLS", "3"))


@pytest.mark.faults
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_random_kills_lose_and_repeat_nothing(tmp_path: Path, victim: str) -> None:
    counts = Kills(victim, KILLS, seed=len(victim), root=tmp_path).run()
    assert counts.clean, counts
    assert counts.kills >= KILLS
    assert counts.points == 12 * counts.sweeps
