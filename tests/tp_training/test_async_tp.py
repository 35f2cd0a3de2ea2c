"""Asynchronous TP: where it is refused, and what it says of what was not fused; its training is in test_stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.errors import Refused
from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training import async_tp
from tests.tp_training.stacks import FUSED
from tests.training.points import tp_point


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
