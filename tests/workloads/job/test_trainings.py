"""Real trainings of two ranks: how they end when something about them is known early."""

from pathlib import Path

import pytest

from tests.workloads.job.commands import failure
from tests.workloads.job.test_sweeps import TORCHRUN, TRAIN

pytestmark = pytest.mark.end_to_end


def test_ranks_that_job_ranks_does_not_count_are_known_after_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = f"{TORCHRUN.format(ranks=2)} {tmp_path}/train.py"
    failed = failure(tmp_path, command, 120.0, attach=True, skip_steps=10**6)
    assert failed.final
    assert "the command started 2 training processes, but job.ranks=1; set job.ranks=2" in str(failed)
