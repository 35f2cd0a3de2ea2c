"""Norms and sums by which trainings are seen to compute the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap_sweep.recorder.recording import NOT_FINITE, TrainingState
from overlap_sweep.recorder.training_state import SIGNED_SUMS, PendingState
from tests.recorder.trainings import Model, Recorded, recording


def states(directory: Path) -> TrainingState:
    found = recording(directory).state
    assert found
    return found


def test_norms_and_sums_are_of_all_that_stepped_a_step_before_times_begin(recorder: Recorded, tmp_path: Path) -> None:
    recorder(skip_steps=3)
    models = Model(), Model(torch.optim.AdamW)
    for step in range(8):
        for model in models:
            model.step()
        if step == 1:
            parameters = [one for model in models for one in model.layer.parameters()]
            flat = torch.cat([one.detach().flatten() for one in parameters]).double()
            gradients = torch.cat([one.grad.flatten() for one in parameters if one.grad is not None]).double()
    found = states(tmp_path)
    assert found.parameters_norm == pytest.approx(float(flat.norm()))
    assert found.parameters_sum == pytest.approx(float(flat.sum()))
    assert found.gradients_norm == pytest.approx(float(gradients.norm()))
    assert found.gradients_sum == pytest.approx(float(gradients.sum()))
    assert (found.step, found.loss, found.is_short) == (2, None, False)


class LateLevers:
    """Levers that are decided at the end of a later step."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def at_end_of_step(self, step: int) -> None:
        self.left -= 1

    @property
    def is_undecided(self) -> bool:
        return self.left > 0

    def say_unmet(self) -> None:
        assert self.left == 0


@pytest.mark.parametrize(("skip_steps", "step"), [(0, 1), (1, 1), (2, 2), (3, 2), (6, 5)])
def test_they_are_taken_when_levers_are_in_force_if_possible_a_step_before_times_begin(
    recorder: Recorded, tmp_path: Path, skip_steps: int, step: int
) -> None:
    recorder(skip_steps=skip_steps)
    Model().steps(max(skip_steps, 1) + 4)
    assert states(tmp_path).step == step


def test_levers_that_are_decided_later_delay_times_but_not_what_is_compared(recorder: Recorded, tmp_path: Path) -> None:
    made = recorder(skip_steps=2)
    made._levers = LateLevers(4)  # type: ignore[assignment]
    model = Model()
    model.steps(7)
    assert not made.is_over
    model.steps(1)
    assert states(tmp_path).step == 2


@pytest.mark.parametrize("loss", [2.5, torch.tensor([2.0, 3.0], dtype=torch.bfloat16, requires_grad=True)])
def test_the_loss_is_that_of_the_last_step_but_one_before_times_begin(
    recorder: Recorded, tmp_path: Path, loss: Any
) -> None:
    made, model = recorder(skip_steps=3), Model()
    model.layer.bfloat16()
    for step in range(8):
        model.optimizer.zero_grad()
        made.marked(loss if step == 1 else 7.0)
        model.optimizer.step()
    found = states(tmp_path)
    assert (found.step, found.loss, found.gradients_norm) == (2, 2.5, None)
    assert found.parameters_norm
    assert found.is_short


def test_what_has_diverged_and_sparse_gradients_are_recorded(recorder: Recorded, tmp_path: Path) -> None:
    recorder()
    layer = torch.nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(7):
        optimizer.zero_grad()
        (layer(torch.tensor([1, 1])).sum() * (torch.inf if step == 1 else 1)).backward()
        optimizer.step()
    found = states(tmp_path)
    assert (found.gradients_norm, found.parameters_norm) == (NOT_FINITE, NOT_FINITE)


