"""Changes of what computes."""

from __future__ import annotations

import re

from overlap_sweep.predict.changes.removal import remove
from overlap_sweep.predict.graph import CannotTell, Node, StepGraph
from overlap_sweep.trace.kernel_classes import Category, KernelClass, classify

_OF_FSDP = re.compile(r"split_with_sizes|chunk_cat")
"""Copies between parameters and what FSDP2 communicates."""


def kept(graph: StepGraph) -> None:
    """The backward pass computes nothing again; what it communicates again for that stays."""
    again = [place for place, node in enumerate(graph.nodes) if node.recomputes]
    if not again:
        raise CannotTell("The backward pass computes nothing again.")
    remove(graph, dict.fromkeys(again, ()))


def fused(graph: StepGraph) -> None:
    """PyTorch's own kernels of the forward and backward pass, on a CPU its operators, are not there, as if others did
    their work on the side."""
    category: Category = "kernel" if graph.on_device else "cpu_op"
    found = [place for place, node in enumerate(graph.nodes) if _is_pytorchs(node, category)]
    if not found:
        graph.notes.append("No kernel of PyTorch's own runs in the forward or backward pass.")
    remove(graph, dict.fromkeys(found, ()))


def _is_pytorchs(node: Node, category: Category) -> bool:
    return (
        node.kind == "compute"
        and node.pass_ in ("fwd", "bwd")
        and not node.optimizes
        and bool(node.name)
        and classify(category, node.name) == KernelClass("compute", "aten")
        and not _OF_FSDP.search(node.name)
    )
