"""Asynchronous TP: what is compiled has fused operators, and trains what the whole model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.errors import Refused
from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import async_tp
from tests.backends import symm_mem_on_cpu
from tests.processes import run_ranks
from tests.tp_training.points import tp_point
from tests.tp_training.test_fsdp_dtensor import differences
from tests.tp_training.whole_model import Trained, train_points

ASKED = {
    "qwen3": ("model.num_layers=3",),
    "qwen2": ("model.architecture=qwen2", "model.tie_word_embeddings=true"),
    "checkpointed": ("tp_training.activation_checkpointing=true", "tp_training.gradient_accumulation_steps=2"),
    "one sequence": ("tp_training.batch_size=1",),
}
FUSED = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def points(*names: str) -> dict[str, dict[str, Any]]:
    return {name: tp_point("impl=async_tp", "tp_size=2", *ASKED[name]) for name in names}


def _train(ranks: Ranks, asked: dict[str, dict[str, Any]]) -> tuple[dict[str, Trained], dict[str, list[str]]]:
    """And the fused operators that ran, in order."""
    symm_mem_on_cpu.stand_in()
    # inductor asks for it, and communicates with whatever there is.
    dist.is_nccl_available = lambda: True
    found, ran = {}, {}
    for name, point in asked.items():
        symm_mem_on_cpu.called.clear()
        found |= train_points(ranks, {name: point})
        ran[name] = list(symm_mem_on_cpu.called)
    assert not torch._inductor.config._micro_pipeline_tp
    return found, ran


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ASKED)
def test_it_fuses_and_trains_what_one_rank_does(name: str) -> None:
    asked = points(name)
    of_ranks = run_ranks(2, _train, asked)
    of_losses, of_norms = differences([trained[name] for trained, _ in of_ranks], asked[name])
    assert of_losses < 1e-6
    assert of_norms < 2e-5
    training, layers = asked[name]["tp_training"], asked[name]["language_model"]["num_hidden_layers"]
    passes = layers * training["gradient_accumulation_steps"] * training["num_training_steps"]
    for trained, ran in of_ranks:
        details = trained[name].details
        # Of the inputs of attention and MLP forward, and of the gradients of their outputs. All layers share them.
        # Queries, keys and values with a bias are none of the GEMMs that are fused.
        biased = int(name == "qwen2")
        assert details["compiled_graphs"] == 2
        assert (details[FUSED[0]], details["all_gathers_left"]) == (4 - biased, biased)
        assert details[FUSED[1]] == 2
        # A sum of several GEMMs' products is no GEMM's.
        assert details["reduce_scatters_left"] == 2
        assert trained[name].warnings == []
        again = int(training["activation_checkpointing"])
        assert ran[name].count(FUSED[0]) == passes * (4 - biased + 2 * again)
        # The last one of the forward is not needed again.
        assert ran[name].count(FUSED[1]) in (passes * (2 + again), passes * (2 + 2 * again))


@pytest.mark.parametrize(
    ("nccl", "reason"), [(False, "needs a PyTorch with NCCL"), (True, "runtime.device is cpu; use impl=fsdp_dtensor")]
)
def test_it_is_refused_where_nothing_would_be_fused(nccl: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    nobody: Any = None
    with pytest.raises(Refused, match=reason):
        async_tp.build(tp_point("impl=async_tp"), Ranks(0, 2, torch.device("cpu")), nobody)


def test_it_warns_where_nothing_was_fused() -> None:
    found = async_tp.Collectives()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "0"))
    gathered = graph.call_function(
        torch.ops.symm_mem.fused_all_gather_matmul.default, (x, [x], 0, "0"), {"return_A": False}
    )
    found.count(graph)
    facts = found.facts()
    assert facts.details == {
        **{FUSED[0]: 1, FUSED[1]: 0, "all_gathers_left": 1, "reduce_scatters_left": 0, "compiled_graphs": 1}
    }
    assert facts.warnings == [
        "async TP made no fused_matmul_reduce_scatter of the layers' graphs: that part of the communication is not "
        "overlapped."
    ]
    # Or it might be gathered by multicast.
    assert gathered.kwargs["return_A"]