def test_of_sharded_parameters_it_is_the_ranks_own_shard(recorder: Recorded, tmp_path: Path) -> None:
    """A fake process group of four ranks, in which any collective would leave zeros."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.arange(8.0)
        parameter = torch.nn.Parameter(DTensor.from_local(whole[2:4], mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        recorder()
        for _ in range(7):
            parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
            optimizer.step()
    finally:
        dist.destroy_process_group()
    found = states(tmp_path)
    assert (found.parameters_norm, found.parameters_sum) == (pytest.approx(13**0.5), 5.0)
    assert (found.gradients_norm, found.gradients_sum) == (5.0, 7.0)


def test_parameters_of_no_known_kind_are_a_problem_and_no_end(recorder: Recorded, tmp_path: Path) -> None:
    recorder()
    model = Model()
    model.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(1), requires_grad=False))
    model.optimizer.param_groups[0]["params"][-1].data = torch.ones(1, dtype=torch.float8_e4m3fn)
    model.steps(7)
    found = recording(tmp_path)
    assert found.state is None
    assert len(found.host_us) == 4
    assert found.problems[0].startswith("Norms and sums of gradients and parameters could not be taken (")


def state_of(*gradients: Tensor, rank: int = 0) -> TrainingState:
    parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return PendingState(5, [torch.optim.SGD(parameters, lr=0.1)], rank=rank).read()


def signed(*gradients: Tensor, rank: int = 0) -> Tensor:
    """Sums with signs over the norm."""
    found = state_of(*gradients, rank=rank)
    return torch.tensor(found.signed_sums) / found.gradients_norm


# Less than the signs' length, its multiple, more than are multiplied at once, and a single element.
SIZES = ((100,), (1 << 14,), (3, 1 << 13), (1,), ((1 << 24) + 70_000,))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_sums_with_signs_differ_by_the_norm_of_what_differs() -> None:
    gradients = [torch.randn(size) for size in SIZES]
    reference = signed(*gradients)
    assert len(reference) == SIGNED_SUMS
    assert torch.equal(signed(*gradients), reference)
    for share in (1e-3, 1e-1):
        # An error that adds up to nothing, and one that all elements share.
        for errors in ([torch.randn_like(one) for one in gradients], [torch.ones_like(one) for one in gradients]):
            norm, of_error = (torch.cat([one.flatten() for one in ones]).norm() for ones in (gradients, errors))
            pairs = zip(gradients, errors, strict=True)
            changed = signed(*(one + error * share * norm / of_error for one, error in pairs))
            deviation = (changed - reference).square().mean().sqrt()
            # Of eight numbers: between a fourth and twice of it in 999 of 1,000 cases.
            assert 0.25 * share < deviation < 2 * share


def test_other_data_is_seen_where_norm_and_plain_sum_are_those_of_before() -> None:
    gradient = torch.randn(1000)
    other = gradient[torch.randperm(1000)]
    assert state_of(other).gradients_norm == pytest.approx(state_of(gradient).gradients_norm)
    assert state_of(other).gradients_sum == pytest.approx(state_of(gradient).gradients_sum, abs=1e-3)
    assert (signed(other) - signed(gradient)).abs().max() > 0.5


def test_ranks_have_other_signs_and_short_numbers_lose_little() -> None:
    gradient = torch.randn(50_000)
    assert (signed(gradient, rank=1) - signed(gradient)).abs().max() > 0.5
    assert (signed(gradient.bfloat16()) - signed(gradient)).abs().max() < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(signed(gradient), signed(gradient))
        assert (signed(gradient + 1e-4) - signed(gradient)).abs().max() < 1e-3


def test_signs_leave_the_scripts_random_numbers() -> None:
    before = torch.get_rng_state()
    signed(torch.ones(10))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_layout_tells_sizes_apart() -> None:
    one, other = torch.zeros(6), torch.zeros(2, 3)
    assert state_of(one).layout == state_of(one + 1).layout
    assert len({state_of(one).layout, state_of(other).layout, state_of(one, other).layout}) == 3


@pytest.mark.gpu
def test_on_a_gpu_no_step_waits_for_norms_and_losses(recorder: Recorded, tmp_path: Path) -> None:
    made = recorder(skip_steps=2, steps=4)
    layer = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters())
    inputs = torch.ones(8, 64, device="cuda", dtype=torch.bfloat16)
    for step in range(6):
        # All is read at the end of the last step.
        torch.cuda.set_sync_debug_mode("error" if step < 5 else "default")
        loss = layer(inputs).square().mean()
        loss.backward()
        optimizer.step()
        made.marked(loss)
        if step == 1:
            norm = torch.cat([one.detach().flatten() for one in layer.parameters()]).double().norm()
    found = states(tmp_path)
    assert found.parameters_norm == pytest.approx(float(norm), rel=1e-5)
    assert found.gradients_norm
    assert isinstance(found.loss, float)
    assert (found.step, found.is_short) == (2, True)
