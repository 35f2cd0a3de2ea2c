"""Whole points of workload=tp_training: real processes, real steps, what the result says of them."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overlap_sweep.errors import Refused
from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import TpTrainingRun
from overlap_sweep.trace.overlap import analyse_trace
from tests.processes import run_ranks
from tests.training.points import tp_point


def _run(ranks: Ranks, point: dict[str, Any], directory: Path) -> dict[str, Any]:
    from overlap_sweep.tp_training.run import run_tp_training

    return run_tp_training(point, directory, ranks)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """fsdp_dtensor, two micro batches a step, profiled."""
    directory = tmp_path_factory.mktemp("point")
    point = tp_point("profile=all", "tp_training.gradient_accumulation_steps=2", "tp_training.warmup_steps=2")
    found: dict[str, Any] = run_ranks(2, _run, point, directory, keep="cpu")[0]
    return found, directory


def test_each_step_has_its_parts(measured: tuple[dict[str, Any], Path]) -> None:
    run: TpTrainingRun = measured[0]["tp_training"]
    assert [step.step for step in run.steps] == [0, 1, 2, 3, 4]
    assert [step.warmup for step in run.steps] == [True, True, False, False, False]
    for step in run.steps:
        parts = (step.forward_us, step.backward_us, step.optimizer_us)
        assert min(parts) > 0
        # Each is that of the slowest rank, which need not be the same.
        assert max(parts) < step.step_us <= 1.2 * sum(parts)
        assert step.memory_peak_gb is None
    assert all(step.loss and step.grad_norm for step in run.steps)


def test_the_objective_is_the_median_of_the_steps_after_the_warmup(measured: tuple[dict[str, Any], Path]) -> None:
    run: TpTrainingRun = measured[0]["tp_training"]
    timed = sorted(step.step_us for step in run.steps[2:])
    assert measured[0]["objective_us"] == timed[1]
    assert (run.tokens_per_step, run.samples_per_step) == (2 * 2 * 16, 4)
    assert run.host_ahead_us is None
    assert not measured[0]["launch_bound"]


def test_the_traces_hold_the_steps_with_their_communication(measured: tuple[dict[str, Any], Path]) -> None:
    found, directory = measured
    assert found["traces"] == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
    for name in found["traces"]:
        rows = [row for row in analyse_trace(directory / name) if row.phase == "all"]
        assert len(rows) == 2
        assert all(row.comm_busy_us > 0 and row.gemm_busy_us > 0 for row in rows)


def _left(ranks: Ranks, point: dict[str, Any], directory: Path) -> bool:
    """Whether the model is still there after the run, without any collection of garbage but the run's own."""
    from overlap_sweep.tp_training import fsdp_dtensor

    build, built = fsdp_dtensor.build, []

    def watched(*given: Any) -> Any:
        new = build(*given)
        built.append(weakref.ref(new._model))
        return new

    with patch.object(fsdp_dtensor, "build", watched):
        _run(ranks, point, directory)
    (model,) = built
    return model() is not None


def test_nothing_of_a_model_is_left_for_the_next_point(tmp_path: Path) -> None:
    point = tp_point("tp_training.num_training_steps=2")
    assert run_ranks(2, _left, point, tmp_path, keep="cpu") == [False, False]


@pytest.mark.end_to_end
def test_a_run_is_repeated_to_the_last_digit_and_by_another_seed_to_none(
    measured: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    def losses(found: dict[str, Any]) -> list[float]:
        return [step.loss for step in found["tp_training"].steps]

    again, other = (
        run_ranks(2, _run, tp_point("tp_training.gradient_accumulation_steps=2", *more), tmp_path, keep="cpu")[0]
        for more in ((), ("tp_training.seed=43",))
    )
    assert losses(again) == losses(measured[0])
    assert all(abs(a - b) > 1e-4 for a, b in zip(losses(other), losses(again), strict=True))


def test_a_full_device_is_told_with_what_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap_sweep.tp_training import implementation, run

    def build(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(implementation, "load", lambda _name: SimpleNamespace(build=build))
    monkeypatch.setattr(run, "groups_of", lambda *_: SimpleNamespace(dp_rank=0))
    with pytest.raises(torch.OutOfMemoryError) as error:
        run.run_tp_training(tp_point("tp_size=1"), tmp_path, Ranks(0, 1, torch.device("cpu")))
    said = str(error.value)
    assert "tp_training.activation_checkpointing=true" in said
    assert "Tried to allocate 2.00 GiB" in said
    assert "\n" not in said


def test_what_cannot_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap_sweep.tp_training import run

    point = {**tp_point("tp_size=1"), "language_model": {**tp_point()["language_model"], "num_hidden_layers": 10**6}}
    ranks = SimpleNamespace(device=torch.device("cuda"), slowest=list)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (140 * 10**9, 141 * 10**9))
    with pytest.raises(Refused, match=r"give a larger tp_size, a larger dp_size or fewer layers"):
        run._check_memory(point, ranks)  # type: ignore[arg-type]
    run._check_memory(tp_point("tp_size=1"), ranks)  # type: ignore[arg-type]
