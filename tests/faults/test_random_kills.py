"""Whatever is killed and when: in the end every point is there, once. random_kills.py can be run by itself, too."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.injection import TINY
from tests.faults.random_kills import VICTIMS, Kills, Undisturbed

KILLS = int(os.environ.get("OVERLAP_SWEEP_KILLS", "2"))
SWEEP = ("-m", "tp_size=2", "num_sm=1,2,3,4,5,6", "runtime.retries=100", *TINY)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240 + 180 * KILLS)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kills]:
    """By victim, all at the same time."""
    root = tmp_path_factory.mktemp("kills")
    undisturbed = Undisturbed.run(SWEEP, root / "undisturbed")
    assert len(undisturbed.points) == 6
    kills = [Kills(undisturbed, victim, KILLS, len(victim), root / victim) for victim in VICTIMS]
    with ThreadPoolExecutor() as pool:
        return dict(zip(VICTIMS, pool.map(Kills.run, kills), strict=True))


@pytest.mark.parametrize("victim", VICTIMS)
def test_random_kills_lose_and_repeat_nothing(done: dict[str, Kills], victim: str) -> None:
    kills = done[victim]
    assert not kills.wrong, kills
    assert kills.kills >= KILLS
    assert kills.points == 6 * kills.complete
