"""AutoTP on real GPUs: losses are those of the whole model on one, and DeepSpeed compiles nothing of its own."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn import functional

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training.architectures import architecture
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.initial_weights import initial_weights
from tests.processes import run_ranks
from tests.tp_training.test_autotp import autotp_point, points_of, zero
from tests.tp_training.whole_model import Trained, train_points

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")

SMALL = (
    *("model.hidden_size=1024", "model.ffn_hidden_size=2816", "model.num_attention_heads=8", "model.num_kv_heads=4"),
    *("model.vocab_size=32003", "tp_training.seq_length=512", "tp_training.learning_rate=0.0001"),
)
"""Two layers; the vocabulary is padded."""
ASKED = {
    **{
        f"{dtype} zero{stage}": (f"tp_training.dtype={dtype}", zero(stage))
        for dtype in ("float32", "bfloat16", "float16")
        for stage in (0, 1, 2)
    },
    "autocast": ("tp_training.autocast=true", "tp_training.dtype=bfloat16"),
    "autocast, float16": ("tp_training.autocast=true", "tp_training.dtype=float16", zero(0)),
    "float32 checkpointed": ("tp_training.activation_checkpointing=true",),
    "bfloat16 compiled": ("tp_training.compile=true", "tp_training.dtype=bfloat16"),
}


def _train(ranks: Ranks, points: dict[str, dict[str, Any]]) -> tuple[dict[str, Trained], list[str]]:
    """And the operators that DeepSpeed compiled or loaded meanwhile."""
    trained = train_points(ranks, points)
    from deepspeed.ops.op_builder.builder import OpBuilder

    return trained, sorted(OpBuilder._loaded_ops)


@cache
def runs() -> list[tuple[dict[str, Trained], list[str]]]:
    return run_ranks(2, _train, points_of(ASKED, *SMALL), device="cuda")


@cache
def one_gpu() -> Trained:
    """The whole model in float32, as Hugging Face makes it, on the same device: another draws other weights."""
    point, ranks = autotp_point(*SMALL), Ranks(0, 1, torch.device("cuda", 0))
    fields, training = point["language_model"], point["tp_training"]
    with ranks.device:
        model = architecture(fields["model_type"]).build(fields, "sdpa").train()
    draw = initial_weights(point, ranks)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(draw(name, parameter.shape))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training["learning_rate"], weight_decay=training["weight_decay"]
    )
    batches, trained = TokenBatches(point, ranks, 0), Trained([], [], {}, [])
    for step in range(training["num_training_steps"]):
        logits = model(batches[step].tokens).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batches[step].labels.flatten())
        loss.backward()
        trained.losses.append(loss.item())
        trained.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), training["max_grad_norm"]).item())
        optimizer.step()
        optimizer.zero_grad()
    return trained


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ASKED)
def test_losses_and_norms_are_those_of_one_gpu(name: str) -> None:
    exact = "float16" not in name and "autocast" not in name
    for trained, _ in runs():
        assert trained[name].losses == pytest.approx(one_gpu().losses, rel=1e-3 if exact else 5e-3)
        assert trained[name].norms == pytest.approx(one_gpu().norms, rel=1e-3 if exact else 5e-2)


@pytest.mark.gpu(count=2)
def test_deepspeed_compiles_nothing() -> None:
    assert [operators for _, operators in runs()] == [[], []]
