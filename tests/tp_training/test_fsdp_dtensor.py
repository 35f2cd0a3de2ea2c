"""FSDP2 and DTensor, cut over ranks in every way, compute what the whole model does in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import fsdp_dtensor
from overlap_sweep.tp_training.architectures import known
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.groups import groups_of
from tests.processes import run_ranks
from tests.tp_training.points import tp_point
from tests.tp_training.whole_model import Trained, train_points, train_whole

IN_SEQUENCE = "tp_training.sequence_parallel=true"
TIED = "model.tie_word_embeddings=true"
WHOLE_VOCABULARY = "tp_training.vocab_parallel=false"
ACCUMULATED = "tp_training.gradient_accumulation_steps=2"
NOT_CLIPPED = "tp_training.max_grad_norm=0"
CLIPPED = "tp_training.max_grad_norm=0.3"
CHECKPOINTED = "tp_training.activation_checkpointing=true"
COMPILED = "tp_training.compile=true"
MESHES = {"tp2": (1, 2), "dp2": (2, 1), "dp2 tp2": (2, 2), "alone": (1, 1)}
"""dp_size, tp_size."""

QUICK = {
    "": (CLIPPED,),
    "in sequence": (IN_SEQUENCE, TIED, CLIPPED, ACCUMULATED),
    "whole vocabulary": (WHOLE_VOCABULARY, IN_SEQUENCE, NOT_CLIPPED, CHECKPOINTED),
}
MORE = {
    **QUICK,
    **{f"{name} in sequence": (f"model.architecture={name}", IN_SEQUENCE) for name in known()},
    **{name: (f"model.architecture={name}", CHECKPOINTED) for name in known()},
    "tied": (TIED, NOT_CLIPPED),
    "whole tied vocabulary": (WHOLE_VOCABULARY, TIED, CLIPPED),
    "even vocabulary": ("model.vocab_size=1024", IN_SEQUENCE),
    "accumulated": (ACCUMULATED, CLIPPED, "tp_training.weight_decay=1"),
    "eager": ("tp_training.attn_impl=eager", IN_SEQUENCE),
}
LOWER = {
    "bf16": ("tp_training.dtype=bfloat16", IN_SEQUENCE),
    "bf16 autocast": ("tp_training.dtype=bfloat16", "tp_training.autocast=true"),
    "fp16": ("tp_training.dtype=float16", IN_SEQUENCE),
    "fp16 autocast": ("tp_training.dtype=float16", "tp_training.autocast=true"),
}


def points_of(
    asked: Mapping[str, Sequence[str]], dp_size: int, tp_size: int, impl: str = "fsdp_dtensor"
) -> dict[str, dict[str, Any]]:
    sizes = f"impl={impl}", f"dp_size={dp_size}", f"tp_size={tp_size}"
    return {name: tp_point(*sizes, *overrides) for name, overrides in asked.items()}


def differences(found: Sequence[Trained], point: dict[str, Any]) -> tuple[float, float]:
    """The largest of the losses and of the norms, relative, over ranks and steps."""
    expected = train_whole(point)
    pairs = [(of_rank, expected[rank // point["tp_size"]]) for rank, of_rank in enumerate(found)]
    assert len({round(loss, 3) for loss in expected[0].losses}) == 5
    return (
        max(abs(a / b - 1) for mine, theirs in pairs for a, b in zip(mine.losses, theirs.losses, strict=True)),
        max(abs(a / b - 1) for mine, theirs in pairs for a, b in zip(mine.norms, theirs.norms, strict=True)),
    )


@pytest.mark.end_to_end
def test_two_ranks_train_what_one_does() -> None:
    points = points_of(QUICK, 1, 2)
    trained = run_ranks(2, train_points, points)
    for name, point in points.items():
        of_losses, of_norms = differences([of_rank[name] for of_rank in trained], point)
        assert of_losses < 1e-6, name
        assert of_norms < 2e-5, name


@pytest.mark.end_to_end
@pytest.mark.parametrize("mesh", MESHES)
def test_all_meshes_train_what_one_rank_does(mesh: str) -> None:
    dp_size, tp_size = MESHES[mesh]
    points = points_of(MORE, dp_size, tp_size)
    trained = run_ranks(dp_size * tp_size, train_points, points)
    for name, point in points.items():
        of_losses, of_norms = differences([of_rank[name] for of_rank in trained], point)
        assert of_losses < 1e-6, name
        assert of_norms < 2e-5, name


@pytest.mark.end_to_end
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_lower_precisions_train_nearly_the_same(mesh: str) -> None:
    points = points_of(LOWER, *MESHES[mesh])
    trained = run_ranks(2, train_points, points)
    for name, point in points.items():
        of_losses, of_norms = differences([of_rank[name] for of_rank in trained], point)
        # Neither the same as in float32, nor anything else.
        assert 1e-7 < of_losses < 2e-3, name
        assert of_norms < 0.02, name


@pytest.mark.end_to_end
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_compiled_layers_train_the_same(mesh: str) -> None:
    asked = {"": (COMPILED,), "in sequence": (COMPILED, IN_SEQUENCE, CHECKPOINTED)}
    points = points_of(asked, *MESHES[mesh])
    trained = run_ranks(2, train_points, points)
    for name, point in points.items():
        of_losses, of_norms = differences([of_rank[name] for of_rank in trained], point)
        assert of_losses < 1e-6, name
        assert of_norms < 2e-5, name


def _overflow(ranks: Ranks, point: dict[str, Any]) -> tuple[list[float], list[bool], list[float]]:
    """Norms of three steps, of which one rank's gradients of the second are infinite; whether each changed the weights;
    the loss scale after each."""
    groups = groups_of(ranks, 2, 1)
    built = fsdp_dtensor.build(point, ranks, groups)
    batches = TokenBatches(point, ranks, 0)
    norms, changed, scales = [], [], []
    parameters = [parameter for parameter in built._model.parameters() if isinstance(parameter, DTensor)]
    for step in range(3):
        built.backward(built.forward(*batches[step], True), True)
        if step == 1 and ranks.rank == 1:
            gradient = parameters[3].grad
            assert isinstance(gradient, DTensor)
            gradient.to_local().view(-1)[0] = math.inf
        before = [parameter.to_local().clone() for parameter in parameters]
        norms.append(built.update().item())
        changed.append(any(not torch.equal(a, b.to_local()) for a, b in zip(before, parameters, strict=True)))
        scales.append(built._scaler.get_scale())
    return norms, changed, scales


@pytest.mark.end_to_end
def test_a_step_with_infinite_gradients_is_left_out_on_all_ranks() -> None:
    (point,) = points_of({"": ("tp_training.dtype=float16",)}, 1, 2).values()
    for norms, changed, scales in run_ranks(2, _overflow, point):
        assert [math.isfinite(norm) for norm in norms] == [True, False, True]
        assert changed == [True, False, True]
        assert scales == [2**16, 2**15, 2**15]
