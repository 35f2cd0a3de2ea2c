"""`fsdp_dtensor` with PyTorch's asynchronous tensor parallelism: inductor fuses all-gathers with the GEMMs that take
them and GEMMs with the reduce-scatters of their products, into operators that copy from GPU to GPU while they multiply.

It fuses what it finds and says nothing of the rest, so that what it fused is counted here in the graphs that it made.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import _symmetric_memory

from overlap_sweep.backends.symm_mem import operators
from overlap_sweep.errors import Refused
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.workloads.tp_training.fsdp_dtensor import FsdpDtensor
from overlap_sweep.workloads.tp_training.implementation import Facts, Groups

GATHERED, SCATTERED = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
LEFT = {"all_gather_into_tensor": "all_gathers_left", "reduce_scatter_tensor": "reduce_scatters_left"}
"""Collectives that no GEMM was fused with, and what details call them."""


class AsyncTp(FsdpDtensor):
    """An Implementation. Refused where nothing could be fused."""

    def __init__(self, point: Mapping[str, Any], ranks: Ranks, groups: Groups) -> None:
        if reason := operators.missing():
            raise Refused(reason)
        # Inductor's pass is skipped without it.
        if not dist.is_nccl_available():
            raise Refused(
                "asynchronous TP needs a PyTorch with NCCL: without it nothing is fused; use impl=fsdp_dtensor"
            )
        with warnings.catch_warnings():
            # Deprecated, as if it were not needed; without it the compile pass fuses nothing.
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(operators.group_name(groups.tp))  # type: ignore[arg-type]
        self._found = Collectives()
        # Options of these layers instead of inductor's global ones, which other threads, such as that of a backward,
        # have their own of.
        options = {
            "_micro_pipeline_tp": True,
            "post_grad_custom_pre_pass": without_undone_views,
            "post_grad_custom_post_pass": self._found.count,
            # What comes from a cache has passed nobody who counts.
            "fx_graph_cache": False,
        }
        super().__init__(point, ranks, groups, options)

    def facts(self) -> Facts:
        found = self._found.facts()
        return Facts({**super().facts().details, **found.details}, found.warnings)

    def close(self) -> None:
        """Frees the memory that the ranks share, too. Collective."""
        super().close()
        operators.close()


def without_undone_views(graph: fx.Graph) -> None:
    """Inductor's pass that removes a view that undoes the view before it: the fusions find a GEMM only next to the
    collective, and inductor leaves such a pair where several GEMMs have the same input."""
    reshape = torch.ops.aten.reshape.default
    for node in graph.nodes:
        if node.target is not reshape or node.args[0].target is not reshape:
            continue
        before = node.args[0].args[0]
        if before.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(before)
            graph.erase_node(node)


class Collectives:
    """Those of the compiled graphs. All layers share one forward and one backward graph, unless they must differ."""

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()
        self._graphs = 0

    def count(self, graph: fx.Graph) -> None:
        """Inductor's pass over each graph, after the fusions, that counts collectives."""
        self._graphs += 1
        for node in graph.nodes:
            name = getattr(node.target, "_opname", "")
            self._found[name] += 1
            if name == GATHERED:
                # A small input that is not asked for would be gathered by NVLink multicast.
                node.kwargs = {**node.kwargs, "return_A": True}

    def facts(self) -> Facts:
        details = {name: self._found[name] for name in (GATHERED, SCATTERED)}
        left = {name: self._found[of_graph] for of_graph, name in LEFT.items()}
        said = [
            f"async TP made no {name} of the layers' graphs: that part of the communication is not overlapped."
            for name, number in details.items()
            if number == 0
        ]
        return Facts({**details, **left, "compiled_graphs": self._graphs}, said)
