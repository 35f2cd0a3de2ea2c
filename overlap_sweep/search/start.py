"""Where on a ladder of num_sm to look first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from overlap_sweep.search.cell import ORDINAL, Candidate
from overlap_sweep.search.trail import Trail

Start = Callable[[Trail, str, Sequence[Candidate]], Candidate]
"""Of the cell with this trail and this slot: which of the ladder's candidates to measure first."""

USUAL_NUM_SM = 16
"""What Transformer Engine gives to every kernel that moves data by SMs: about what fills the links."""


def usual(trail: Trail, slot: str, ladder: Sequence[Candidate]) -> Candidate:
    """The count closest to the library's own."""
    return _closest(ladder, slot, USUAL_NUM_SM)


def modelled(trail: Trail, slot: str, ladder: Sequence[Candidate]) -> Candidate:
    """The fewest SMs at which the communication would take no longer than the GEMM beside it.

    A collective takes bytes / link rate with the usual count, and inversely longer with less; the GEMM takes FLOPs /
    GEMM rate. Both times are those of the baselines: what `none` takes beyond the floor, and the floor.
    """
    gemms = 2 if slot.endswith(("dgrad", "wgrad")) else 1
    gemm_us = trail.baselines.floor_us / gemms
    balanced = USUAL_NUM_SM * trail.baselines.collective_us / gemm_us
    return (
        usual(trail, slot, ladder)
        if math.isnan(balanced)
        else _closest(ladder, slot, min(USUAL_NUM_SM, max(1.0, balanced)))
    )


def _closest(ladder: Sequence[Candidate], slot: str, num_sm: float) -> Candidate:
    return min(ladder, key=lambda candidate: abs(math.log2(candidate.settings[slot][ORDINAL] / num_sm)))


STARTS: dict[str, Start] = {"usual": usual, "model": modelled}


def collectives(operator_kind: str, pass_name: str) -> int:
    """How many collectives a pass has: backward, a column-parallel operator gathers its input and scatters dgrad's
    output."""
    return 2 if (operator_kind, pass_name) == ("column", "bwd") else 1
