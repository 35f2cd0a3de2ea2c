"""Whole points of workload=tp_training: real processes, real steps, what the result says of them."""

import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.result import TpTrainingRun
from tests.composed import tp_point
from tests.processes import run_ranks
from tests.trace.conftest import analyse_trace
from tests.workloads.tp_training.stacks import differences, train_points


def _run(ranks: Ranks, point: Resolved, directory: Path) -> tuple[dict[str, Any], list[bool]]:
    """What the run returns, and whether its model is still there after the run's own collection of garbage."""
    from overlap_sweep.workloads.tp_training import run
    from overlap_sweep.workloads.tp_training.fsdp_dtensor import FsdpDtensor

    built = []

    def watched(*given: Any) -> FsdpDtensor:
        new = FsdpDtensor(*given)
        built.append(weakref.ref(new._model))
        return new

    with patch.object(run, "load", lambda _impl: watched):
        found = run.run(point, directory, ranks)
    return found, [model() is not None for model in built]


def test_a_run_returns_its_steps_and_leaves_their_traces_and_nothing_of_its_model(tmp_path: Path) -> None:
    point = tp_point("profile=all", "tp_training.gradient_accumulation_steps=2", "tp_training.warmup_steps=2")
    (found, left), (_, left_too) = run_ranks(2, _run, point, tmp_path, keep="cpu")
    assert left == left_too == [False]
    run: TpTrainingRun = found["measured"]
    assert [(step.step, step.warmup) for step in run.steps] == [(step, step < 2) for step in range(5)]
    beside = []
    for step in run.steps:
        parts = (step.forward_us, step.backward_us, step.optimizer_us)
        assert min(parts) > 0
        # Each is that of the slowest rank, which need not be the same.
        assert max(parts) < step.step_us
        beside.append(step.step_us / sum(parts))
        assert step.memory_peak_gb is None
        assert step.loss
        assert step.grad_norm
    # The best of them: what else the machine runs may come between the parts of any one.
    assert min(beside) <= 1.2
    # The median of those after the warm-up.
    assert found["objective_us"] == sorted(step.step_us for step in run.steps[2:])[1]
    assert (run.tokens_per_step, run.samples_per_step, run.host_ahead_us) == (2 * 2 * 16, 4, None)
    assert not found["launch_bound"]
    assert found["traces"] == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
    for name in found["traces"]:
        rows = [row for row in analyse_trace(tmp_path / name) if row.phase == "all"]
        assert len(rows) == 2
        assert all(row.comm_us > 0 and row.gemm_us > 0 for row in rows)


def test_a_full_device_is_told_with_what_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import overlap_sweep.workloads.tp_training.run as run

    def build(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(run, "load", lambda _impl: build)
    monkeypatch.setattr(run, "groups_of", lambda *_: SimpleNamespace(dp_rank=0))
    with pytest.raises(torch.OutOfMemoryError) as error:
        run.run(tp_point("tp_size=1"), tmp_path, Ranks(0, 1, torch.device("cpu")))
    assert re.fullmatch(r".*activation_checkpointing=true.*Tried to allocate 2.00 GiB.*", str(error.value))


def test_losses_and_norms_are_those_of_the_whole_model_however_the_vocabulary_is_cut() -> None:
    """Of the stack that is there everywhere; test_stacks has all of them."""
    small, whole = ["model.vocab_size=12"], ["tp_training.vocab_parallel=false"]
    asked = {"cut": small, "a rank of padding": ["model.vocab_size=3"], "whole": whole, "again": whole}
    points = {name: tp_point("tp_training.num_training_steps=2", *given) for name, given in asked.items()}
    found = run_ranks(2, train_points, points, keep="cpu")
    # To the last digit.
    assert all(of_rank["again"] == of_rank["whole"] for of_rank in found)
    for name, point in points.items():
        of_losses, of_norms = differences([of_rank[name] for of_rank in found], point)
        assert of_losses < 1e-6, name
        assert of_norms < 2e-5, name
