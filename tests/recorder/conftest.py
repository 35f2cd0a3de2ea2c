"""Recorders of this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from overlap_sweep.recorder.recording import Wanted
from overlap_sweep.recorder.step_recorder import StepRecorder
from tests.recorder.trainings import Recorded


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorded]:
    """Makes recorders of this process, as `of_process` does, until the end of the test."""
    handles = []

    def make(**wanted: Any) -> StepRecorder:
        few = {"skip_steps": 2, "steps": 4, "profile_steps": 0, **wanted}
        made = StepRecorder(Wanted(directory=str(tmp_path), **few))
        handles.append(register_optimizer_step_post_hook(lambda optimizer, *_: made.after_optimizer(optimizer)))
        return made

    yield make
    for handle in handles:
        handle.remove()
