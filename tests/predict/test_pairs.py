"""Recordings of two GPUs and of gloo in which one thing was changed: what is predicted from one holds of the other."""

from pathlib import Path
from statistics import median

import pytest

from benchmarks.predictions_table import DATA, judged_pairs, replay_errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.mark.end_to_end
def test_predictions_hold_of_the_changed_recordings(folder: Path) -> None:
    told = [one for one in judged_pairs(folder) if one.error is not None]
    differing = [one.is_sign_right for one in told if one.is_sign_right is not None]

    assert len(told) == 33
    assert median(abs(one.error) for one in told) < 0.035
    assert sum(one.is_within for one in told) >= 29
    assert sum(differing) >= len(differing) - 1


@pytest.mark.end_to_end
def test_recordings_replay_as_they_are(folder: Path) -> None:
    errors = replay_errors(folder, "causes")

    assert len(errors) > 60
    assert median(map(abs, errors.values())) < 1e-4
    assert max(map(abs, errors.values())) < 0.002


@pytest.mark.end_to_end
def test_predictions_hold_of_programs_that_the_model_was_not_made_on(folder: Path) -> None:
    """Noise of these times is 5 to 17 %: how close a prediction comes cannot be asked of them."""
    judged = judged_pairs(folder, DATA / "pairs" / "pairs.yaml")
    told = [one for one in judged if one.error is not None]

    assert len(told) == len(judged)
    # On a CPU twice the batch took 1.4 times as long, less than GPUs allow for.
    assert [one.pair["before"] for one in told if not one.is_within] == ["tp_batch"]
    assert [one.is_sign_right for one in told if one.is_sign_right is not None] == [True, True, True]
    assert max(map(abs, replay_errors(folder, "pairs").values())) < 0.001
