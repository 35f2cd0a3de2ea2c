"""The same training by one process with the whole Hugging Face model, and runs of the implementations to hold against
it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import implementation
from overlap_sweep.tp_training.architectures import architecture
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.groups import groups_of
from overlap_sweep.tp_training.initial_weights import initial_weights


class Trained(NamedTuple):
    losses: list[float]
    """Of each step, of one data-parallel rank."""
    norms: list[float]
    details: dict[str, Any]
    warnings: list[str]


def whole_model(point: Mapping[str, Any]) -> nn.Module:
    """As Hugging Face makes it, with the point's initial weights."""
    fields = point["language_model"]
    model = architecture(fields["model_type"]).build(fields, point["tp_training"]["attn_impl"] or "sdpa").train()
    draw = initial_weights(point, Ranks(0, 1, torch.device("cpu")))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape))
    return model


def differences(found: Sequence[Trained], point: Mapping[str, Any]) -> tuple[float, float]:
    """The largest of the losses and of the norms from the whole model's, relative, over ranks and steps."""
    expected = train_whole(point)
    # Something is learned.
    assert len({round(loss, 3) for loss in expected[0].losses}) == point["tp_training"]["num_training_steps"]
    pairs = [(of_rank, expected[rank // point["tp_size"]]) for rank, of_rank in enumerate(found)]
    return (
        max(abs(a / b - 1) for mine, theirs in pairs for a, b in zip(mine.losses, theirs.losses, strict=True)),
        max(abs(a / b - 1) for mine, theirs in pairs for a, b in zip(mine.norms, theirs.norms, strict=True)),
    )


def train_whole(point: Mapping[str, Any]) -> list[Trained]:
    """Of each data-parallel rank's batches, by one process: what the point's implementation must come to."""
    training = dict.fromkeys(_ALL_THE_SAME) | {"attn_impl": point["tp_training"]["attn_impl"] or "sdpa"}
    same = {**point, "tp_training": {**point["tp_training"], **training}}
    named = ("language_model", "tp_training", "dp_size", "workload")
    return _train_whole(json.dumps({name: same[name] for name in named}, sort_keys=True))


_ALL_THE_SAME = (
    *("zero_stage", "vocab_parallel", "sequence_parallel", "compile", "tp_comm_overlap", "tp_comm_overlap_cfg"),
    *("dtype", "autocast", "activation_checkpointing"),
)
"""Options that do not change what is computed, as far as float32 has it."""


@cache
def _train_whole(asked: str) -> list[Trained]:
    point = json.loads(asked)
    # Of so small tensors more threads make it slower.
    torch.set_num_threads(1)
    training, ranks = point["tp_training"], Ranks(0, 1, torch.device("cpu"))
    micro_batches, dp_size = training["gradient_accumulation_steps"], point["dp_size"]
    model = whole_model(point)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training["learning_rate"], weight_decay=training["weight_decay"]
    )
    batches = [TokenBatches(point, ranks, dp_rank) for dp_rank in range(dp_size)]
    losses: list[list[float]] = [[] for _ in range(dp_size)]
    norms = []
    for step in range(training["num_training_steps"]):
        for dp_rank in range(dp_size):
            of_step = 0.0
            for micro_batch in range(micro_batches):
                batch = batches[dp_rank][step * micro_batches + micro_batch]
                logits = model(batch.tokens).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
                (loss / micro_batches / dp_size).backward()
                of_step += loss.item() / micro_batches
            losses[dp_rank].append(of_step)
        limit = training["max_grad_norm"] or float("inf")
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return [Trained(of_rank, norms, {}, []) for of_rank in losses]


def train_points(ranks: Ranks, points: Mapping[str, Mapping[str, Any]]) -> dict[str, Trained]:
    """Each by its own implementation, on all ranks. For `run_ranks`."""
    return {name: _train(ranks, point) for name, point in points.items()}


def _train(ranks: Ranks, point: Mapping[str, Any]) -> Trained:
    training, groups = point["tp_training"], groups_of(ranks, point["tp_size"], point["dp_size"])
    micro_batches = training["gradient_accumulation_steps"]
    batches = TokenBatches(point, ranks, groups.dp_rank)
    built = implementation.load(point["impl"]).build(point, ranks, groups)
    losses, norms = [], []
    for step in range(training["num_training_steps"]):
        of_step = 0.0
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            loss = built.forward(*batches[step * micro_batches + micro_batch], last)
            assert loss.dtype == torch.float32
            built.backward(loss, last)
            of_step += loss.item() / micro_batches
        losses.append(of_step)
        norms.append(built.update().item())
    facts = built.facts()
    built.close()
    return Trained(losses, norms, facts.details, facts.warnings)
