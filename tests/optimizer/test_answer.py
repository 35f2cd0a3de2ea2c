"""How an answer is said that is not known yet."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.levers.status import APPLIES, LeverStatus, add_status
from overlap_sweep.optimizer.answer import set_by_command, undecided
from overlap_sweep.results.gain import NO_GAIN, Gain
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import read_points
from overlap_sweep.results.provenance import highest_load
from overlap_sweep.results.records import KnobSearch, TriedKnobs
from tests.make_point import make_point


def search(**known: Any) -> KnobSearch:
    return KnobSearch(label="train.py on 1 rank", overrides=[], **known)


KNOBS = {"job.levers.loader.num_workers": ["null", "1", "4"], "job.levers.loader.pin_memory": ["null", "true"]}


def tried(*changes: dict[str, str]) -> list[TriedKnobs]:
    return [TriedKnobs(changed=one, time_us=1.0, noise_us=0.1, measurements=1) for one in ({}, *changes)]


def test_what_is_undecided_is_said_with_what_is_known_and_how_to_go_on() -> None:
    one, four, pin = (
        {"job.levers.loader.num_workers": "1"},
        {"job.levers.loader.num_workers": "4"},
        {"job.levers.loader.pin_memory": "true"},
    )
    found = search(knobs=KNOBS, tried=tried(one, four, pin), seemed=four)
    assert undecided(found, [16.39, 194.0, 20.0], "5.0 on 2 cores", Gain(0.158, 0.188)) == (
        "Undecided: a step of the command as it is took 16.4 to 194.0 ms in 3 runs, with a load of the machine up to "
        "5.0 on 2 cores, which other programs may share. loader.num_workers=4 may gain +15.8% (-3.0 to 31.2), NOT "
        "PROVEN. Go on with --resume --minutes N when the machine is idle."
    )


def test_what_was_interrupted_says_how_much_of_it_was_tried() -> None:
    found = search(knobs=KNOBS, tried=tried({"job.levers.loader.num_workers": "1"}))
    end = ": a step of the command as it is took 20.0 ms in 1 run. Go on with --resume --minutes N."
    assert undecided(found, [20.0], "", NO_GAIN) == f"Not finished, 1 of 3 values tried{end}"
    assert (
        undecided(search(knobs=KNOBS, tried=tried()), [20.0], "", NO_GAIN) == f"Not finished, 0 of 3 values tried{end}"
    )
    assert undecided(search(knobs={}), [20.0], "", NO_GAIN) == f"Not finished, nothing tried{end}"


def test_a_load_is_said_that_the_cores_are_too_few_for(tmp_path: Path) -> None:
    """Results of earlier versions have none, or not of how many cores."""
    for name, loads in {"idle": (0.5, 1.9), "busy": (1.0, 5.04), "old": ()}.items():
        moments = {str(number): {"load_1min": load, "cores": 2} for number, load in enumerate(loads)}
        make_point("job", tmp_path / name, conditions=moments or {"before": {"load_1min": 9.0}})
    assert highest_load(read_points(tmp_path / "idle").points) == ""
    assert highest_load(read_points(tmp_path).points) == "5.0 on 2 cores"


def test_variables_that_the_command_sets_are_written_where_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (("cuda.max_connections", "CUDA_DEVICE_MAX_CONNECTIONS=1"), ("nccl.max_ctas", "")):
        add_status(str(tmp_path), LeverStatus(name, 8, APPLIES, said))
    settings: dict[str, Scalar] = {"cuda.max_connections": 32, "nccl.max_ctas": 8, "ddp.bucket_cap_mb": 4}
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    lines = [*set_by_command([tmp_path], settings)]
    assert lines == ["where the command sets CUDA_DEVICE_MAX_CONNECTIONS=1: CUDA_DEVICE_MAX_CONNECTIONS=32"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not [*set_by_command([tmp_path], settings)]
