"""Weights are equal for whoever asks for them, and what a language model starts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import architectures
from overlap_sweep.tp_training.batches import TokenBatches
from overlap_sweep.tp_training.initial_weights import initial_weights, padded_vocab_size
from tests.training.points import tp_point

ALONE = Ranks(0, 1, torch.device("cpu"))
QUERY, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


def drawn(name: str, *shape: int, of_rank: Ranks = ALONE, **point: Any) -> Tensor:
    return initial_weights({**tp_point(), **point}, of_rank)(name, shape)


def test_all_ranks_draw_the_same_of_each_name() -> None:
    first = drawn(QUERY, 64, 32)
    assert torch.equal(first, drawn(QUERY, 64, 32, of_rank=Ranks(1, 2, torch.device("cpu"))))
    assert not torch.equal(first, drawn(QUERY.replace("0", "1"), 64, 32))
    other_seed = {**tp_point()["tp_training"], "seed": 43}
    assert not torch.equal(first, drawn(QUERY, 64, 32, tp_training=other_seed))


def test_what_it_draws() -> None:
    weight = drawn(QUERY, 512, 512)
    assert weight.dtype == torch.float32
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(weight.mean().item()) < 1e-3
    assert torch.equal(drawn("model.norm.weight", 64), torch.ones(64))
    assert not drawn("model.layers.0.self_attn.q_proj.bias", 64).any()


@pytest.mark.parametrize("name", [EMBEDDING, "lm_head.weight"])
def test_the_padding_is_zero_and_changes_nothing_else(name: str) -> None:
    padded, more = drawn(name, 1024, 8), drawn(name, 1056, 8)
    assert not padded[1019:].any()
    assert padded[:1019].all(dim=1).any()
    assert torch.equal(padded[:1019], more[:1019])
    assert torch.equal(padded[:1019], drawn(name, 1019, 8))


def test_the_vocabulary_may_have_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "renamed.py").write_text(
        "from overlap_sweep.tp_training.architectures.architecture import Architecture\n"
        "ARCHITECTURE = Architecture('renamed', embedding='model.wte', output='head')\n"
    )
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    model = {**tp_point()["language_model"], "model_type": "renamed"}
    for name in ("model.wte.weight", "head.weight"):
        padded, whole = (drawn(name, rows, 8, language_model=model) for rows in (1024, 1019))
        assert not padded[1019:].any()
        assert torch.equal(padded[:1019], whole)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8])
def test_every_rank_has_equally_many_rows(tp_size: int) -> None:
    for vocab_size in (1, 1019, 1024, 151_936):
        rows = padded_vocab_size(vocab_size, tp_size)
        assert vocab_size <= rows < vocab_size + 8 * tp_size
        assert rows % (8 * tp_size) == 0


def test_batches_are_of_the_data_parallel_rank() -> None:
    point = tp_point()
    mine, same, other = (TokenBatches(point, ALONE, dp_rank) for dp_rank in (0, 0, 1))
    assert torch.equal(mine[3].tokens, same[3].tokens)
    assert not torch.equal(mine[3].tokens, other[3].tokens)
    assert not torch.equal(mine[3].tokens, mine[4].tokens)
    assert torch.equal(mine[3].tokens[:, 1:], mine[3].labels[:, :-1])
    assert mine[3].tokens.min() >= 0
    assert mine[3].labels.max() < 1019
