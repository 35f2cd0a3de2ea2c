"""Every stack, cut over ranks in every way, trains what the whole Hugging Face model does in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import architectures, implementation
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.groups import groups_of
from tests.processes import run_ranks
from tests.tp_training.stacks import (
    ASYNC_TP,
    AUTOCAST,
    CASES,
    FUSED,
    GRANITE,
    HALF,
    NOT_CLIPPED,
    RANKS,
    Case,
    config_point,
    make_do,
    point_of,
    train_with_architectures,
    trained,
    zero,
)
from tests.tp_training.whole_model import Trained, differences, train_points
from tests.training.points import tp_point

pytestmark = pytest.mark.end_to_end

WITHIN = {
    "autotp": (1e-4, 1e-4),
    "fsdp_dtensor": (1e-6, 2e-5),
    "async_tp": (1e-6, 2e-5),
    "megatron": (1e-4, 1e-4),
}
HALF_WITHIN = {"autotp": (3e-4, 1e-2), "fsdp_dtensor": (2e-3, 0.02), "megatron": (2e-3, 5e-2)}
"""Relative, of losses and of norms: what is wrong in the norm or the loss scale is wrong by more."""
HUGGING_FACE = ("autotp", "fsdp_dtensor")


def of_case(case: Case) -> list[Trained]:
    """By rank."""
    return [of_rank.trained[str(case)] for of_rank in trained(case.stack, RANKS[case.mesh])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_norms_are_those_of_one_process(case: Case) -> None:
    of_losses, of_norms = differences(of_case(case), point_of(case))
    assert of_losses < WITHIN[case.stack][0]
    assert of_norms < WITHIN[case.stack][1]


@pytest.mark.parametrize("case", HALF, ids=str)
def test_lower_precisions_train_nearly_the_same(case: Case) -> None:
    of_losses, of_norms = differences(of_case(case), point_of(case))
    # Neither the same as in float32, nor anything else.
    assert 1e-7 < of_losses < HALF_WITHIN[case.stack][0]
    assert of_norms < HALF_WITHIN[case.stack][1]


@pytest.mark.parametrize("case", ASYNC_TP, ids=str)
def test_async_tp_fuses_what_can_be_fused(case: Case) -> None:
    point = point_of(case)
    training, layers = point["tp_training"], point["language_model"]["num_hidden_layers"]
    passes = layers * training["gradient_accumulation_steps"] * training["num_training_steps"]
    # Queries, keys and values with a bias are none of the GEMMs that are fused.
    biased, again = int(case.name == "qwen2"), int(training["activation_checkpointing"])
    for ran in trained(case.stack, RANKS[case.mesh]):
        found, fused = ran.trained[str(case)], ran.fused[str(case)]
        # Of the inputs of attention and MLP forward, and of the gradients of their outputs. All layers share them.
        assert found.details["compiled_graphs"] == 2
        assert (found.details[FUSED[0]], found.details["all_gathers_left"]) == (4 - biased, biased)
        # A sum of several GEMMs' products is no GEMM's.
        assert (found.details[FUSED[1]], found.details["reduce_scatters_left"]) == (2, 2)
        assert found.warnings == []
        assert fused.count(FUSED[0]) == passes * (4 - biased + 2 * again)
        # The last one of the forward is not needed again.
        assert fused.count(FUSED[1]) in (passes * (2 + again), passes * (2 + 2 * again))


@pytest.mark.parametrize("stack", HUGGING_FACE)
def test_a_new_architecture_is_a_new_file(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "granite.py").write_text(GRANITE)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    point, llama = (tp_point(f"impl={stack}", f"model.architecture={name}") for name in ("granite", "llama"))
    assert point["language_model"]["embedding_multiplier"] == 3.0
    found = [of_rank[""] for of_rank in run_ranks(2, train_with_architectures, tmp_path, {"": point}, keep=stack)]
    assert max(differences(found, point)) < 1e-4
    assert differences(found, llama)[0] > 1e-3


@pytest.mark.parametrize("stack", HUGGING_FACE)
def test_a_config_is_trained_with_all_that_it_says(stack: str, tmp_path: Path) -> None:
    point = config_point(tmp_path, f"impl={stack}", "tp_training.learning_rate=0.01")
    of_losses, of_norms = differences(
        [of_rank[""] for of_rank in run_ranks(2, train_points, {"": point}, keep=stack)], point
    )
    assert of_losses < 1e-4
    assert of_norms < 1e-3


def test_megatron_says_what_was_run() -> None:
    def details(mesh: str) -> dict[str, object]:
        name = "megatron, {}, in sequence, accumulated"
        return trained("megatron", 2)[0].trained[name.format(mesh)].details

    alone, replicated = details("tp2"), details("dp2")
    assert alone["tp_comm_overlap"] == replicated["tp_comm_overlap"] == "off"
    assert (alone["sequence_parallel"], replicated["sequence_parallel"]) == (True, False)
    assert (alone["optimizer"], replicated["optimizer"]) == ("not distributed", "distributed")
    assert (alone["overlap_grad_reduce"], replicated["overlap_grad_reduce"]) == (False, True)


OVERFLOWING = {
    **{f"autotp, zero{stage}": ("impl=autotp", zero(stage)) for stage in (0, 1, 2)},
    "autotp, autocast": ("impl=autotp", zero(0), AUTOCAST, NOT_CLIPPED),
    "fsdp_dtensor": ("impl=fsdp_dtensor",),
    "megatron": ("impl=megatron",),
}


def _overflow(ranks: Ranks, point: dict[str, Any]) -> list[tuple[float, float, float]]:
    """By step the loss of one batch, the norm and the loss scale after it, where gradients of the second step are
    infinite: with Megatron-Core all, otherwise one of one rank."""
    groups, impl = groups_of(ranks, point["tp_size"], point["dp_size"]), point["impl"]
    make_do(impl, ranks)
    built, found = implementation.load(impl).build(point, ranks, groups), []
    batch = TokenBatches(point, ranks, groups.dp_rank)[0]
    for step in range(3):
        spoiled = step == 1 and ranks.rank == 1
        loss = built.forward(*batch, True)
        if impl == "autotp":
            weight = built._engine.module.model.layers[0].mlp.up_proj.weight
            hook = weight.register_hook(lambda gradient, spoiled=spoiled: gradient / (0.0 if spoiled else 1.0))
        built.backward(loss * torch.inf if impl == "megatron" and step == 1 else loss, True)
        if impl == "autotp":
            hook.remove()
        if impl == "fsdp_dtensor" and spoiled:
            list(built._model.parameters())[3].grad.to_local().view(-1)[0] = torch.inf
        norm = built.update().item()
        found.append((loss.item(), norm, SCALE[impl](built)))
    built.close()
    return found


SCALE: dict[str, Callable[[Any], float]] = {
    "autotp": lambda built: 2.0**16,
    "fsdp_dtensor": lambda built: built._scaler.get_scale(),
    "megatron": lambda built: built._optimizer.get_loss_scale().item(),
}
"""DeepSpeed's is not looked at."""


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_step_with_infinite_gradients_is_left_out_on_all_ranks(name: str) -> None:
    point = tp_point("tp_training.dtype=float16", *OVERFLOWING[name])
    for first, second, third in run_ranks(2, _overflow, point, keep=point["impl"]):
        assert [math.isfinite(norm) for _, norm, _ in (first, second, third)] == [True, False, True]
        # No step was taken between them.
        assert first[0] > second[0] == third[0]
        if point["impl"] != "autotp":
            assert [scale for *_, scale in (first, second, third)] == [2**16, 2**15, 2**15]
